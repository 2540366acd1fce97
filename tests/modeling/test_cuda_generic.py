"""Families paged by transformers' own modules on a GPU, fused and captured, beside the oracle."""

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from configs.engine import AttentionKind, CudaGraphs, Device
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.models.generic import experts
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from sharding.group import SingleRank
from tests.checkpoints_generic import MIXTURES
from tests.modeling.parity import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    full_logprobs,
    place_all,
    poison,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import Truth, prompt_truth

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

VARIANTS = ["gemma2", "gemma3_text", "olmo2", "glm4", "phi", "qwen3_moe", "gpt_oss", "deepseek_v3"]
NAMES = [BASE, "r8"]
ROUTED = [BASE, "r8", "parameters", "router", "everything"]


def run(
    world: World,
    variant: str,
    dtype: DType,
    graphs: CudaGraphs,
    names: Sequence[str] = NAMES,
) -> tuple[list[Answer], list[Truth]]:
    """Base and adapters in one batch, and what the float64 oracle says."""
    family = "mixture" if variant in MIXTURES or names is not NAMES else "generic"
    model = world.model(family, variant)
    folders: list[Path | None] = [world.adapter(family, variant, name) for name in names]
    told = [prompt_truth(model, folder, 9 + 6 * i) for i, folder in enumerate(folders)]
    settings = ModelConfig(id=str(model), dtype=dtype)
    # FlashInfer compiles a kernel for each family, which says nothing of experts.
    kind = AttentionKind.AUTO if names is NAMES else AttentionKind.TRITON
    config = engine_config(
        model, model=settings, device=Device.CUDA, cuda_graphs=graphs, attention=kind
    )
    runner = load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()
    is_captured = graphs is not CudaGraphs.NONE and runner._forward.model.capturable
    assert bool(runner.report.captured_rows) == is_captured
    poison(runner)
    place_all(runner, [folder for folder in folders if folder is not None])
    everything = Sampling(logprobs=told[0][1].logits.shape[1])
    requests = [
        Asked(prompt, len(truth.tokens), slot=i - 1, sampling=everything, chunk=4 + i, joins_at=i)
        for i, (prompt, truth) in enumerate(told)
    ]
    return generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE), [truth for _, truth in told]


@pytest.mark.parametrize("graphs", [CudaGraphs.NONE, CudaGraphs.ALL])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gives_the_oracles_tokens(world: World, variant: str, graphs: CudaGraphs) -> None:
    answers, truths = run(world, variant, DType.FLOAT32, graphs)
    assert [answer.tokens for answer in answers] == [truth.tokens for truth in truths]
    for answer, truth in zip(answers, truths, strict=True):
        assert (full_logprobs(answer) - truth.logprobs).abs().max() < 5e-4


@pytest.mark.parametrize("variant", sorted(experts.ON_GPUS))
def test_adapters_of_experts(world: World, variant: str) -> None:
    """In bfloat16 kernels multiply them, in captured steps too, where they were compared."""
    said = run(world, variant, DType.FLOAT32, CudaGraphs.ALL, ROUTED)
    for answer, truth in zip(*said, strict=True):
        assert answer.tokens == truth.tokens
        assert (full_logprobs(answer) - truth.logprobs).abs().max() < 5e-4
    if variant == "qwen3_moe":
        _come_near(*run(world, variant, DType.BFLOAT16, CudaGraphs.ALL, ROUTED))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_comes_near(world: World, variant: str) -> None:
    """As long as the tokens agree, logprobs do, to what bfloat16 has."""
    _come_near(*run(world, variant, DType.BFLOAT16, CudaGraphs.ALL))


def _come_near(answers: Sequence[Answer], truths: Sequence[Truth]) -> None:
    for answer, truth in zip(answers, truths, strict=True):
        pairs = zip(answer.tokens, truth.tokens, strict=True)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        error = (full_logprobs(answer) - truth.logprobs)[: None if same is None else same + 1]
        assert error.square().mean().sqrt() < 0.1
