"""Sums with norms and factors, and gated products, on a CPU, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.adapters.norm_rows import OwnWeights, rms_norm
from modeling.models.generic import norms
from modeling.models.generic.norms import FusedRMSNorm, NormedSum
from modeling.quantisation.activations import by_token
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

EPS, INNER_EPS = 1e-5, 1e-6
TYPES = {torch.float32: 1e-6, torch.float16: 2e-3, torch.bfloat16: 2e-2}
"""Tolerances of norms, where the last bit may differ."""


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernels = pytest.importorskip("modeling.layers.kernels.rows")
    for name in ("_LAUNCH_ADD_RMS_NORM", "_LAUNCH_SILU_MUL"):
        launch = Interpreted(getattr(kernels, name)._kernel)
        monkeypatch.setattr(kernels, name, launch)
    return kernels


def numbers(shape: tuple[int, ...], dtype: torch.dtype, seed: int) -> Tensor:
    """Random ones; quarters in bfloat16, where the interpreter cuts numbers off."""
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bfloat16:
        return torch.randint(-8, 9, shape, generator=generator).to(dtype) / 4
    return torch.randn(shape, generator=generator).to(dtype)


def factors(dtype: torch.dtype) -> tuple[float, float]:
    """Of which products are cut off nowhere in bfloat16."""
    return (0.5, 0.25) if dtype is torch.bfloat16 else (0.22, 1.37)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 96), (5, 1040)])
def test_factors_round_where_torch_rounds(
    rows: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """To the bit, with a norm of the sum and without."""
    x, residual = numbers(shape, dtype, 0), numbers(shape, dtype, 1)
    weight = numbers(shape[1:], torch.float32, 2)
    before, behind = factors(dtype)
    for factor, total_factor, outer in product((1.0, before), (1.0, behind), (None, weight)):
        normed, total = rows.add_rms_norm(
            x, residual, outer, EPS, factor=factor, total_factor=total_factor
        )
        assert torch.equal(total, (residual + x * factor) * total_factor)
        if outer is None:
            assert normed is total
        else:
            alone, _ = rows.add_rms_norm(total, None, outer, EPS)
            assert torch.equal(normed, alone)
            expected = F.rms_norm(total.float(), weight.shape, weight, EPS)
            torch.testing.assert_close(normed.float(), expected, rtol=TYPES[dtype], atol=1e-6)


@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 96), (5, 1040)])
def test_a_norm_goes_before_the_factors(
    rows: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    x, residual = numbers(shape, dtype, 0), numbers(shape, dtype, 1)
    inner, outer = numbers((2, shape[1]), torch.float32, 2)
    own, _ = rows.add_rms_norm(x, None, inner, INNER_EPS)
    wide = F.rms_norm(x.float(), inner.shape, inner, INNER_EPS)
    torch.testing.assert_close(own.float(), wide, rtol=TYPES[dtype], atol=1e-5)
    before, behind = factors(dtype)
    for factor, total_factor, weight in product((1.0, before), (1.0, behind), (None, outer)):
        more = {"factor": factor, "total_factor": total_factor}
        found = rows.add_rms_norm(x, residual, weight, EPS, (inner, INNER_EPS), **more)
        # The same launch, given the norm.
        expected = rows.add_rms_norm(own, residual, weight, EPS, **more)
        assert torch.equal(found[0], expected[0])
        assert torch.equal(found[1], expected[1])


@pytest.mark.parametrize("has_outer", [False, True])
def test_norms_by_the_weights_of_adapters(rows: Any, has_outer: bool) -> None:
    """The norm before the sum has those of the token, whether a norm is behind it or not."""
    x, residual = numbers((6, 32), torch.float32, 0), numbers((6, 32), torch.float32, 1)
    inner, outer = numbers((2, 32), torch.float32, 2)
    pool = numbers((4, 70), torch.float32, 3)
    pages = torch.tensor([2, -1, 0], dtype=torch.int32)
    before, behind = OwnWeights(pool[:, 32:64], pages, 1.0), OwnWeights(pool[:, :32], pages)
    normed, total = rows.add_rms_norm(
        x,
        residual,
        outer if has_outer else None,
        EPS,
        (inner, INNER_EPS),
        own=behind if has_outer else None,
        own_inner=before,
        factor=0.22,
        total_factor=1.37,
    )
    own = rms_norm(x.view(3, 2, 32), inner, INNER_EPS, before).view(6, 32)
    torch.testing.assert_close(total, (own * 0.22 + residual) * 1.37)
    if has_outer:
        expected = rms_norm(total.view(3, 2, 32), outer, EPS, behind).view(6, 32)
        torch.testing.assert_close(normed, expected)


@pytest.mark.parametrize("is_gelu", [False, True])
@pytest.mark.parametrize("dtype", TYPES)
@pytest.mark.parametrize("shape", [(1, 64), (3, 40), (2, 1300)])
def test_gates_of_two_tensors(
    rows: Any, dtype: torch.dtype, shape: tuple[int, int], is_gelu: bool
) -> None:
    """Rows far from each other give what the merged columns give, and that is the formula."""
    tokens, size = shape
    gate, up = numbers(shape, dtype, 0), numbers((tokens, 3, size), dtype, 1)[:, 1]
    found = rows.gated_mul(gate, up, is_gelu)
    merged = torch.cat((gate, up), dim=1)
    joined = rows.gelu_tanh_mul(merged) if is_gelu else rows.silu_mul(merged)
    assert torch.equal(found, joined)
    parts = numbers((tokens, 2 * size), dtype, 2)[:, size:]
    assert torch.equal(
        rows.gated_mul(parts, up, is_gelu), rows.gated_mul(parts.contiguous(), up, is_gelu)
    )
    wide = gate.float()
    act = F.gelu(wide, approximate="tanh") if is_gelu else F.silu(wide)
    torch.testing.assert_close(found.float(), act * up.float(), rtol=TYPES[dtype], atol=1e-5)


def test_a_sum_is_the_same_by_the_kernel_and_by_parts(
    rows: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever norms there are, and on a stream of three dimensions."""
    x, residual = numbers((1, 5, 32), torch.float32, 0), numbers((1, 5, 32), torch.float32, 1)
    inner, outer = (FusedRMSNorm(numbers((32,), torch.float32, i), EPS) for i in (2, 3))
    calls = []

    class Ops:
        @staticmethod
        def add_rms_norm(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
            calls.append(kwargs)
            found: tuple[Tensor, Tensor] = rows.add_rms_norm(*args, **kwargs)
            return found

    for parts in product((None, inner), (None, outer), (1.0, 0.22), (1.0, 1.37)):
        total, normed = NormedSum(*parts).compute(x, residual)
        with monkeypatch.context() as patch:
            patch.setattr(norms, "fused_ops", lambda _device: Ops)
            found_total, found = NormedSum(*parts).compute(x, residual)
        torch.testing.assert_close(found_total, total)
        assert (normed is None) == (found is None)
        if normed is not None and found is not None:
            torch.testing.assert_close(found, normed)
    assert len(calls) == 16


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64), (3, 96)])
def test_rows_are_written_in_int8_too(
    rows: Any, dtype: torch.dtype, shape: tuple[int, int]
) -> None:
    """As what is written beside them is rounded; a row of zeros has a scale."""
    x = numbers((shape[0] + 1, 2 * shape[1]), dtype, 0)
    x[-1] = 0
    weight = numbers((2 * shape[1],), torch.float32, 1)
    for write, size in ((rows.silu_mul, shape[1]), (rows.add_rms_norm, 2 * shape[1])):
        into = torch.empty(len(x), size, dtype=torch.int8), torch.empty(len(x), 1)
        given = (x,) if write is rows.silu_mul else (x, None, weight, EPS)
        found = write(*given, rounded=into)
        y = found if isinstance(found, Tensor) else found[0]
        codes, scales = by_token(y, None, torch.int8)
        assert torch.equal(into[1], scales)
        # A row's largest number is a tie if it is negative, and the interpreter fuses no sums.
        far = (into[0].int() - codes.int()).abs()
        assert int(far.max()) <= 1
        assert int(far.sum(1).max()) <= 1
