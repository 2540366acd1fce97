"""Pages: their bytes, their types, and where a slot lies."""

import pytest
import torch

from modeling.attention.kv_cache import FP8, FP8_MAX, CacheScales, CacheSpec, LayerCache, allocate

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, FP8])
def test_bytes_per_page_are_what_is_allocated(dtype: torch.dtype) -> None:
    spec = CacheSpec(num_layers=3, page_size=16, num_kv_heads=2, head_dim=8, dtype=dtype)
    layers = allocate(spec, 5, CPU)
    assert len(layers) == 3
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    assert held == 5 * spec.bytes_per_page


def test_a_slot_is_page_times_size_plus_offset_and_values_are_cast() -> None:
    (layer,) = allocate(CacheSpec(1, 4, 2, 3, torch.bfloat16), 6, CPU)
    keys, values = torch.ones(2, 2, 3), torch.full((2, 2, 3), 2.0)
    layer.store(keys, values, torch.tensor([9, 20]))
    assert layer.keys[2, 1].eq(1).all()
    assert layer.values[5, 0].eq(2).all()
    assert layer.keys.ne(0).sum() == layer.values.ne(0).sum() == 12


def test_what_is_read_is_what_was_stored_in_the_type_asked_for() -> None:
    (layer,) = allocate(CacheSpec(1, 4, 2, 3, torch.bfloat16), 6, CPU)
    new, slots = torch.randn(2, 2, 2, 3).bfloat16(), torch.tensor([9, 20])
    layer.store(new[0], new[1], slots)
    for found, stored in zip(layer.read(slots, torch.float32), new, strict=True):
        assert torch.equal(found, stored.float())


def fp8_layer(scales: CacheScales) -> LayerCache:
    return allocate(CacheSpec(1, 4, 2, 8, FP8, (scales,)), 6, CPU)[0]


def test_an_fp8_page_is_half_a_half_precision_one() -> None:
    pages = [CacheSpec(3, 16, 2, 8, dtype).bytes_per_page for dtype in (torch.bfloat16, FP8)]
    assert pages[0] == 2 * pages[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scales", [CacheScales(0.25, 2.0), CacheScales(0.0137, 0.31)])
def test_fp8_is_as_exact_as_it_says(scales: CacheScales, dtype: torch.dtype) -> None:
    layer = fp8_layer(scales)
    slots = torch.randperm(24)[:20]
    new = torch.randn(2, 20, 2, 8).to(dtype)
    layer.store(new[0], new[1], slots)
    rounding = torch.finfo(dtype).eps
    for found, true, scale in zip(
        layer.read(slots, dtype), new, (scales.keys, scales.values), strict=True
    ):
        assert found.dtype == dtype
        bound = true.double().abs() * (2**-4 + rounding) + scale * 2**-10
        assert ((found.double() - true.double()).abs() <= bound).all()
    assert not layer.clamped.any()


def test_fp8_stores_what_a_power_of_two_moves_unrounded() -> None:
    layer = fp8_layer(CacheScales(2.0**-3, 2.0**4))
    exact = torch.tensor([1.0, 1.125, 1.25, 1.375, 1.5, 1.625, 1.75, 1.875]).repeat(1, 2, 1)
    layer.store(exact, -2 * exact, torch.tensor([5]))
    keys, values = layer.read(torch.tensor([5]), torch.bfloat16)
    assert torch.equal(keys.float(), exact)
    assert torch.equal(values.float(), -2 * exact)


@pytest.mark.parametrize("value", [FP8_MAX * 0.5 + 1, 1e30, float("inf")])
def test_what_is_beyond_fp8_becomes_its_largest_and_is_marked(value: float) -> None:
    layer = fp8_layer(CacheScales(0.5, 0.5))
    new, small = torch.full((1, 2, 8), -1.0), torch.full((1, 2, 8), 3.0)
    new[0, 1, 4] = -value
    layer.store(small, new, torch.tensor([2]))
    found = layer.read(torch.tensor([2]), torch.float32)[1]
    assert found[0, 1, 4] == -FP8_MAX * 0.5
    assert found.sum() == -FP8_MAX * 0.5 - 15
    assert layer.clamped.tolist() == [0, 1]
    layer.store(small, small, torch.tensor([3]))
    assert layer.clamped.tolist() == [0, 1], "a mark stays"


def test_what_is_no_number_stays_none_in_fp8() -> None:
    layer = fp8_layer(CacheScales(0.5, 0.5))
    layer.store(torch.full((1, 2, 8), float("nan")), torch.ones(1, 2, 8), torch.tensor([0]))
    keys, values = layer.read(torch.tensor([0]), torch.float32)
    assert keys.isnan().all()
    assert values.eq(1).all()


def test_only_an_fp8_cache_has_scales() -> None:
    pages = torch.zeros(2, 4, 2, 8)
    with pytest.raises(AssertionError):
        LayerCache(pages, pages, CacheScales(0.5, 1.0))
