"""Products of many tokens with weights of 4 bits on a GPU, tile by tile.

The cuts are given here, so that products are compared whether steps take them or not.
"""

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.integers import IntegerWeight, round_groups
from tests.modeling.quantisation.test_cuda import BOUND, DTYPES, INPUTS, INTEGERS, OUTPUTS

pytestmark = pytest.mark.gpu

Cut = tuple[int, int, int, int]
"""Tokens and outputs of a tile, warps, stages."""


def one_group(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> IntegerWeight:
    """One scale for all inputs of an output, as checkpoints without groups have it."""
    generator = torch.Generator("cuda").manual_seed(5)
    numbers = torch.randn(outputs, inputs, device="cuda", generator=generator)
    return round_groups(numbers.mul(0.05).to(dtype), 4, None)


FORMS = {**INTEGERS, "one group": one_group}

ROWS = (65, 100, 128, 300, 512, 1030)
CUTS: tuple[Cut, ...] = (
    (128, 128, 4, 3),
    (128, 256, 8, 4),
    (64, 128, 4, 3),
    (64, 256, 8, 4),
)


def product(
    weight: IntegerWeight,
    x: Tensor,
    cut: Cut,
    bias: Tensor | None = None,
    blocks: int = 132,
) -> Tensor:
    from modeling.quantisation.kernels.tiled_integers import TiledCut, tiled_product

    y = torch.full((len(x), weight.shape[0]), float("nan"), dtype=x.dtype, device="cuda")
    return tiled_product(weight.operands(x), bias, y, TiledCut(1100, *cut, blocks))


def off(found: Tensor, wanted: Tensor) -> float:
    return float((found.float() - wanted).norm() / wanted.norm())


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(form: str, dtype: torch.dtype, cut: Cut) -> None:
    """With a bias and without; equal inputs give equal bits."""
    weight = FORMS[form](dtype)
    bias = torch.linspace(-1, 1, OUTPUTS, device="cuda").to(dtype)
    numbers = weight[:].float()
    for rows in ROWS:
        x = torch.randn(rows, INPUTS, device="cuda").to(dtype)
        for added in (None, bias):
            wanted = F.linear(x.float(), numbers, None if added is None else added.float())
            found = product(weight, x, cut, added)
            assert off(found, wanted) < BOUND, (rows, added is None)
            assert torch.equal(found, product(weight, x, cut, added))


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_the_reference_s(form: str, dtype: torch.dtype, cut: Cut) -> None:
    """To the bit: tokens with one 1 each choose a number for each output."""
    weight = FORMS[form](dtype)
    found = product(weight, torch.eye(INPUTS, dtype=dtype, device="cuda"), cut)
    assert torch.equal(found, weight[:].t())


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_a_row_does_not_depend_on_others(form: str, cut: Cut) -> None:
    weight = FORMS[form](torch.bfloat16, 6144, 1024)
    x = torch.randn(1030, 1024, device="cuda").to(torch.bfloat16)
    found = product(weight, x, cut)
    assert torch.equal(found.flip(0), product(weight, x.flip(0), cut))
    for rows in (1, 65, 300):
        assert torch.equal(found[:rows], product(weight, x[:rows], cut))
    x[300:] = float("nan")
    assert torch.equal(found[:300], product(weight, x, cut)[:300])


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("shape", [(64, 14336), (200, 3584), (1000, 384)], ids=str)
def test_programs_share_inputs(form: str, shape: tuple[int, int], cut: Cut) -> None:
    """Whatever the sizes, and however often: the counters end as zeros."""
    weight = FORMS[form](torch.bfloat16, *shape)
    x = torch.randn(150, shape[1], device="cuda").to(torch.bfloat16)
    wanted = F.linear(x.float(), weight[:].float())
    found = product(weight, x, cut, blocks=500)
    assert off(found, wanted) < BOUND
    for _ in range(20):
        assert torch.equal(found, product(weight, x, cut, blocks=500))


@pytest.mark.parametrize("shape", [(OUTPUTS, INPUTS), (200, 8192), (8200, 512)], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_steps_take_them(form: str, shape: tuple[int, int]) -> None:
    """Where they have a cut, into memory of the caller too, of x that is not in one piece."""
    from modeling.quantisation.kernels.tiled_integers import tiled_cut, tiled_product

    outputs, inputs = shape
    weight = FORMS[form](torch.bfloat16, *shape)
    bias = torch.linspace(-1, 1, outputs, device="cuda").to(torch.bfloat16)
    cuts = 0
    for rows in (65, 128, 129, 192, 256, 300, 384, 512, 513):
        x = torch.randn(rows, 2 * inputs, device="cuda").to(torch.bfloat16)[:, :inputs]
        operands = weight.operands(x.contiguous())
        wanted = weight(x, bias)
        numbers = F.linear(x.float(), weight[:].float(), bias.float())
        assert off(wanted, numbers) < BOUND
        if (cut := tiled_cut(operands)) is not None:
            cuts += 1
            tiled = torch.empty(rows, outputs, dtype=torch.bfloat16, device="cuda")
            assert torch.equal(tiled_product(operands, bias, tiled, cut), wanted)
        out = torch.empty(rows, outputs + 16, dtype=torch.bfloat16, device="cuda")[:, :outputs]
        assert weight(x, bias, out) is out
        assert torch.equal(out, wanted)
    assert bool(cuts) == (weight.table is None)
