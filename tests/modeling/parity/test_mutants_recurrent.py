"""Faults on purpose in recurrent layers and their states: the comparison must notice each."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from modeling.layers.selective_scan import selective_scan as scan
from modeling.models.context import StateRows
from modeling.models.generic import lightning, mixer_functions
from modeling.models.generic.modules import GenericLinear
from modeling.models.generic.recurrent import KINDS, RecurrentLayers
from modeling.runner import state_rows
from modeling.runner.cuda_graphs import DecodeGraphs, PaddedStep
from modeling.runner.input_batch import StepLayout
from tests.modeling.parity.comparison import BASE, Setting, World, compare, expect_mismatch
from tests.modeling.runner.test_recurrent_graphs import replay
from tests.sweeps import swept_rows

DELTA_NET = Setting("generic", "qwen3_5_text", 1, [BASE, "r8"])
CONVOLUTION = Setting("generic", "lfm2", 2, [BASE, "r8"])
SELECTIVE = Setting("mixers", "mamba", 1, [BASE, "r8"])
LIGHTNING = Setting("mixers", "minimax", 1, [BASE, "r8"])
DELAYED = Setting("generic", "zaya", 1, [BASE, "r8"])
BEGUN = Setting("generic_dora", "zaya", 2, [BASE, "biased"])
EVERY = [DELTA_NET, CONVOLUTION, SELECTIVE, LIGHTNING, DELAYED]
SETTINGS = pytest.mark.parametrize("setting", EVERY, ids=lambda setting: setting.variant)


@pytest.mark.sweep
@SETTINGS
def test_without_a_fault_nothing_differs(world: World, setting: Setting) -> None:
    compare(world, setting)


def _rows_as(monkeypatch: pytest.MonkeyPatch, **changed: Any) -> None:
    """Change what recurrent layers are told of a step's rows; a function gets what is right."""

    def rows(**fields: Any) -> StateRows:
        return StateRows(**fields | {name: change(fields) for name, change in changed.items()})

    monkeypatch.setattr(state_rows, "StateRows", rows)


@pytest.mark.sweep
@SETTINGS
@pytest.mark.parametrize("begins", [True, False])
def test_states_that_are_forgotten_or_left_by_others(
    world: World, monkeypatch: pytest.MonkeyPatch, begins: bool, setting: Setting
) -> None:
    _rows_as(monkeypatch, begins=lambda _: begins)
    expect_mismatch(world, setting)


@pytest.mark.parametrize("setting", [DELTA_NET, CONVOLUTION, DELAYED], ids=lambda s: str(s.variant))
def test_states_of_another_row(
    world: World, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    _rows_as(monkeypatch, slots=lambda fields: fields["slots"].flip(0))
    expect_mismatch(world, setting)


def test_recurrent_layers_without_the_rows_adapters(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    _rows_as(monkeypatch, adapter_data=lambda _: None)
    expect_mismatch(world, DELTA_NET)


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
def test_a_row_before_the_first_without_its_adapter(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is of zeros, but a bias of B counts there too."""
    compare(world, BEGUN)
    real = GenericLinear.forward

    def forward(self: GenericLinear, x: Tensor) -> Tensor:
        if x.numel() // x.shape[-1] < self._step.part_tokens:
            with self._step.adapted_by(None, 0):
                return real(self, x)
        return real(self, x)

    monkeypatch.setattr(GenericLinear, "forward", forward)
    expect_mismatch(world, BEGUN)


def _scan_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As transformers' own scan begins, whatever came before."""

    def stateless(*given: Any) -> tuple[Tensor, Tensor]:
        *others, _ = given
        return scan(*others)

    monkeypatch.setattr(mixer_functions, "selective_scan", stateless)


def _blocks_from_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lightning._in_blocks

    def in_blocks(module: Any, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        return real(module, hidden, torch.zeros_like(state))

    monkeypatch.setattr(lightning, "_in_blocks", in_blocks)


def _without_skip(monkeypatch: pytest.MonkeyPatch) -> None:
    def skipless(*given: Any) -> tuple[Tensor, Tensor]:
        x, dt, a, b, c, _, gate, state = given
        return scan(x, dt, a, b, c, None, gate, state)

    monkeypatch.setattr(mixer_functions, "selective_scan", skipless)


def _decay_of_a_whole_block(monkeypatch: pytest.MonkeyPatch) -> None:
    real = lightning._in_blocks

    def in_blocks(module: Any, hidden: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        out, behind = real(module, hidden, state)
        rest = hidden.shape[1] % module.block_size
        missing = -rest % module.block_size
        return out, behind * torch.exp(-module.slope_rate * missing)

    monkeypatch.setattr(lightning, "_in_blocks", in_blocks)


FAULTS = {
    _scan_from_nothing: SELECTIVE, _without_skip: SELECTIVE, _blocks_from_nothing: LIGHTNING,
    _decay_of_a_whole_block: LIGHTNING,
}  # fmt: skip


@pytest.mark.parametrize(
    ("plant", "setting"),
    swept_rows(FAULTS.items(), lambda plant, _: plant is _scan_from_nothing),
)
def test_tokens_behind_a_state_that_are_computed_otherwise(
    world: World,
    monkeypatch: pytest.MonkeyPatch,
    plant: Callable[[pytest.MonkeyPatch], None],
    setting: Setting,
) -> None:
    plant(monkeypatch)
    expect_mismatch(world, setting)


@pytest.mark.sweep
@pytest.mark.parametrize("setting", [DELTA_NET, DELAYED], ids=lambda s: str(s.variant))
@pytest.mark.parametrize("kind", KINDS)
def test_a_state_that_is_not_kept(
    world: World, monkeypatch: pytest.MonkeyPatch, kind: str, setting: Setting
) -> None:
    real = RecurrentLayers._keep

    def keep(self: RecurrentLayers, layer: int, rows: StateRows, own: Any) -> None:
        if rows.slots is not None and not rows.begins:
            own = SimpleNamespace(**{each: dict(getattr(own, each)) for each in KINDS})
            for state in getattr(own, kind).values():
                state.zero_()
        real(self, layer, rows, own)

    monkeypatch.setattr(RecurrentLayers, "_keep", keep)
    expect_mismatch(world, setting)


def _pad_with_a_real_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PaddedStep.fill

    def fill(self: PaddedStep, host: Any, layout: StepLayout) -> int:
        *others, _ = self._padding[:5]
        self._padding = (*others, 3, *self._padding[5:])
        return real(self, host, layout)

    monkeypatch.setattr(PaddedStep, "fill", fill)


def _replay_rows_that_begin(monkeypatch: pytest.MonkeyPatch) -> None:
    real = DecodeGraphs._has_form

    def has_form(self: DecodeGraphs, layout: StepLayout) -> bool:
        return real(self, replace(layout, row_starts=np.ones_like(layout.row_starts)))

    monkeypatch.setattr(DecodeGraphs, "_has_form", has_form)


def _capture_without_adapters(monkeypatch: pytest.MonkeyPatch) -> None:
    real = PaddedStep.state_rows

    def rows(self: PaddedStep, _adapters: object) -> tuple[StateRows, ...]:
        return real(self, None)

    monkeypatch.setattr(PaddedStep, "state_rows", rows)


@pytest.mark.sweep
@pytest.mark.parametrize(
    "plant", [_pad_with_a_real_slot, _replay_rows_that_begin, _capture_without_adapters]
)
def test_faults_of_captured_steps(
    world: World, monkeypatch: pytest.MonkeyPatch, plant: Callable[[pytest.MonkeyPatch], None]
) -> None:
    plant(monkeypatch)
    launched, replayed = replay(world, "qwen3_5_text", count=False)
    assert replayed != launched
