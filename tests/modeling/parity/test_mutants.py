"""Faults on purpose: a parity check that lets one of these pass proves nothing."""

import pytest
from msgspec.structs import replace
from torch import Tensor

from configs.wire.plan import RequestJoin
from modeling.adapters import host_cache as copies
from modeling.adapters.bank import AdapterBank, DeviceAdapter, select_columns
from modeling.adapters.linear import AdapterRowLinear
from modeling.adapters.peft.config import LoraPlan
from modeling.adapters.product import AdapterData
from modeling.runner.input_batch import InputBatch
from modeling.sampling.sampler import SampledStep, sample_tokens
from modeling.sampling.tensors import SamplingTensors
from sharding.slicing import Segments, width
from tests.modeling.parity.comparison import Setting, World, compare, expect_mismatch

ONE = Setting("llama", "gqa", 1, ["r8"])
TWO = Setting("llama", "gqa", 1, ["r4", "r8"])
COLUMNS = Setting("llama", "gqa", 2, ["columns"])
ROWS = Setting("llama", "gqa", 2, ["rows"])
REJOINED = Setting("llama", "gqa", 1, ["r8"], rejoins_at=9)


@pytest.mark.parametrize("setting", [ONE, TWO, COLUMNS, ROWS, REJOINED])
def test_without_a_fault_nothing_differs(world: World, setting: Setting) -> None:
    compare(world, setting)


def test_scale_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraPlan, "scaling_of", lambda self, module: 1.0)
    expect_mismatch(world, ONE)


def test_rslora_read_as_lora(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LoraPlan, "scaling_of", lambda self, m: self.alpha / self.rank)
    expect_mismatch(world, Setting("llama", "gqa", 1, ["rslora"]))


@pytest.mark.parametrize("setting", [COLUMNS, ROWS])
def test_cut_is_another_ranks(
    world: World, monkeypatch: pytest.MonkeyPatch, setting: Setting
) -> None:
    # COLUMNS has only B cut, ROWS only A.
    monkeypatch.setattr(copies, "select_columns", _take_the_neighbours)
    expect_mismatch(world, setting)


def _take_the_neighbours(rows: Tensor, segments: Segments) -> Tensor:
    size, own = rows.shape[-1], width(segments)
    shifted = tuple(((a + own) % size, (a + own) % size + b - a) for a, b in segments)
    return select_columns(rows, shifted if own < size else segments)


def test_row_delta_skipped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def forward(self: AdapterRowLinear, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        return self.base.reduce(self.base.partial(x))

    monkeypatch.setattr(AdapterRowLinear, "forward", forward)
    expect_mismatch(world, ROWS)


def test_row_delta_after_the_sum(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each rank would add its own part only.
    def forward(self: AdapterRowLinear, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        y = self.base.reduce(self.base.partial(x))
        if adapter_data is not None:
            adapter_data.add(y, x, self._layer, self._targets)
        return y

    monkeypatch.setattr(AdapterRowLinear, "forward", forward)
    expect_mismatch(world, ROWS)


def test_two_adapters_swapped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def placement(self: AdapterBank, slot: int) -> DeviceAdapter:
        found = self._loaded[1 - slot]
        assert found is not None
        return found

    monkeypatch.setattr(AdapterBank, "loaded", placement)
    expect_mismatch(world, TWO)


def test_adapter_on_the_wrong_layer(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = DeviceAdapter.rank
    monkeypatch.setattr(DeviceAdapter, "rank", lambda self, p, layer: real(self, p, 1 - layer))
    expect_mismatch(world, Setting("llama", "gqa", 1, ["last_layer"]))


def test_sample_lands_one_position_late(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = InputBatch.write
    monkeypatch.setattr(InputBatch, "write", lambda self, at, tokens: real(self, at + 1, tokens))
    expect_mismatch(world, ONE)


def test_last_token_of_the_wrong_row(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def rolled(logits: Tensor, sampling: SamplingTensors) -> SampledStep:
        return sample_tokens(logits.roll(1, dims=0), sampling)

    monkeypatch.setattr("modeling.runner.paged.sample_tokens", rolled)
    expect_mismatch(world, TWO)


@pytest.mark.parametrize("lost", ["adapter", "last_token"])
def test_preempted_request_joins_without(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    def forget(join: RequestJoin) -> RequestJoin:
        if len(join.tokens) == join.prompt_length:
            return join
        if lost == "adapter":
            return replace(join, adapter_slot=-1)
        return replace(join, tokens=[*join.tokens[:-1], 0])

    real = InputBatch.join
    monkeypatch.setattr(InputBatch, "join", lambda self, joins: real(self, [*map(forget, joins)]))
    expect_mismatch(world, REJOINED)
