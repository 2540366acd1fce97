"""One launch against torch's several, on a GPU."""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.rope import POSITIONS_PER_SET
from modeling.adapters.norm_rows import OwnWeights, rms_norm
from modeling.attention.kv_cache import FP8, CacheScales, CacheSpec, allocate
from modeling.layers.angles import Angles
from modeling.layers.fused import FusedOps, casts_to_fp8, fused_ops
from modeling.layers.head_norms import HeadNorms
from modeling.layers.rotary import rotate
from modeling.quantisation.activations import by_token

CUDA = torch.device("cuda")
DTYPES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}


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
    assert not casts_to_fp8(torch.device("cpu"))


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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1536), (17, 32), (300, 5120)])
@pytest.mark.parametrize("has_inner", [False, True])
@pytest.mark.parametrize("has_outer", [False, True])
def test_sums_with_factors(
    dtype: torch.dtype, shape: tuple[int, int], has_inner: bool, has_outer: bool
) -> None:
    """Each product and sum is rounded as torch rounds it."""
    x, residual = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    weight, own = torch.randn(2, shape[1], device=CUDA)
    inner = (own, 1e-6) if has_inner else None
    added = ops().add_rms_norm(x, None, own, 1e-6)[0] if has_inner else x
    for factor, total_factor in ((0.22, 1.0), (1.0, 1.37), (0.22, 1.37)):
        total = (added * factor + residual) * total_factor
        normed, stream = ops().add_rms_norm(
            x,
            residual,
            weight if has_outer else None,
            1e-5,
            inner,
            factor=factor,
            total_factor=total_factor,
        )
        if dtype is torch.float32:
            # The compiler may join a product and a sum, which then round once.
            torch.testing.assert_close(stream, total)
        else:
            assert torch.equal(stream, total)
        if has_outer:
            expected = F.rms_norm(stream.double(), weight.shape, weight.double(), 1e-5)
            check(normed, expected, dtype)
        else:
            assert normed is stream


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 14336), (33, 96), (200, 1040)])
def test_rounding_beside(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    """What norm and gated product write in fp8 too is what rounding their result makes."""
    x, weight = torch.randn(shape, device=CUDA).to(dtype), torch.randn(shape[1], device=CUDA)
    gate_up = torch.randn(shape[0], 2 * shape[1], device=CUDA).to(dtype)
    x[0], gate_up[0] = 0, 0
    codes = torch.empty(shape, dtype=FP8, device=CUDA)
    rounded = codes, torch.empty(shape[0], 1, device=CUDA)

    def norm(rounded: tuple[Tensor, Tensor] | None) -> Tensor:
        return ops().add_rms_norm(x, None, weight.to(dtype), 1e-5, rounded=rounded)[0]

    def product(rounded: tuple[Tensor, Tensor] | None) -> Tensor:
        return ops().silu_mul(gate_up, rounded=rounded)

    for compute in (norm, product):
        found = compute(rounded)
        assert torch.equal(found, compute(None))
        wanted = by_token(found.cpu())
        # As numbers: three operations for a division lose the sign of a zero.
        assert torch.equal(rounded[0].cpu().float(), wanted[0].float())
        assert torch.equal(rounded[1].cpu(), wanted[1])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "per_token"), [((5, 4096), 1), ((20, 128), 4)])
def test_norms_by_the_weights_of_adapters(
    dtype: torch.dtype, shape: tuple[int, int], per_token: int
) -> None:
    """Beside a norm before the sum, with weights of its own."""
    size = shape[1]
    x, residual = (torch.randn(shape, device=CUDA).to(dtype) for _ in range(2))
    weight, inner = (torch.randn(size, device=CUDA) for _ in range(2))
    pool = torch.randn(6, 3 * size + 1, device=CUDA).to(dtype)
    pages = torch.tensor([2, -1, 5, 0, -1], dtype=torch.int32, device=CUDA)
    own = OwnWeights(pool[:, size : 2 * size], pages, 1.0)
    before = OwnWeights(pool[:, 2 * size + 1 :], pages)
    normed, stream = ops().add_rms_norm(
        x, residual, weight, 1e-5, (inner, 1e-6), own=own, own_inner=before
    )
    inside = rms_norm(x.view(5, per_token, size), inner, 1e-6, before).view(shape)
    total = (inside.float() + residual.float()).to(dtype)
    check(stream, total, dtype)
    check(normed, rms_norm(stream.view(5, per_token, size), weight, 1e-5, own).view(shape), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 28672), (33, 96), (200, 2050)])
def test_silu_mul(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    x = torch.randn(shape, device=CUDA).to(dtype)
    gate, up = x.double().chunk(2, dim=-1)
    check(ops().silu_mul(x), F.silu(gate) * up, dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 256), (33, 96), (200, 2050)])
@pytest.mark.parametrize("is_gelu", [False, True])
def test_gated_mul(dtype: torch.dtype, shape: tuple[int, int], is_gelu: bool) -> None:
    """up is of one of several layers, whose rows are far from each other."""
    gate = torch.randn(shape, device=CUDA).to(dtype)
    layers = torch.randn(shape[0], 5, shape[1], device=CUDA).to(dtype)
    wide = gate.double()
    act = F.gelu(wide, approximate="tanh") if is_gelu else F.silu(wide)
    for layer in range(5):
        up = layers[:, layer]
        check(ops().gated_mul(gate, up, is_gelu), act * up.double(), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [(32, 8), (4, 4), (7, 1)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize(("part", "neighbours"), [(1, False), (4, False), (2, True), (0, False)])
def test_rotate_and_store(
    dtype: torch.dtype, heads: tuple[int, int], head_dim: int, part: int, neighbours: bool
) -> None:
    """part: of a head's numbers, 1 / part are rotated."""
    tokens, (num_heads, num_kv_heads) = 37, heads
    (cache,) = allocate(CacheSpec(1, 16, num_kv_heads, head_dim, dtype), 9, CUDA)
    qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim, device=CUDA).to(dtype)
    angles = random_angles(tokens, head_dim // part, dtype, neighbours) if part else None
    slots = torch.randperm(9 * 16, device=CUDA)[:tokens]
    counts = [num_heads, num_kv_heads, num_kv_heads]
    q, k, v = (each.double() for each in torch.split(qkv, counts, dim=1))
    if angles is not None:
        q, k = (rotated(each, angles) for each in (q, k))
    found = ops().rotate_and_store(torch.split(qkv, counts, dim=1), angles, cache, slots)
    check(found, q, dtype)
    check(cache.flat_keys[slots], k, dtype)
    assert torch.equal(cache.flat_values[slots], v.to(dtype))
    rest = torch.ones(9 * 16, dtype=torch.bool, device=CUDA)
    rest[slots] = False
    assert not cache.flat_keys[rest].any()
    assert not cache.flat_values[rest].any()


def random_angles(tokens: int, width: int, dtype: torch.dtype, neighbours: bool) -> Angles:
    angle = torch.randn(tokens, 1, width // 2, device=CUDA)
    cos, sin = angle.cos().to(dtype), angle.sin().to(dtype)
    return Angles(torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1), neighbours)


def rotated(x: Tensor, angles: Angles) -> Tensor:
    return rotate(x.double(), angles.cos.double(), angles.sin.double(), angles.neighbours)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("overwrites", [False, True])
@pytest.mark.parametrize("neighbours", [False, True])
@pytest.mark.parametrize("count", [2, 3])
def test_heads_are_normed_before_they_are_rotated(
    dtype: torch.dtype, tokens: int, overwrites: bool, neighbours: bool, count: int
) -> None:
    """q, k and v of three tensors with rows of their own lengths; count: of those with norms."""
    (cache,) = allocate(CacheSpec(1, 16, 2, 128, dtype), 9, CUDA)
    wide = [torch.randn(tokens, heads + 3, 128, device=CUDA).to(dtype) for heads in (5, 2, 2)]
    parts = [each[:, 1:-2] for each in wide]
    angles = random_angles(tokens, 128, dtype, neighbours)
    slots = torch.randperm(9 * 16, device=CUDA)[:tokens]
    weights = tuple(torch.rand(128, device=CUDA) + 0.5 for _ in range(count))
    norms = HeadNorms(weights, (1e-5, 1e-2, 0.1)[:count])
    normed = [
        F.rms_norm(part.double(), (128,), weight.double(), eps).to(dtype)
        for part, weight, eps in zip(parts, weights, norms.eps, strict=False)
    ]
    q, k = (rotated(part, angles) for part in normed[:2])
    alone = ops().rotate_and_store(
        parts[:1], angles, None, None, HeadNorms(weights[:1], norms.eps[:1])
    )
    before = parts[0].clone()
    found = ops().rotate_and_store(parts, angles, cache, slots, norms, overwrites)
    check(found, q, dtype)
    check(alone, q, dtype)
    check(cache.flat_keys[slots], k, dtype)
    check(cache.flat_values[slots], (*normed, parts[2])[2].double(), dtype)
    assert torch.equal(parts[0], found if overwrites else before)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scales", [CacheScales(2.0**-3, 2.0**-4), CacheScales(0.123, 0.0377)])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
def test_rotate_and_store_in_fp8(dtype: torch.dtype, scales: CacheScales, head_dim: int) -> None:
    """As torch stores what the kernel stores in another cache; what is beyond fp8 is marked."""
    if not casts_to_fp8(CUDA):
        pytest.skip("needs compute capability 8.9")
    tokens, num_heads, num_kv_heads = 37, 7, 2
    shape = (1, 16, num_kv_heads, head_dim)
    specs = [CacheSpec(*shape, dtype), *[CacheSpec(*shape, FP8, (scales,))] * 2]
    wide, found, expected = (allocate(spec, 9, CUDA)[0] for spec in specs)
    qkv = torch.randn(tokens, num_heads + 2 * num_kv_heads, head_dim, device=CUDA).to(dtype)
    angles = torch.randn(2, tokens, 1, head_dim, device=CUDA).to(dtype)
    slots = torch.randperm(9 * 16, device=CUDA)[:tokens]

    def store(most: float) -> None:
        qkv[3, -1, 5] = most
        for cache in (wide, found):
            parts = torch.split(qkv, [num_heads, num_kv_heads, num_kv_heads], dim=1)
            ops().rotate_and_store(parts, Angles(angles[0], angles[1]), cache, slots)
        expected.store(*wide.read(slots, dtype), slots)
        for one, other in zip(found.read(slots, dtype), expected.read(slots, dtype), strict=True):
            assert torch.equal(one, other)
        assert torch.equal(found.clamped, expected.clamped)

    store(most=1.0)
    assert found.clamped.tolist() == [0, 0]
    store(most=1e4)
    assert found.clamped.tolist() == [0, 1]
    rest = torch.ones(9 * 16, dtype=torch.bool, device=CUDA)
    rest[slots] = False
    for part in (found.flat_keys, found.flat_values):
        assert not part.view(torch.uint8)[rest].any()


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("half", [8, 10, 64])
def test_angles(dtype: torch.dtype, half: int) -> None:
    positions = torch.tensor([0, 1, 7, 4095, 100_000], device=CUDA)
    thetas = torch.tensor([[1e4], [5e5]])  # two sets end to end, as longrope has them
    frequencies = (thetas ** -(torch.arange(half) / half)).to(CUDA)
    sets = torch.tensor([0, 1, 0, 0, 1], device=CUDA)
    marked = positions + sets * POSITIONS_PER_SET
    cos, sin = ops().angles(marked, frequencies, 1.5, dtype)
    angles = (positions[:, None].float() * frequencies[sets]).double()
    check(cos, 1.5 * torch.cat((angles.cos(), angles.cos()), dim=-1)[:, None], dtype)
    check(sin, 1.5 * torch.cat((-angles.sin(), angles.sin()), dim=-1)[:, None], dtype)
    assert cos.dtype == sin.dtype == dtype


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 128_256), (5, 4096), (64, 50_257), (3, 17)])
def test_best(dtype: torch.dtype, shape: tuple[int, int]) -> None:
    logits = torch.randn(shape, device=CUDA).to(dtype)
    # Equal bests: the first one counts, also across runs of columns.
    logits[-1] = 0.0
    logits[0, shape[1] // 2 :: 5] = 9.0
    expected = (logits == logits.max(dim=-1, keepdim=True).values).int().argmax(dim=-1)
    assert torch.equal(ops().best(logits), expected)
