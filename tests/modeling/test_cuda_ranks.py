"""Every family on one and two GPUs in float32: the oracle's tokens, ranks joined by NCCL."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.engine import AllReduce, AttentionKind, Device, EngineConfig
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank, TensorParallel
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    World,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.stepping import Asked, generate
from tests.oracle import prompt_truth
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

MIXED = (BASE, "r4", "rows", "columns")
ENDS = (BASE, "layers", "everything", "whole_head", "whole_embedding")
MODELS = [
    ("llama", "gqa", (BASE, "r8", "rows", "columns")),
    ("llama", "odd_vocab", (BASE, "r24", "patterns")),
    ("relative", "qwen3_window", (BASE, "r8", "rows")),
    ("relative", "granite", (BASE, "r8", "rows")),
    ("fused", "phi3", (BASE, "r8", "columns")),
    ("gpt2", "plain", MIXED),
    ("gpt2", "odd_vocab", MIXED),
    ("opt", "plain", MIXED),
    ("opt", "projected", MIXED),
    ("gpt_neox", "parallel", MIXED),
    ("gpt_neox", "sequential", MIXED),
    ("llama_ends", "odd_vocab_tied", ENDS),
    ("gpt2_ends", "untied", ENDS),
    ("opt_ends", "plain", ENDS),
    ("gpt_neox_ends", "parallel", ENDS),
]
"""(family, variant, who shares the batch)."""


@dataclass(frozen=True)
class Task:
    """A model, the adapters of its batch, what is asked, and the oracle's tokens."""

    name: str
    config: EngineConfig
    adapters: Sequence[Path]
    asked: Sequence[Asked]
    tokens: Sequence[Sequence[int]]


def task(world: World, family: str, variant: str, names: Sequence[str]) -> Task:
    """Ask the oracle, on the CPU."""
    model = world.model(family, variant)
    folders = [world.adapter(family, variant, name) for name in names]
    told = [prompt_truth(model, folder, 7 + 4 * i) for i, folder in enumerate(folders)]
    is_open = family.endswith("_ends")
    adapters = AdaptersConfig(
        device_pages=40,
        host_bytes=2**26,
        max_device_adapters=10,
        max_rank=64,
        vocabulary=is_open,
        vocabulary_copies=2 if is_open else 0,
    )
    return Task(
        name=f"{family} {variant}",
        config=engine_config(
            model, device=Device.CUDA, attention=AttentionKind.SDPA, adapters=adapters
        ),
        adapters=[folder for folder in folders if folder is not None],
        asked=[
            Asked(prompt, len(truth.tokens), slot=i - 1, chunk=3 + i, joins_at=i)
            for i, (prompt, truth) in enumerate(told)
        ],
        tokens=[truth.tokens for _, truth in told],
    )


@pytest.fixture(scope="module")
def tasks(world: World) -> list[Task]:
    return [task(world, family, variant, names) for family, variant, names in MODELS]


def answer(tasks: Sequence[Task], group: TensorParallel, device: torch.device) -> None:
    """Run all tasks one after the other, as one rank; AssertionError names those that differ."""
    assert not torch.backends.cuda.matmul.allow_tf32
    wrong = []
    for each in tasks:
        runner = load_paged(each.config, group, device).allocate()
        poison(runner)
        place_all(runner, each.adapters)
        answers = generate(runner, each.asked, NUM_BLOCKS, BLOCK_SIZE)
        found = [answer.tokens for answer in answers]
        if found != each.tokens:
            wrong.append(f"{each.name}: {found}, not {each.tokens}")
    assert not wrong, "\n".join(wrong)


def test_one_gpu(tasks: list[Task]) -> None:
    answer(tasks, SingleRank(), torch.device("cuda", 0))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("all_reduce", [AllReduce.NCCL, AllReduce.AUTO])
def test_two_gpus(tasks: list[Task], all_reduce: AllReduce) -> None:
    """All families in one group: processes take longer to start than these models to answer."""
    run_cuda_ranks(2, partial(answer, tasks), all_reduce)


@pytest.mark.skipif(torch.cuda.device_count() < 4, reason="needs four CUDA devices")
@pytest.mark.parametrize("all_reduce", [AllReduce.NCCL, AllReduce.AUTO])
def test_four_gpus(tasks: list[Task], all_reduce: AllReduce) -> None:
    run_cuda_ranks(4, partial(answer, tasks), all_reduce)
