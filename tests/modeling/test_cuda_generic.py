"""Families paged by transformers' own modules on a GPU, fused and captured, beside the oracle."""

import logging
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import wraps
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.models.lfm2.modeling_lfm2 import Lfm2ShortConv
from transformers.models.phi.modeling_phi import PhiMLP

from configs.engine import AttentionKind, CacheConfig, CudaGraphs, Device
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.models.generic import experts
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints_generic import MIXTURES
from tests.modeling.models.sweep import ROUNDING
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    full_logprobs,
    place_all,
    poison,
)
from tests.modeling.runner.test_recurrent_graphs import (
    asked_of_recurrent_layers,
    counted_replays,
    ready,
    states,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import Truth, prompt_truth

pytestmark = pytest.mark.gpu

VARIANTS = [
    "gemma2",
    "gemma3_text",
    "gemma4_text",
    "gemma4_equal",
    "olmo2",
    "glm4",
    "phi",
    "cohere",
]
VARIANTS += ["ministral3", "nemotron", "qwen3_moe", "gpt_oss", "deepseek_v3"]
VARIANTS += ["diffllama", "hrm_text"]
WITHOUT_EXPERTS = ["bamba", "falcon_h1", "lfm2", "olmo_hybrid", "qwen3_5_text"]
RECURRENT = [*WITHOUT_EXPERTS, "granite_hybrid", "kimi_linear", "minimax", "nemotron_h"]
RECURRENT += ["qwen3_next", "zaya"]
"""With recurrent layers; in float32 steps with experts are not captured."""
VARIANTS += RECURRENT
NAMES = [BASE, "r8"]
ROUTED = [BASE, "r8", "parameters", "router", "everything"]
EXPERTS = [BASE, "r8", "parameters", "down"]


@dataclass(frozen=True)
class Batch:
    """A model, who shares a batch, what is asked, and what the float64 oracle says."""

    model: Path
    adapters: Sequence[Path]
    asked: Sequence[Asked]
    truths: Sequence[Truth]


def batch(world: World, family: str, variant: str, names: Sequence[str]) -> Batch:
    """Ask the oracle, on the CPU."""
    model = world.model(family, variant)
    folders = [world.adapter(family, variant, name) for name in names]
    told = [prompt_truth(model, folder, 9 + 6 * i) for i, folder in enumerate(folders)]
    everything = Sampling(logprobs=told[0][1].logits.shape[1])
    asked = [
        Asked(prompt, len(truth.tokens), slot=i - 1, sampling=everything, chunk=4 + i, joins_at=i)
        for i, (prompt, truth) in enumerate(told)
    ]
    adapters = [folder for folder in folders if folder is not None]
    return Batch(model, adapters, asked, [truth for _, truth in told])


def run(
    world: World,
    variant: str,
    dtype: DType,
    graphs: CudaGraphs,
    names: Sequence[str] = NAMES,
    family: str = "",
) -> tuple[list[Answer], Batch]:
    """Base and adapters in one batch, and what the oracle says."""
    if not family:
        family = "mixture" if variant in MIXTURES or names is not NAMES else "generic"
        family = "mixers" if variant in RECURRENT and names is NAMES else family
    told = batch(world, family, variant, names)
    settings = ModelConfig(id=str(told.model), dtype=dtype)
    # FlashInfer compiles a kernel for each family, which says nothing of experts.
    kind = AttentionKind.AUTO if names is NAMES else AttentionKind.TRITON
    config = engine_config(
        told.model, model=settings, device=Device.CUDA, cuda_graphs=graphs, attention=kind
    )
    runner = load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()
    is_captured = graphs is not CudaGraphs.NONE and runner._forward.model.capturable
    assert bool(runner.report.captured_rows) == is_captured
    poison(runner)
    place_all(runner, told.adapters)
    replays = is_captured and family == "mixers"
    with counted_replays(runner, 16) if replays else nullcontext():
        return generate(runner, told.asked, NUM_BLOCKS, BLOCK_SIZE), told


@pytest.mark.parametrize("graphs", [CudaGraphs.NONE, CudaGraphs.ALL])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gives_the_oracles_tokens(world: World, variant: str, graphs: CudaGraphs) -> None:
    answers, told = run(world, variant, DType.FLOAT32, graphs)
    agree(answers, told.truths)


@pytest.mark.parametrize("variant", ["glm4_moe_lite", "kimi_linear", "longcat_flash"])
def test_latents(world: World, variant: str) -> None:
    """Keys as they are cached, of layers that rotate neighbours, none, and have two attentions."""
    for dtype, graphs in product(
        (DType.FLOAT32, DType.BFLOAT16), (CudaGraphs.NONE, CudaGraphs.ALL)
    ):
        answers, told = run(world, variant, dtype, graphs, [BASE, "plain"], "latents")
        if dtype is DType.FLOAT32:
            agree(answers, told.truths)
        else:
            come_near(answers, told.truths, rounding(told))


@pytest.mark.parametrize("variant", sorted(experts.ON_GPUS))
def test_adapters_of_experts(world: World, variant: str) -> None:
    """In bfloat16 kernels multiply them, in captured steps too."""
    answers, told = run(world, variant, DType.FLOAT32, CudaGraphs.ALL, ROUTED)
    agree(answers, told.truths)
    for names in (ROUTED, EXPERTS):
        answers, told = run(world, variant, DType.BFLOAT16, CudaGraphs.ALL, names)
        come_near(answers, told.truths, rounding(told))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_comes_near(world: World, variant: str) -> None:
    """As long as the tokens agree, logprobs do, to what bfloat16 has."""
    answers, told = run(world, variant, DType.BFLOAT16, CudaGraphs.ALL)
    come_near(answers, told.truths, [0.0] * len(answers))


def recurrent(world: World, variant: str, graphs: CudaGraphs, **changes: Any) -> ModelRunner:
    """A runner in float32 with the adapter of `asked_of_recurrent_layers`."""
    model = world.model("mixers", variant)
    settings = ModelConfig(id=str(model), dtype=DType.FLOAT32)
    kind = AttentionKind.TRITON
    config = engine_config(
        model, model=settings, device=Device.CUDA, cuda_graphs=graphs, attention=kind, **changes
    )
    runner = load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()
    ready(world, variant, runner)
    return runner


def tokens(runner: ModelRunner) -> list[list[int]]:
    answers = generate(runner, asked_of_recurrent_layers(), NUM_BLOCKS, BLOCK_SIZE)
    return [answer.tokens for answer in answers]


@pytest.mark.parametrize("variant", WITHOUT_EXPERTS)
def test_replays_of_recurrent_layers_are_steps(world: World, variant: str) -> None:
    """Prompts of one token, chunks of one, preempted requests, padded sizes, an adapter."""
    launched = recurrent(world, variant, CudaGraphs.NONE)
    expected = tokens(launched)
    assert launched.num_captured == 0
    for graphs in (CudaGraphs.DECODE, CudaGraphs.ALL):
        runner = recurrent(world, variant, graphs)
        with counted_replays(runner, 16):
            assert tokens(runner) == expected
        for own, other in zip(states(runner), states(launched), strict=True):
            torch.testing.assert_close(own, other, equal_nan=True, rtol=1e-3, atol=1e-3)


def test_the_memory_of_recurrent_graphs_is_measured(world: World) -> None:
    cache = CacheConfig(block_size=BLOCK_SIZE, device_memory_fraction=0.5)
    runner = recurrent(world, "qwen3_5_text", CudaGraphs.ALL, cache=cache)
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.55 * total
    with counted_replays(runner, 16):
        assert all(tokens(runner))


def test_recurrent_layers_that_read_on_the_host_are_launched(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected = tokens(recurrent(world, "lfm2", CudaGraphs.NONE))
    real = Lfm2ShortConv.forward

    @wraps(real)
    def forward(self: Any, hidden_states: Tensor, *arguments: Any, **options: Any) -> Tensor:
        assert hidden_states.sum().item() is not None
        made: Tensor = real(self, hidden_states, *arguments, **options)
        return made

    monkeypatch.setattr(Lfm2ShortConv, "forward", forward)
    with caplog.at_level(logging.INFO, logger="loray.modeling"):
        runner = recurrent(world, "lfm2", CudaGraphs.ALL)
    assert runner.report.captured_rows == ()
    assert "transformers' Lfm2ShortConv cannot be captured" in caplog.text
    assert tokens(runner) == expected
    assert runner.num_captured == 0


def test_layers_that_read_on_the_host_are_launched(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    expected, _ = run(world, "phi", DType.FLOAT32, CudaGraphs.NONE)
    real: Any = PhiMLP.forward

    @wraps(real)
    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        assert hidden_states.sum().item() is not None
        made: Tensor = real(self, hidden_states)
        return made

    monkeypatch.setattr(PhiMLP, "forward", forward)
    with caplog.at_level(logging.INFO, logger="loray.modeling"):
        answers, _ = run(world, "phi", DType.FLOAT32, CudaGraphs.ALL)
    assert "transformers' PhiModel cannot be captured" in caplog.text
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in expected]


def agree(answers: Sequence[Answer], truths: Sequence[Truth]) -> None:
    """Compare tokens and logprobs in float32."""
    for answer, truth in zip(answers, truths, strict=True):
        assert answer.tokens == truth.tokens
        assert (full_logprobs(answer) - truth.logprobs).abs().max() < 5e-4


def distances(answers: Sequence[Answer], truths: Sequence[Truth]) -> list[Tensor]:
    """How far each row of logprobs is from the truth (root mean square), until tokens part."""
    found = []
    for answer, truth in zip(answers, truths, strict=True):
        pairs = zip(answer.tokens, truth.tokens, strict=True)
        same = next((i for i, (ours, theirs) in enumerate(pairs) if ours != theirs), None)
        error = (full_logprobs(answer) - truth.logprobs)[: None if same is None else same + 1]
        found.append(error.square().mean(1).sqrt())
    return found


def rounding(told: Batch) -> list[float]:
    """How far the type itself is from the truth, on a CPU."""
    settings = ModelConfig(id=str(told.model), dtype=DType.BFLOAT16)
    config = engine_config(told.model, model=settings)
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    place_all(runner, told.adapters)
    answers = generate(runner, told.asked, NUM_BLOCKS, BLOCK_SIZE)
    return [float(rows.median()) for rows in distances(answers, told.truths)]


def come_near(
    answers: Sequence[Answer], truths: Sequence[Truth], roundings: Sequence[float]
) -> None:
    """Compare logprobs in bfloat16 until tokens part; roundings: see `rounding`.

    Where a router's choice is near a tie, rounding chooses another expert, and logprobs jump: in
    few rows, or in all behind a prompt's token. So rows count by their median, and one request may
    be farther off.
    """
    rows = [rows.median() for rows in distances(answers, truths)]
    beyond = sorted(float(row) - 2 * own for row, own in zip(rows, roundings, strict=True))
    assert beyond[-2] < ROUNDING, rows
