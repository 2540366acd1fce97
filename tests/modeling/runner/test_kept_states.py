"""Prefixes of models with recurrent layers: requests that go on from kept states answer alike."""

from functools import partial
from typing import Any

import msgspec
import pytest

from configs.engine import CacheConfig
from configs.wire.plan import Capacity
from deployments.rank import host
from modeling.models.generic.recurrent import RecurrentLayers
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from modeling.runner.report import RunnerReport
from sharding.group import SingleRank, TensorParallel
from tests.modeling import scheduled
from tests.modeling.parity.comparison import World, engine_config
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, CPU, NUM_BLOCKS
from tests.modeling.runner.test_recurrent_graphs import FEW, TYPES, ready
from tests.modeling.scheduled import WHOLE, Ranks
from tests.modeling.stepping import Asked
from tests.ranks import run_in_memory
from tests.sweeps import swept

PREFIX = [(11 * i) % 90 + 3 for i in range(5 * BLOCK_SIZE)]
TAILS = [[(5 * i + 7 * j) % 80 + 4 for j in range(4 * BLOCK_SIZE + i)] for i in range(4)]


@pytest.fixture(autouse=True)
def kept_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts are short here."""

    def capacity_of(report: RunnerReport) -> Capacity:
        return msgspec.structs.replace(host.capacity_of(report), kept_after=4 * BLOCK_SIZE)

    monkeypatch.setattr(scheduled, "capacity_of", capacity_of)


def start(
    world: World, variant: str, kept: int, group: TensorParallel | None = None
) -> ModelRunner:
    """A runner over NaN with room for so many kept states."""
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE, kept_states=kept)
    config = engine_config(world.model("mixers", variant), cache=cache)
    runner = load_paged(config, group or SingleRank(), CPU).allocate()
    ready(world, variant, runner, group)
    return runner


def ranks_of(
    world: World, variant: str, kept: int, chunk: int = WHOLE, group: TensorParallel | None = None
) -> Ranks:
    folder = world.adapter("mixers", variant, "r8")
    assert folder is not None
    return Ranks(partial(start, world, variant, kept, group), [folder], chunk, group)


def stories() -> list[list[Asked]]:
    """Requests that are there at once; later ones begin as those before did.

    Base and adapter, which share nothing; a prompt again, longer, shorter by a token, another way
    behind a prefix; preempted meanwhile.
    """
    prompts = [[*PREFIX, *tail] for tail in TAILS]
    first = [Asked(prompts[0], 6, slot=-1), Asked(prompts[0], 6, slot=0)]
    second = [Asked(prompts[1], 5, slot=slot) for slot in (-1, 0)]
    third = [Asked(prompts[2], 5), Asked(prompts[0], 9), Asked(prompts[0][:-1], 4)]
    third += [Asked([*prompts[1], *prompts[0][:9]], 5, slot=0), Asked(PREFIX, 3)]
    last = [Asked(prompts[3], 7, slot=slot) for slot in (-1, 0, -1)]
    return [first, second, third, last]


def told(ranks: Ranks, lost_at: int | None = None) -> tuple[list[list[int]], list[int]]:
    """Each request's answer, and how many tokens of its prompt came from the cache."""
    index = 0
    for number, together in enumerate(stories()):
        for asked in together:
            ranks.ask(index, asked)
            index += 1
        if number == lost_at:
            ranks.run(2)
            ranks.lose()
        ranks.run()
    keys = [("r", each) for each in range(index)]
    tokens = [ranks.answers[key].tokens for key in keys]
    return tokens, [ranks.ended[key].cached_tokens for key in keys]


@pytest.mark.parametrize("variant", swept(TYPES, lambda variant: variant in FEW))
def test_answers_are_those_without_shared_prefixes(world: World, variant: str) -> None:
    expected, none = told(ranks_of(world, variant, 0))
    assert not any(none)
    tokens, cached = told(ranks_of(world, variant, 8))
    assert tokens == expected
    assert cached[:4] == [0, 0, 0, 0]
    assert all(cached[9:]), cached
    assert sum(map(bool, cached)) >= 7, cached


@pytest.mark.parametrize(("chunk", "kept"), [(3, 1), (7, 2), (2 * BLOCK_SIZE, 5)])
def test_prompts_in_pieces_and_little_room(world: World, chunk: int, kept: int) -> None:
    expected, _ = told(ranks_of(world, "qwen3_5_text", 0))
    assert told(ranks_of(world, "qwen3_5_text", kept, chunk))[0] == expected


def test_ranks_that_start_anew_have_kept_nothing(world: World) -> None:
    expected, _ = told(ranks_of(world, "qwen3_5_text", 0))
    for lost_at in (1, 2):
        tokens, _ = told(ranks_of(world, "qwen3_5_text", 8), lost_at)
        assert tokens == expected, lost_at


@pytest.mark.parametrize("variant", ["qwen3_5_text", "falcon_h1"])
def test_two_ranks_keep_alike(world: World, variant: str) -> None:
    expected, _ = told(ranks_of(world, variant, 0))

    def on_rank(group: TensorParallel) -> list[list[int]]:
        return told(ranks_of(world, variant, 8, group=group))[0]

    assert run_in_memory(2, on_rank) == [expected, expected]


def test_states_that_are_not_copied_are_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The comparison above finds a request that goes on from another's states."""
    expected, _ = told(ranks_of(world, "qwen3_5_text", 0))
    real = RecurrentLayers.go_on

    def wrong(self: RecurrentLayers, batch_slot: int, kept: int) -> None:
        real(self, batch_slot, 1 - min(kept, 1))

    def nothing(*_: Any) -> None:
        pass

    for fault in (wrong, nothing):
        monkeypatch.setattr(RecurrentLayers, "go_on", fault)
        assert told(ranks_of(world, "qwen3_5_text", 8))[0] != expected
