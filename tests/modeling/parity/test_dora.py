"""DoRA (arXiv:2402.09353) and biases: PEFT's answers, beside plain adapters and the base model."""

from collections.abc import Mapping
from dataclasses import replace

import pytest
from torch import Tensor

from modeling.adapters import host_cache, output_rows
from modeling.adapters.bank import DeviceAdapter
from modeling.adapters.output_rows import OutputRows
from modeling.adapters.projection import BaseLinear, ModulePosition, Projection
from modeling.adapters.row_norms import RowNorms
from modeling.adapters.stacks import LoraStack
from tests.modeling.kinds import once
from tests.modeling.parity.comparison import BASE, WHOLE, Setting, World, compare, expect_mismatch
from tests.sweeps import swept_rows

OTHERS = [
    ("llama_dora", "biases"),
    ("fused_dora", "phi3"),
    ("opt_dora", "projected"),
    ("gpt_neox_dora", "parallel"),
]

Linears = Mapping[ModulePosition, BaseLinear]

MIXED = ["dora", BASE, "plain", "some", "biased", "trained"]
ALONE = Setting("llama_dora", "gqa", 1, ["dora"])
TWO_RANKS = Setting("llama_dora", "gqa", 2, ["dora"])
BIASED = Setting("gpt2_dora", "plain", 2, ["dora"])
ADDED = Setting("llama_dora", "gqa", 2, ["biased"])

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases


@pytest.mark.parametrize(("family", "variant", "ranks"), once("dora"))
def test_together(world: World, family: str, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting(family, variant, ranks, MIXED, rejoins_at=3))


def test_alone(world: World) -> None:
    compare(world, Setting("gpt2_dora", "plain", 1, ["dora"], chunk=WHOLE))


@pytest.mark.parametrize(
    ("family", "variant"), swept_rows(OTHERS, lambda family, _: family == "fused_dora")
)
def test_other_families(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 2, MIXED))


@pytest.mark.parametrize("ranks", [1, 2])
def test_under_the_scheduler(world: World, ranks: int) -> None:
    """With prefix hits, and after a loss of the ranks."""
    names = ["dora", "plain", "dora", BASE, "some"]
    lengths = [35, 35, 35, 35, 20]
    compare(world, Setting("llama_dora", "gqa", ranks, names, lengths=lengths, lost_at=14))


def test_magnitudes_left_out(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeviceAdapter, "output_rows", lambda self, projection: OutputRows())
    expect_mismatch(world, ALONE)


def test_norms_of_the_base_weights(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As if A and B did not lengthen or turn a row: the cross term is left out."""
    part = RowNorms._part

    def squares(self: RowNorms, stack: LoraStack, index: int) -> Tensor:
        part(self, stack, index)
        at = ModulePosition(stack.projection, stack.layers[index])
        return self._squares[at].clone()

    monkeypatch.setattr(RowNorms, "_part", squares)
    expect_mismatch(world, ALONE)


def test_norms_of_own_columns(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank takes its part of a row's norm for the whole."""
    monkeypatch.setattr(Projection, "cuts_inputs", False)
    expect_mismatch(world, TWO_RANKS)


def test_bias_scaled(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """The base layer's bias is scaled as its product is."""

    def added(
        stack: LoraStack, projection: Projection, base_linears: Linears, scales: Tensor | None
    ) -> Tensor:
        return output_rows.added_bias(stack, projection, base_linears, None)

    monkeypatch.setattr(host_cache, "added_bias", added)
    expect_mismatch(world, BIASED)


def test_bias_on_every_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias of a row-parallel module is added by each rank that has some of its columns."""

    def every(
        stack: LoraStack, projection: Projection, base_linears: Linears, scales: Tensor | None
    ) -> Tensor:
        whole = replace(projection, in_features=projection.local_inputs)
        return output_rows.added_bias(stack, whole, base_linears, scales)

    monkeypatch.setattr(host_cache, "added_bias", every)
    expect_mismatch(world, ADDED)


@pytest.mark.parametrize("setting", [ADDED, ALONE, TWO_RANKS, BIASED])
def test_without_a_fault_nothing_differs(world: World, setting: Setting) -> None:
    compare(world, setting)
