"""GPT-2, OPT and GPT-NeoX on a GPU: float32 gives the oracle's tokens, every backend comes near."""

from pathlib import Path
from typing import Any

import pytest

from configs.engine import AttentionKind, CacheConfig, Device
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from sharding.group import SingleRank
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    FLASH_ATTN_BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    full_logprobs,
    place_all,
    poison,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import Truth, prompt_truth

pytestmark = pytest.mark.gpu

MODELS = [
    ("gpt2", "plain"),
    ("gpt2", "upcast"),
    ("gpt2", "head_64"),
    ("opt", "plain"),
    ("opt", "post_norm"),
    ("opt", "head_64"),
    ("gpt_neox", "parallel"),
    ("gpt_neox", "sequential"),
    ("gpt_neox", "head_64"),
    ("gpt_neox", "head_80"),
]
NAMES = [BASE, "r4", "r16", "rows"]
BACKENDS = [AttentionKind.SDPA, AttentionKind.FLASHINFER, AttentionKind.FLASH_ATTN]


def run(
    world: World, family: str, variant: str, dtype: DType, **changes: Any
) -> tuple[list[Answer], list[Truth]]:
    """All of NAMES in one batch, and what the float32 oracle says."""
    model = world.model(family, variant)
    folders: list[Path | None] = [world.adapter(family, variant, name) for name in NAMES]
    told = [prompt_truth(model, folder, 7 + 4 * i) for i, folder in enumerate(folders)]
    fields = {"model": ModelConfig(id=str(model), dtype=dtype), "device": Device.CUDA, **changes}
    runner = load_paged(
        engine_config(model, **fields), SingleRank(), pick_device(Device.CUDA)
    ).allocate()
    poison(runner)
    place_all(runner, [folder for folder in folders if folder is not None])
    everything = Sampling(logprobs=told[0][1].logits.shape[1])
    requests = [
        Asked(prompt, len(truth.tokens), slot=i - 1, sampling=everything, chunk=3 + i, joins_at=i)
        for i, (prompt, truth) in enumerate(told)
    ]
    answers = generate(runner, requests, NUM_BLOCKS, runner._config.cache.block_size)
    return answers, [truth for _, truth in told]


@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_greedy_tokens_are_the_oracles(world: World, family: str, variant: str) -> None:
    answers, truths = run(world, family, variant, DType.FLOAT32)
    assert [answer.tokens for answer in answers] == [truth.tokens for truth in truths]
    for answer, truth in zip(answers, truths, strict=True):
        error = (full_logprobs(answer) - truth.logprobs).abs().max()
        assert error < 5e-4


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_bfloat16_comes_near(
    world: World, family: str, variant: str, backend: AttentionKind
) -> None:
    """As long as the tokens agree, logprobs do, to what bfloat16 has."""
    block_size = FLASH_ATTN_BLOCK_SIZE if backend is AttentionKind.FLASH_ATTN else BLOCK_SIZE
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=block_size)
    try:
        answers, truths = run(
            world, family, variant, DType.BFLOAT16, attention=backend, cache=cache
        )
    except ValueError as lack:
        pytest.skip(str(lack))
    for answer, truth in zip(answers, truths, strict=True):
        pairs = zip(answer.tokens, truth.tokens, strict=True)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        error = (full_logprobs(answer) - truth.logprobs)[: None if same is None else same + 1]
        assert error.square().mean().sqrt() < 0.1
