"""Captured decode steps with adapters of experts, on a CPU: a replay is the computation itself.

With TRITON_INTERPRET=1 in the environment (and numpy below 2.4) the deltas are those of the
kernels, without it those of torch over the same tables.
"""

import os
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank
from modeling.adapters.experts import RoutedAdapter
from modeling.adapters.product import AdapterData, ExpertDeltas, OutputSlice
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.checkpoints import SHARED
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.parity.comparison import World, engine_config, full_logprobs, place_all
from tests.modeling.runner.test_cuda_graphs import CPU, LateAdapters, capture_on_cpu, requests
from tests.modeling.stepping import generate
from tests.sweeps import swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

NUM_BLOCKS, BLOCK_SIZE = 96, 16
CASES = [
    *[("mixture", each, ("parameters", "down")) for each in ("mixtral", "gpt_oss", "granitemoe")],
    ("mixture", "qwen3_moe", ("parameters", "ranks", "r8")),
    ("mixture", "deepseek_v3", ("parameters", "shared")),
    ("converted", "qwen3_moe", ("modules", "trained", "shared")),
    ("converted", "qwen3_moe", ("few", "trained")),
]


class GatheredExperts:
    """The equation of `modeling.kernels.pairs`, all pairs at once: a tape has no loops."""

    def __init__(self, bank: AdapterBank, slots: Tensor) -> None:
        self._bank = bank
        self._slots = slots

    def add(
        self,
        y: Tensor,
        x: Tensor,
        experts: Tensor,
        tokens: Tensor,
        projection: int,
        layer: int,
        count: int,
        offset: int,
    ) -> None:
        slots, pool = self._slots[tokens], self._bank.pools[projection]
        of_map = self._bank.expert_table[:, self._bank.expert_maps[projection]]
        pages = of_map[slots.clamp(min=0), experts.clamp(max=count - 1)].long()
        used = (pages >= 0) & ((slots >= 0) & (experts < count))[:, None]
        a, bt = (
            torch.where(used[..., None, None], part[layer][pages.clamp(min=0)], 0.0)
            for part in (pool.a, pool.bt)
        )
        shrunk = torch.einsum("pi,pkri->pkr", x, a)
        y[:, offset : offset + bt.shape[-1]] += torch.einsum("pkr,pkro->po", shrunk, bt)


class LateExperts(LateAdapters):
    """With adapters of experts; see `ExpertAdapters`."""

    expert_deltas: ExpertDeltas | None = None

    def __init__(self, bank: AdapterBank) -> None:
        super().__init__(bank)
        self.slots = torch.full((512,), -1, dtype=torch.int32)

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        own = torch.from_numpy(np.repeat(np.array(slots, dtype=np.int32), lengths))
        self.slots[: len(own)] = own
        super().update(slots, lengths)
        return 1

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> AdapterData:
        if not has_experts:
            return super().batch(num_tokens, num_tiles)
        found = WithExperts(self)
        found.expert_deltas = deltas(self.bank, self.slots[:num_tokens])
        return found


class WithExperts(LateExperts):
    """The data of a step that has some."""

    def __init__(self, plan: LateExperts) -> None:
        super().__init__(plan.bank)
        self._plan = plan

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        self._plan.add(y, x, layer, targets)


def deltas(bank: AdapterBank, slots: Tensor) -> ExpertDeltas:
    if os.environ.get("TRITON_INTERPRET") != "1":
        return GatheredExperts(bank, slots)
    from modeling.kernels.pairs import PairDeltas

    pools = tuple((pool.a, pool.bt) for pool in bank.pools)
    return PairDeltas(slots, bank.expert_table, pools, bank.expert_maps)


def make_runner(world: World, family: str, variant: str, names: Sequence[str]) -> ModelRunner:
    adapters = AdaptersConfig(
        device_pages=40, max_device_adapters=3, max_rank=16, host_bytes=2**26, expert_pages=8
    )
    config = engine_config(
        world.model(family, variant),
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        adapters=adapters,
    )
    runner = load_paged(config, SingleRank(), CPU).allocate()
    folders = [world.adapter(family, variant, name) for name in names]
    parts = [each / SHARED for each in folders if each is not None]
    place_all(runner, [each if each.exists() else each.parent for each in parts])
    return runner


def interpret(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the kernels run by the interpreter, if it is on."""
    if os.environ.get("TRITON_INTERPRET") == "1":
        kernels = pytest.importorskip("modeling.kernels.pairs")
        for name in ("_SHRINK", "_EXPAND"):
            monkeypatch.setattr(kernels, name, Interpreted(getattr(kernels, name)._kernel))


@pytest.mark.parametrize(
    ("family", "variant", "names"),
    swept_rows(CASES, lambda *case: case in (CASES[0], CASES[1], CASES[-1])),
)
def test_replays_are_steps(
    world: World,
    family: str,
    variant: str,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Requests of the base and of adapters with and without factors of experts, in one batch."""
    interpret(monkeypatch)
    runner = make_runner(world, family, variant, names)
    vocab_size = runner._forward.model.vocab_size
    asked = requests((-1, *range(len(names))), sampling=Sampling(logprobs=vocab_size))
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 0
    runner._decode_graphs = capture_on_cpu(runner, adapters=LateExperts(runner._bank))
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured > 10
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), rtol=0, atol=1e-4)


@pytest.mark.parametrize(("family", "variant", "names"), CASES[1:4:2])
def test_launched_steps_by_kernels(
    world: World,
    family: str,
    variant: str,
    names: tuple[str, ...],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts too, whose tokens come in pieces."""
    interpret(monkeypatch)
    runner = make_runner(world, family, variant, names)
    vocab_size = runner._forward.model.vocab_size
    asked = requests((-1, *range(len(names))), sampling=Sampling(logprobs=vocab_size))[:4]
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    plan = LateExperts(runner._bank)
    runner._adapter_plan = plan
    runner._parts = replace(runner._parts, adapter_plan=plan)
    runner._forward.model.has_expert_kernels = True
    monkeypatch.setattr(RoutedAdapter, "add", None)
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), rtol=0, atol=1e-4)


def test_an_adapter_of_a_router_is_launched(world: World) -> None:
    runner = make_runner(world, "mixture", "qwen3_moe", ["everything"])
    runner._decode_graphs = capture_on_cpu(runner, adapters=LateExperts(runner._bank))
    generate(runner, requests((0,)), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 0


def test_steps_that_no_graph_has_experts_of_are_launched(world: World) -> None:
    runner = make_runner(world, "mixture", "qwen3_moe", ["parameters"])
    runner._decode_graphs = capture_on_cpu(runner)
    generate(runner, requests((0,)), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 0
