"""Pages: their bytes, their types, and where a slot lies."""

import pytest
import torch

from modeling.attention.kv_cache import CacheSpec, allocate

CPU = torch.device("cpu")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
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
