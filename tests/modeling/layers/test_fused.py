"""One launch against torch's several, on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.attention.kv_cache import CacheSpec, allocate
from modeling.layers.fused import FusedOps, fused_ops
from modeling.layers.rotary import rotate

CUDA = torch.device("cuda")
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def ops() -> FusedOps:
    pytest.importorskip("triton")
    found = fused_ops(CUDA)
    assert found is not None
    return found


def check(found: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    error = (found.double() - expected.double()).norm() / expected.double().norm()
    assert float(error) < DTYPES[dtype], float(error)


def test_a_cpu_has_none() -> None:
    assert fused_ops(torch.device("cpu")) is None


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 4096), (17, 32), (300, 5120)])
@pytest.mark.parametrize("has_residual", [False, True])
def test_add_rms_norm(dtype: torch.dtype, shape: tuple[int, int], has_residual: bool) -> None:
    x, residual = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    weight = torch.randn(shape[1], device=CUDA).to(dtype)
    total = x + residual if has_residual else x
    expected = F.rms_norm(total.double(), weight.shape, weight.double(), 1e-5)
    normed, stream = ops().add_rms_norm(x, residual if has_residual else None, weight, 1e-5)
    check(normed, expected, dtype)
    assert torch.equal(stream, total)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 28672), (33, 96), (200, 2050)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=CUDA).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    check(ops().silu_mul(x), F.silu(gate) * up, dtype)


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(32, 8), (4, 4), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotate_and_store(dtype: torch.dtype, heads: tuple[int, int], head_dim: int) -> None:
    tokens, (num_heads, num_kv_heads) = 37, heads
    (cache,) = allocate(CacheSpec(1, 16, num_kv_heads, head_dim, dtype), 9, CUDA)
    qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim, device=CUDA).to(dtype)
    angles = torch.randn(tokens, 1, head_dim // 2, device=CUDA)
    cos, sin = angles.cos(), angles.sin()
    cos = torch.cat((cos, cos), dim=-1).to(dtype)
    sin = torch.cat((-sin, sin), dim=-1).to(dtype)
    slots = torch.randperm(9 * 16, device=CUDA)[:tokens]
    wide = qkv.double()
    q, k, v = torch.split(wide, [num_heads, num_kv_heads, num_kv_heads], dim=1)
    expected_q, expected_k = (rotate(part, cos.double(), sin.double()) for part in (q, k))
    found = ops().rotate_and_store(qkv, num_heads, (cos, sin), cache, slots)
    check(found, expected_q, dtype)
    check(cache.flat_keys[slots], expected_k, dtype)
    assert torch.equal(cache.flat_values[slots], v.to(dtype))
    rest = torch.ones(9 * 16, dtype=torch.bool, device=CUDA)
    rest[slots] = False
    assert not cache.flat_keys[rest].any()
    assert not cache.flat_values[rest].any()
