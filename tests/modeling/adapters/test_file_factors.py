"""Factors read from a file to where they stay: the same pools as by copies between, bit for bit."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.reading import RegularFile
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from modeling.adapters import file_factors
from modeling.adapters.bank import AdapterBank, BankSize
from modeling.adapters.file_factors import find_in_file
from modeling.adapters.merge import open_fetched
from modeling.adapters.peft.recipes import Recipes
from modeling.adapters.projection import Projection
from sharding import extents
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

DEVICES = [
    "cpu",
    pytest.param(
        "cuda",
        marks=pytest.mark.gpu,
    ),
]
CUT = (replace(UP, outputs=((4, 9),)), replace(DOWN, inputs=((2, 7),)))
"""A column-parallel and a row-parallel cut."""


def fetched(folder: Path) -> FetchedAdapter:
    return FetchedAdapter(AdapterKey(1), folder.name, str(folder), folder.name)


def pools(
    folder: Path,
    dtype: torch.dtype,
    device: str,
    direct_reads: bool,
    projections: tuple[Projection, ...] = (UP, DOWN),
    filler: float = float("nan"),
) -> list[Tensor]:
    """All pages of an adapter after a load; everything was `filler` before."""
    size = BankSize(pages=16, slots=1, max_rank=64, host_bytes=2**20)
    bank = AdapterBank(projections, size, dtype, torch.device(device), direct_reads=direct_reads)
    tier = bank._host_cache.pool
    numbers = tier.num_chunks * tier.chunk_bytes // dtype.itemsize
    tier.rows(range(tier.num_chunks), 0, (1, numbers), dtype).fill_(filler)
    for pool in bank.pools:
        pool.a.fill_(filler)
        pool.bt.fill_(filler)
    counts = bank.stage(fetched(folder)).num_pages
    # Pages in another order than in host memory.
    bank.load(AdapterKey(1), 0, [[15 - 2 * i for i in range(count)] for count in counts]).wait()
    return [part.cpu() for pool in bank.pools for part in (pool.a, pool.bt)]


def direct_projections(folder: Path, dtype: torch.dtype) -> set[int]:
    opened = open_fetched(fetched(folder), (UP, DOWN), 64, {}, Recipes())
    found = find_in_file(opened, dtype)
    return set() if found is None else {*found.modules}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(
    ("memory", "gap"), [(2**24, 2**19), (1, 8), (1, 0)], ids=["at once", "layer by layer", "apart"]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("up", "down", "fields"),
    [
        ([16, 16, 16], [16, 16, 16], {"r": 16, "lora_alpha": 16}),
        ([8, 8, 8], [8, 8, 8], {"r": 8, "lora_alpha": 11}),
        ([4, 4, 4], [4, 4, 4], {"r": 4, "lora_alpha": 3}),
        ([20, 20, 20], [20, 20, 20], {"r": 20, "lora_alpha": 7, "use_rslora": True}),
        ([64, 64, 64], [], {"r": 64}),
        ([12, 0, 12], [0, 12], {"r": 12, "lora_alpha": 5}),
        ([16, 8, 16], [16, 16], {"r": 16, "rank_pattern": {"layers.1.up": 8}}),
    ],
)
def test_pools_are_those_of_factors_that_were_copied(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    memory: int,
    gap: int,
    dtype: torch.dtype,
    up: list[int],
    down: list[int],
    fields: dict[str, Any],
) -> None:
    monkeypatch.setattr(file_factors, "LOAD_BYTES", memory)
    monkeypatch.setattr(extents, "GAP_BYTES", gap)
    tensors = factors(UP, up, 1, dtype) | factors(DOWN, down, 2, dtype)
    folder = write_lora(tmp_path / "adapter", tensors, **fields)
    for projections in ((UP, DOWN), CUT):
        expected = pools(folder, dtype, device, False, projections)
        found = pools(folder, dtype, device, True, projections)
        torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_which_factors_are_read_so(tmp_path: Path) -> None:
    half = torch.bfloat16
    plain = factors(UP, [8, 8], 1, half) | factors(DOWN, [8], 2, half)
    folder = write_lora(tmp_path / "plain", plain, r=8)
    assert direct_projections(folder, half) == {0, 1}
    assert direct_projections(folder, torch.float16) == set()
    mixed = factors(UP, [8, 16], 1, half) | factors(DOWN, [8], 2, half)
    fields = {"r": 8, "rank_pattern": {"layers.1.up": 16}}
    assert direct_projections(write_lora(tmp_path / "ranks", mixed, **fields), half) == {1}
    scaled = {"r": 8, "alpha_pattern": {"layers.0.up": 3}}
    assert direct_projections(write_lora(tmp_path / "scales", plain, **scaled), half) == {1}
    wide = factors(UP, [8, 8], 1, half) | factors(DOWN, [8], 2, torch.float32)
    assert direct_projections(write_lora(tmp_path / "types", wide, r=8), half) == {0}


@pytest.mark.parametrize("number", [float("nan"), float("-inf")])
@pytest.mark.parametrize("factor", ["lora_A", "lora_B"])
def test_numbers_that_are_not_finite_are_refused_by_name(
    tmp_path: Path, number: float, factor: str
) -> None:
    tensors = factors(UP, [8, 8, 8]) | factors(DOWN, [8, 8, 8])
    name = f"base_model.model.model.layers.1.down.{factor}.weight"
    tensors[name][3, 4] = number
    folder = write_lora(tmp_path / "adapter", tensors, r=8)
    with pytest.raises(AdapterError, match=f"{name} holds values that are not finite"):
        pools(folder, torch.float32, "cpu", True)


def test_large_numbers_whose_sum_is_infinite_are_served(tmp_path: Path) -> None:
    tensors = {key: each.abs() * 3e4 for key, each in factors(UP, [8, 8, 8]).items()}
    tensors = {key: each.clamp(max=6e4).half() for key, each in tensors.items()}
    folder = write_lora(tmp_path / "adapter", tensors, r=8, lora_alpha=8)
    expected = pools(folder, torch.float16, "cpu", False)
    found = pools(folder, torch.float16, "cpu", True)
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_a_row_parallel_cut_is_read_so_in_few_calls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    half, calls = torch.bfloat16, []
    folder = write_lora(tmp_path / "plain", factors(DOWN, [8, 8, 8], 1, half), r=8)
    scatter = RegularFile.scatter

    def counted(file: RegularFile, buffers: Sequence[memoryview], offset: int) -> None:
        calls.append(len(buffers))
        scatter(file, buffers, offset)

    monkeypatch.setattr(RegularFile, "scatter", counted)
    pools(folder, half, "cpu", True, CUT)
    assert len(calls) == 1
