"""Captured mixed steps with adapters of experts, on a CPU: a tape replays what it recorded."""

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.adapters.product import AdapterData, ExpertDeltas, OutputSlice
from modeling.models.generic import experts
from tests.modeling.parity.comparison import World, full_logprobs
from tests.modeling.runner.test_captured_experts import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    GatheredExperts,
    make_runner,
)
from tests.modeling.runner.test_cuda_graphs import requests
from tests.modeling.runner.test_piecewise import GatheredAdapters, record_on_cpu
from tests.modeling.stepping import generate

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

SIZES = (4, 9, 16, 40)


class PlanOfExperts(GatheredAdapters):
    """Steps with adapters of experts, and without."""

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> "GatheredAdapters":
        return StepOfExperts(self, num_tokens) if has_experts else self


class StepOfExperts(GatheredAdapters):
    """See `ExpertAdapters`."""

    def __init__(self, plan: PlanOfExperts, num_tokens: int) -> None:
        self._plan: AdapterData = plan
        self.expert_deltas: ExpertDeltas = GatheredExperts(plan.bank, plan.slots[:num_tokens])

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        self._plan.add(y, x, layer, targets)


def product_by_rows(x: Tensor, weight: Tensor, ends: Tensor) -> Tensor:
    """What `grouped_product` is, without a look at the sizes."""
    number = torch.searchsorted(ends.long(), torch.arange(len(x)), right=True)
    return torch.einsum("pi,pio->po", x, weight[number.clamp(max=len(weight) - 1)])


@pytest.mark.parametrize(
    ("family", "variant", "names"),
    [
        ("mixture", "qwen3_moe", ("parameters", "ranks", "r8")),
        ("mixture", "gpt_oss", ("parameters", "down")),
        ("converted", "qwen3_moe", ("few", "trained")),
    ],
)
def test_replays_are_steps(
    world: World,
    family: str,
    variant: str,
    names: Sequence[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Prompts in chunks beside decode rows, of the base and of adapters of all kinds."""
    runner = make_runner(world, family, variant, names)
    logprobs = Sampling(logprobs=runner._forward.model.vocab_size)
    asked = requests((-1, *range(len(names))), sampling=logprobs)
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    monkeypatch.setattr(experts, "grouped_product", product_by_rows)
    plan = PlanOfExperts(runner._bank, max(SIZES))
    runner._piecewise_graphs = record_on_cpu(runner, SIZES, plan)
    runner.num_steps = runner.num_captured = 0
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == runner.num_steps > 20
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.tokens == theirs.tokens
        torch.testing.assert_close(full_logprobs(ours), full_logprobs(theirs), rtol=0, atol=1e-4)


def test_steps_that_no_piece_has_experts_of_are_launched(world: World) -> None:
    runner = make_runner(world, "mixture", "qwen3_moe", ["parameters"])
    runner._piecewise_graphs = record_on_cpu(runner, (4, 9))
    generate(runner, requests((0,)), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 0
