"""A step's collectives: the sums of its layers, the embedding's, the logits' gather, no other."""

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch

from configs.adapters import AdaptersConfig
from configs.engine import EngineConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel
from tests.modeling.parity.comparison import World, engine_config, place_all
from tests.ranks import run_in_memory, run_ranks
from tests.sharding.views import CountedRanks

LAYERS = 2
SUMS = [
    ("llama", "gqa", 2),
    ("llama", "tied", 2),
    ("relative", "qwen3", 2),
    ("fused", "phi3", 2),
    ("gpt2", "plain", 2),
    ("opt", "plain", 2),
    ("opt", "projected", 2),
    ("gpt_neox", "sequential", 2),
    # Attention and MLP share a sum where they share a residual.
    ("gpt_neox", "parallel", 1),
]
"""Family, variant, and the sums of one of its layers."""

SPLIT = ("llama", "relative", "fused")
"""Families that leave out the last layer's sums where no token is read."""


def joins(slots: list[int], sampling: Sampling) -> list[RequestJoin]:
    return [RequestJoin(i, [1, 2, 3, 4 + i], 4, slot, sampling) for i, slot in enumerate(slots)]


def counted(group: CountedRanks, runner: ModelRunner, batch: ForwardBatch) -> Counter[str]:
    group.calls.clear()
    runner.step(batch).wait()
    return Counter(group.calls)


@pytest.mark.parametrize(("family", "variant", "sums"), SUMS)
def test_a_step_sums_and_gathers_no_more_than_it_must(
    world: World, family: str, variant: str, sums: int
) -> None:
    model = world.model(family, variant)
    adapter = world.adapter(family, variant, "rows")
    assert adapter is not None
    sampling = Sampling(temperature=1.0, seed=3, top_p=0.9, logprobs=2)

    def on_rank(ranks: TensorParallel) -> list[Counter[str]]:
        group = CountedRanks(ranks)
        runner = load_paged(engine_config(model), group, torch.device("cpu")).allocate()
        group.calls.clear()
        place_all(runner, [adapter])
        assert group.calls == []
        found = []
        for slots in ([-1, -1], [0, -1], [0, 0]):
            join = joins(slots, sampling)
            whole = [StepRow(i, 0, 4, [2 * i], True) for i in range(2)]
            found.append(counted(group, runner, ForwardBatch(join, whole)))
            decode = [StepRow(i, 4, 1, [], True) for i in range(2)]
            found.append(counted(group, runner, ForwardBatch([], decode)))
        join = joins([0, -1], sampling)
        part = [StepRow(i, 0, 3, [2 * i], False) for i in range(2)]
        found.append(counted(group, runner, ForwardBatch(join, part)))
        return found

    expected = Counter(sum=1 + sums * LAYERS, gather=1)
    nothing_sampled = Counter(sum=1 + sums * LAYERS - sums * (family in SPLIT))
    for found in run_ranks(2, on_rank):
        assert found == [expected] * 6 + [nothing_sampled]


def mixed_step(config: EngineConfig, adapter: Path, ranks: TensorParallel) -> Counter[str]:
    """The collectives of a step with a row of the adapter and one of the base model."""
    group = CountedRanks(ranks)
    runner = load_paged(config, group, torch.device("cpu")).allocate()
    place_all(runner, [adapter])
    rows = [StepRow(i, 0, 4, [2 * i], True) for i in range(2)]
    return counted(group, runner, ForwardBatch(joins([0, -1], Sampling()), rows))


def test_adapters_of_the_vocabulary_add_none(world: World) -> None:
    model = world.model("vocabulary", "gqa")
    adapter = world.adapter("vocabulary", "gqa", "everything")
    assert adapter is not None
    config = engine_config(model, adapters=AdaptersConfig(vocabulary=True, device_pages=40))
    found = run_ranks(2, partial(mixed_step, config, adapter))
    assert found == [Counter(sum=1 + 2 * LAYERS, gather=1)] * 2


@pytest.mark.parametrize("spread", [False, True])
def test_whole_experts_are_summed_as_their_parts_are(world: World, spread: bool) -> None:
    model = world.model("mixture", "qwen3_moe")
    adapter = world.adapter("mixture", "qwen3_moe", "parameters")
    assert adapter is not None
    config = engine_config(model, expert_parallel=spread)
    found = run_in_memory(2, partial(mixed_step, config, adapter))
    assert found == [Counter(sum=1 + 2 * LAYERS, gather=1)] * 2
