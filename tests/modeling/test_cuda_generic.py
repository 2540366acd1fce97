"""Families paged by transformers' own modules on a GPU, fused and captured, beside the oracle."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor

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

pytestmark = pytest.mark.gpu

VARIANTS = ["gemma2", "gemma3_text", "olmo2", "glm4", "phi", "qwen3_moe", "gpt_oss", "deepseek_v3"]
# With recurrent layers:
VARIANTS += ["qwen3_5_text", "qwen3_next", "granite_hybrid", "lfm2"]
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
) -> tuple[list[Answer], Batch]:
    """Base and adapters in one batch, and what the oracle says."""
    family = "mixture" if variant in MIXTURES or names is not NAMES else "generic"
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
    return generate(runner, told.asked, NUM_BLOCKS, BLOCK_SIZE), told


@pytest.mark.parametrize("graphs", [CudaGraphs.NONE, CudaGraphs.ALL])
@pytest.mark.parametrize("variant", VARIANTS)
def test_float32_gives_the_oracles_tokens(world: World, variant: str, graphs: CudaGraphs) -> None:
    answers, told = run(world, variant, DType.FLOAT32, graphs)
    agree(answers, told.truths)


@pytest.mark.parametrize("variant", sorted(experts.ON_GPUS))
def test_adapters_of_experts(world: World, variant: str) -> None:
    """In bfloat16 kernels multiply them, in captured steps too, where they were compared."""
    answers, told = run(world, variant, DType.FLOAT32, CudaGraphs.ALL, ROUTED)
    agree(answers, told.truths)
    if variant in experts.DELTAS_BY_KERNELS:
        for names in (ROUTED, EXPERTS):
            answers, told = run(world, variant, DType.BFLOAT16, CudaGraphs.ALL, names)
            come_near(answers, told.truths, rounding(told))


@pytest.mark.parametrize("variant", VARIANTS)
def test_bfloat16_comes_near(world: World, variant: str) -> None:
    """As long as the tokens agree, logprobs do, to what bfloat16 has."""
    answers, told = run(world, variant, DType.BFLOAT16, CudaGraphs.ALL)
    come_near(answers, told.truths, [0.0] * len(answers))


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
    """How far the type itself is from the truth, on a CPU.

    Where a router's choice is near a tie, rounding chooses another expert, and logprobs jump.
    """
    settings = ModelConfig(id=str(told.model), dtype=DType.BFLOAT16)
    config = engine_config(told.model, model=settings)
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    place_all(runner, told.adapters)
    answers = generate(runner, told.asked, NUM_BLOCKS, BLOCK_SIZE)
    return [float(rows.square().mean().sqrt()) for rows in distances(answers, told.truths)]


def come_near(
    answers: Sequence[Answer], truths: Sequence[Truth], roundings: Sequence[float]
) -> None:
    """Compare logprobs in bfloat16 until tokens part; roundings: see `rounding`.

    What is wrong moves most rows, another expert few of them.
    """
    for rows, own in zip(distances(answers, truths), roundings, strict=True):
        assert rows.median() < 0.1, rows
        assert rows.square().mean().sqrt() < 0.1 + 2 * own, rows
