"""DoRA's magnitudes in a file, and the norms that they are divided by."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterNeedsSums,
    AdapterShape,
    FetchedAdapter,
)
from modeling.adapters import row_norms
from modeling.adapters.bank import PAGE_ROWS, AdapterBank, BankSize
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import BaseLinear, ModulePosition, Projection, ProjectionKind
from modeling.runner.adapter_check import judge
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

PREFIX = "base_model.model.model.layers.1."
CUTS = (((0, 3), (7, 9)), ((3, 7), (9, 10)))
"""Two ranks' columns of `down`, not all neighbours."""

Tensors = dict[str, Tensor]


def weight(projection: Projection) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return torch.randn(projection.out_features, projection.in_features, generator=generator)


def tensors(rank: int = 4) -> Tensors:
    """Layer 1 of both modules."""
    found = factors(UP, [0, rank, 0]) | factors(DOWN, [0, rank, 0], seed=1)
    for each in (UP, DOWN):
        found[f"{PREFIX}{each.name}.lora_magnitude_vector"] = torch.rand(each.out_features) + 0.5
    return found


def bank(down: Projection = DOWN, dtype: torch.dtype = torch.float32) -> AdapterBank:
    (columns,) = (torch.cat([torch.arange(*cut) for cut in down.inputs]),)
    base_linears = {
        ModulePosition(0, 1): BaseLinear(weight(UP)),
        ModulePosition(1, 1): BaseLinear(weight(DOWN)[:, columns]),
    }
    size = BankSize(pages=12, slots=4, max_rank=8, host_bytes=2**20)
    return AdapterBank((UP, down), size, dtype, torch.device("cpu"), {}, base_linears)


def check(loaded: AdapterBank, saved: Tensors, index: int, projection: Projection) -> None:
    """B and the row of scales are what the whole matrix says; alpha / r is 2."""
    a, b = (saved[f"{PREFIX}{projection.name}.lora_{side}.weight"] for side in "AB")
    adapted = (weight(projection) + 2 * b @ a).double()
    magnitudes = saved[f"{PREFIX}{projection.name}.lora_magnitude_vector"]
    scales = (magnitudes / torch.linalg.norm(adapted, dim=1)).float()
    adapter = loaded.loaded(0)
    torch.testing.assert_close(adapter.factors(index, 1).bt.t(), 2 * b * scales[:, None])
    rows = loaded.pools[index].bt.flatten(0, 2)
    row = adapter.output_rows(index).scale
    torch.testing.assert_close(rows[row + PAGE_ROWS], scales - 1)
    assert not rows[row].any(), "layer 0 is not adapted"


def load(own: AdapterBank, shape: AdapterShape) -> None:
    pages = [[5 + i for i in range(count)] for count in shape.num_pages]
    own.load(AdapterKey(1), 0, pages)


@pytest.mark.parametrize("rank", [4, 8])
@pytest.mark.parametrize("block", [7, row_norms.BLOCK_NUMBERS])
def test_norms_are_those_of_the_adapted_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int, block: int
) -> None:
    """A rank that fills its pages takes one more, even at the largest rank."""
    monkeypatch.setattr(row_norms, "BLOCK_NUMBERS", block)
    saved = tensors(rank)
    folder = write_lora(tmp_path, saved, r=rank, lora_alpha=2 * rank, use_dora=True)
    own = bank()
    shape = own.stage(FetchedAdapter(AdapterKey(1), "dora", str(folder), "d"))
    assert shape.num_pages == ((1, 1) if rank == 4 else (2, 2))
    verdict = judge(folder, (UP, DOWN), AdaptersConfig(max_rank=8), lambda done, total: None)
    assert verdict.cost is not None
    assert verdict.cost.pages == sum(shape.num_pages)
    load(own, shape)
    check(own, saved, 0, UP)
    check(own, saved, 1, DOWN)


def test_ranks_add_their_columns(tmp_path: Path) -> None:
    saved = tensors()
    adapter = FetchedAdapter(
        AdapterKey(1), "dora", str(write_lora(tmp_path, saved, use_dora=True)), "d"
    )
    banks = [bank(replace(DOWN, inputs=cut)) for cut in CUTS]
    parts = []
    for own in banks:
        with pytest.raises(AdapterNeedsSums) as needs:
            own.stage(adapter)
        parts.append(np.frombuffer(needs.value.part, np.float32))
        own.check()
    assert [len(part) for part in parts] == [DOWN.out_features] * 2
    summed = msgspec.structs.replace(adapter, row_sums=sum(parts).tobytes())  # type: ignore[union-attr]
    for own in banks:
        load(own, own.stage(summed))
        check(own, saved, 0, UP)
        check(own, saved, 1, DOWN)


def without(name: str) -> Callable[[Tensors], object]:
    return lambda saved: saved.pop(PREFIX + name)


def setting(name: str, value: Tensor) -> Callable[[Tensors], object]:
    return lambda saved: saved.update({PREFIX + name: value})


@pytest.mark.parametrize("large", [1e6, 1e5])
def test_scales_that_half_precision_cannot_hold_are_refused(tmp_path: Path, large: float) -> None:
    """The factors alone are small."""
    saved = tensors()
    saved[f"{PREFIX}up.lora_magnitude_vector"] *= large
    folder = write_lora(tmp_path / "large", saved, use_dora=True)
    with pytest.raises(AdapterError, match=r"up has values up to .* infinite in float16"):
        bank(dtype=torch.float16).stage(
            FetchedAdapter(AdapterKey(1), "large", str(folder), "large")
        )
    bank(dtype=torch.bfloat16).stage(FetchedAdapter(AdapterKey(1), "large", str(folder), "large"))


VECTOR = "up.lora_magnitude_vector"

FAULTS: dict[str, tuple[Callable[[Tensors], object], dict[str, Any]]] = {
    "use_dora=True, but the file holds no .*up.lora_magnitude": (without(VECTOR), {}),
    "has shape .9., this model's up has 10 outputs": (setting(VECTOR, torch.ones(9)), {}),
    "has type I64": (setting(VECTOR, torch.ones(10, dtype=torch.int64)), {}),
    "not finite": (setting(VECTOR, torch.full((10,), torch.nan)), {}),
    "belongs to no adaptable module": (setting("gate.lora_magnitude_vector", torch.ones(9)), {}),
    "use_dora='yes'": (lambda saved: None, {"use_dora": "yes"}),
    "beside alora_invocation_tokens": (lambda saved: None, {"alora_invocation_tokens": [5]}),
}


@pytest.mark.parametrize("words", FAULTS)
def test_what_is_refused(tmp_path: Path, words: str) -> None:
    spoil, fields = FAULTS[words]
    saved = tensors()
    spoil(saved)
    folder = write_lora(
        tmp_path, saved, **{"use_dora": True, "target_modules": ["up", "down"], **fields}
    )
    with pytest.raises(AdapterError, match=words):
        list(open_adapter(folder, (UP, DOWN), 64).stacks())


def test_magnitudes_without_dora_are_not_passed_over(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, tensors(), use_dora=False)
    with pytest.raises(AdapterError, match="lora_magnitude_vector belongs to no adaptable module"):
        open_adapter(folder, (UP, DOWN), 64)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"can_adapt_ends": False}, "transformers' own code"),
        ({"kind": ProjectionKind.HEAD}, "without embedding and head"),
    ],
)
def test_where_it_is_not_served(tmp_path: Path, changes: dict[str, Any], words: str) -> None:
    folder = write_lora(tmp_path, tensors(), use_dora=True)
    with pytest.raises(AdapterError, match=words):
        open_adapter(folder, (replace(UP, **changes, base=weight(UP)), DOWN), 64)


def test_a_row_without_a_norm(tmp_path: Path) -> None:
    saved = tensors()
    own = bank()
    base_linears = dict(own._host_cache._norms._base_linears)
    base_linears[ModulePosition(0, 1)] = BaseLinear(torch.zeros(10, 6))
    own._host_cache._norms._base_linears = base_linears
    saved[f"{PREFIX}up.lora_B.weight"].zero_()
    folder = write_lora(tmp_path, saved, use_dora=True)
    with pytest.raises(AdapterError, match="a row of the adapted up is zero"):
        own.stage(FetchedAdapter(AdapterKey(1), "dora", str(folder), "d"))
    own.check()
