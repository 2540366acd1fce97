"""Mixtures of experts on two GPUs: each rank has a part of every expert, or whole ones.

Also models with recurrent layers, which are whole on every rank. In float32 their tokens are the
oracle's; in bfloat16, where decode steps of experts are captured, they come near.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import pytest
import torch

from configs.engine import AttentionKind, Device, EngineConfig
from configs.model import DType, ModelConfig
from modeling.models.generic.experts import SPREAD_ON_GPUS
from modeling.runner.load_paged import load_paged
from sharding.group import TensorParallel
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.stepping import generate
from tests.modeling.test_cuda_generic import Batch, agree, batch, come_near, rounding
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern keys:RuntimeWarning"),
]

MODELS: dict[str, list[tuple[str, str, tuple[str, ...]]]] = {
    "plain": [
        ("mixture", "qwen3_moe", (BASE, "parameters", "everything", "router")),
        ("mixture", "mixtral", (BASE, "parameters", "everything")),
        ("converted", "qwen3_moe", (BASE, "modules", "trained")),
    ],
    "others": [
        ("mixture", "gpt_oss", (BASE, "parameters", "everything")),
        ("mixture", "deepseek_v3", (BASE, "parameters", "shared")),
    ],
    "recurrent": [
        ("mixers", each, (BASE, "r8"))
        for each in ("qwen3_5_text", "lfm2", "falcon_h1", "granite_hybrid", "kimi_linear")
    ],
}
"""(family, variant, who shares the batch)."""


@dataclass(frozen=True)
class Task:
    """A batch, and how far its type is from the truth on a CPU; none for float32."""

    name: str
    config: EngineConfig
    batch: Batch
    roundings: Sequence[float]


def tasks(world: World, models: str, spread: bool) -> list[Task]:
    """Return those of float32 first; of whole experts those that are not refused."""
    made = []
    for family, variant, names in MODELS[models]:
        if spread and variant not in SPREAD_ON_GPUS:
            continue
        own = batch(world, family, variant, names)
        for dtype in (DType.FLOAT32, DType.BFLOAT16):
            config = engine_config(
                own.model,
                model=ModelConfig(id=str(own.model), dtype=dtype),
                device=Device.CUDA,
                attention=AttentionKind.TRITON,
                expert_parallel=spread,
            )
            roundings = rounding(own) if dtype is DType.BFLOAT16 else ()
            made.append(Task(f"{family} {variant} {dtype.value}", config, own, roundings))
    return sorted(made, key=lambda each: bool(each.roundings))


def answer(tasks: Sequence[Task], group: TensorParallel, device: torch.device) -> None:
    """Run all tasks one after the other, as one rank; AssertionError names those that differ."""
    assert not torch.backends.cuda.matmul.allow_tf32
    wrong = []
    for each in tasks:
        runner = load_paged(each.config, group, device).allocate()
        poison(runner)
        place_all(runner, each.batch.adapters, group)
        answers = generate(runner, each.batch.asked, NUM_BLOCKS, BLOCK_SIZE)
        try:
            if each.roundings:
                come_near(answers, each.batch.truths, each.roundings)
            else:
                agree(answers, each.batch.truths)
            assert bool(runner.num_captured) == runner._forward.model.capturable
            print(f"rank {group.rank}: {each.name} agrees", flush=True)
        except AssertionError as error:
            wrong.append(f"{each.name}: {error}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("models", MODELS)
@pytest.mark.parametrize("spread", [False, True])
def test_two_gpus(world: World, spread: bool, models: str) -> None:
    """spread: whether ranks have whole experts."""
    if not (asked := tasks(world, models, spread)):
        pytest.skip("whole experts of these types are refused")
    run_cuda_ranks(2, partial(answer, asked))
