"""The padded comparison must notice when the code around transformers' models is wrong."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.models.causal_lm import PROBE, CausalLM
from modeling.models.padded import adapters, batch, cache
from modeling.models.padded.adapters import RowAdapters
from modeling.models.padded.batch import CausalLMBatch
from modeling.runner.padded import PaddedAdapters
from tests.modeling.padded import PaddedWorld, compare_padded
from tests.modeling.parity.comparison import BASE, WHOLE, Mismatch, Setting

MIXED = [BASE, "r4", "rows", "columns"]


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


@pytest.fixture(autouse=True)
def _no_trial(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the probe at start would refuse a model in which padding shows."""
    monkeypatch.setattr(CausalLM, "_try_all", lambda self, exact: self._try(PROBE))


def expect_mismatch(padded: PaddedWorld, kind: str, names: Sequence[str] = MIXED) -> None:
    with pytest.raises(Mismatch):
        compare_padded(padded, Setting("padded", kind, 1, names, chunk=WHOLE), faulty=True)


@pytest.mark.parametrize("kind", ["gptj", "bloom"])
def test_padding_that_is_seen_is_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    def all_of_it(batch: CausalLMBatch) -> Tensor:
        return torch.ones_like(batch.attention_mask[:, : batch.max_input_length])

    monkeypatch.setattr(CausalLMBatch, "seen", property(all_of_it))
    expect_mismatch(padded, kind)


def test_positions_that_count_padding_are_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    def columns(mask: Tensor) -> Tensor:
        return torch.arange(mask.shape[1]).expand(mask.shape).clone()

    monkeypatch.setattr(batch, "positions", columns)
    expect_mismatch(padded, "gpt2")  # Rotated models see only how far tokens are apart.


def test_rows_in_another_order_are_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    take = cache._take

    def turned(tensor: Tensor, num_rows: int, rows: Tensor, *where: Any) -> Tensor:
        return take(tensor, num_rows, rows.flip(0), *where)

    monkeypatch.setattr(cache, "_take", turned)
    expect_mismatch(padded, "stablelm")


def test_caches_aligned_on_the_left_are_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    stack = cache._stack

    def left(tensors: Sequence[Tensor], counts: Sequence[int], longest: int, axis: int) -> Tensor:
        whole, row = stack(tensors, counts, longest, axis), 0
        for tensor, count in zip(tensors, counts, strict=True):
            shift = tensor.shape[axis] - longest
            whole[row : row + count] = whole[row : row + count].roll(shift, axis)
            row += count
        return whole

    monkeypatch.setattr(cache, "_stack", left)
    expect_mismatch(padded, "gptj")


@pytest.mark.parametrize("kind", ["gptj", "gpt2"])
def test_a_delta_on_another_layer_is_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    placed = adapters.HookPosition

    def other(linear: Any, projection: int, layer: int) -> Any:
        return placed(linear, projection, 1 - layer)

    monkeypatch.setattr(adapters, "HookPosition", other)
    expect_mismatch(padded, kind, ["r4"])


def test_an_adapter_on_its_neighbours_row_is_noticed(
    padded: PaddedWorld, monkeypatch: pytest.MonkeyPatch
) -> None:
    adapters = PaddedAdapters.of_batch

    def turned(self: PaddedAdapters, batch: CausalLMBatch) -> RowAdapters | None:
        return adapters(self, replace(batch, requests=batch.requests[::-1]))

    monkeypatch.setattr(PaddedAdapters, "of_batch", turned)
    expect_mismatch(padded, "bloom")
