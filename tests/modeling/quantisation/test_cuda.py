"""Products with quantised weights on a GPU, against the reference on the same numbers."""

from collections.abc import Callable
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.quantisation import Activations
from modeling.quantisation import activations
from modeling.quantisation.base import QuantisedWeight
from modeling.quantisation.coded import CodedWeight
from modeling.quantisation.fp4 import MXFP4, NVFP4, Fp4Weight, round_fp4, rounded
from modeling.quantisation.fp8 import round_blocks
from modeling.quantisation.integers import Groups, IntegerWeight, local_groups, round_groups
from modeling.quantisation.scaled import round_rows
from sharding.linear_weight import Fp4Scales, Operands

pytestmark = pytest.mark.gpu

DTYPES = (torch.bfloat16, torch.float16)
TOKENS = (1, 3, 16, 17, 64, 65, 300)
OUTPUTS, INPUTS = 768, 1024
BOUND = 8e-3
"""Of the difference's norm, by the product's: rounding inputs, weights and the result to bfloat16
makes 3e-3, and fp8's tensor cores add with fewer bits than float32 has. The largest of four runs on
an H200 was 5.7e-3."""


def matrix(dtype: torch.dtype) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(1)
    return torch.randn(OUTPUTS, INPUTS, device="cuda", generator=generator).mul(0.05).to(dtype)


def act_order(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> IntegerWeight:
    """Integers with zero points, whose groups lie in no order."""
    generator = torch.Generator("cuda").manual_seed(2)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, **options)
    zeros = torch.randint(0, 16, (outputs, inputs // 128), dtype=torch.uint8, **options)
    scales = torch.rand(outputs, inputs // 128, **options).mul(0.02).to(dtype)
    group_of = torch.randperm(inputs, **options) // 128
    return IntegerWeight(codes, local_groups(scales, zeros, group_of, 0), 4, dtype)


def from_table(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> IntegerWeight:
    """Codes that stand for other numbers than themselves, as those of nf4 do."""
    generator = torch.Generator("cuda").manual_seed(3)
    options: dict[str, Any] = {"device": "cuda", "generator": generator}
    codes = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, **options)
    scales = torch.rand(outputs, inputs // 64, **options).mul(0.1)
    group_of = torch.arange(inputs, device="cuda") // 64
    table = torch.randn(16, **options)
    return IntegerWeight(codes, Groups(scales, None, group_of, 64), 4, dtype, table)


def symmetric(dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> IntegerWeight:
    """Integers with one zero point for all."""
    generator = torch.Generator("cuda").manual_seed(4)
    numbers = torch.randn(outputs, inputs, device="cuda", generator=generator)
    return round_groups(numbers.mul(0.05).to(dtype), 4, 128)


INTEGERS: dict[str, Callable[..., IntegerWeight]] = {
    "4 bits": symmetric,
    "act-order": act_order,
    "from a table": from_table,
}


def fp4(size: int, dtype: torch.dtype, outputs: int = OUTPUTS, inputs: int = INPUTS) -> Fp4Weight:
    """nvfp4 or mxfp4 of weights alone."""
    generator = torch.Generator("cuda").manual_seed(5)
    numbers = torch.randn(outputs, inputs, device="cuda", generator=generator)
    return round_fp4(numbers.mul(0.05).to(dtype), size, rounds=False)


CODED: dict[str, Callable[..., CodedWeight]] = {
    **INTEGERS,
    "weights in nvfp4": partial(fp4, NVFP4),
    "weights in mxfp4": partial(fp4, MXFP4),
}

FORMS: dict[str, Callable[[torch.dtype], QuantisedWeight]] = {
    "fp8": lambda dtype: round_rows(matrix(dtype), matrix(dtype).abs().amax(1).float(), dtype),
    "8 bits and activations": lambda dtype: round_rows(
        matrix(dtype), matrix(dtype).abs().amax(1), dtype, torch.int8
    ),
    "blocks": lambda dtype: round_blocks(matrix(dtype), (128, 128), Activations.GROUP),
    "4 bits by 32": lambda dtype: round_groups(matrix(dtype), 4, 32),
    "8 bits": lambda dtype: round_groups(matrix(dtype), 8, 128),
    "nvfp4": lambda dtype: round_fp4(matrix(dtype), NVFP4, rounds=True),
    "mxfp4": lambda dtype: round_fp4(matrix(dtype), MXFP4, rounds=True),
    **CODED,
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_products(form: str, dtype: torch.dtype) -> None:
    """Of few and of many tokens, with a bias and without, and into memory of the caller."""
    weight = FORMS[form](dtype)
    bias = torch.linspace(-1, 1, OUTPUTS, device="cuda").to(dtype)
    for tokens in TOKENS:
        x = torch.randn(tokens, INPUTS, device="cuda").to(dtype)
        x[0] *= 0  # A token of zeros has a scale too.
        inputs, numbers = weight.inputs(x).float(), weight[:].float()
        for added in (None, bias):
            wanted = F.linear(inputs, numbers, None if added is None else added.float())
            out = torch.empty(tokens, OUTPUTS, dtype=dtype, device="cuda")
            for found in (weight(x, added), weight(x, added, out)):
                error = (found.float() - wanted).norm() / wanted.norm().clamp(min=1.0)
                assert float(error) < BOUND, (tokens, added is None)
            assert found is out


@pytest.mark.parametrize("form", CODED)
@pytest.mark.parametrize("shape", [(64, 14336), (200, 3584), (6144, 4096), (1024, 384)], ids=str)
def test_codes_of_many_sizes(form: str, shape: tuple[int, int]) -> None:
    """However many warps and programs share the inputs; equal inputs give equal bits."""
    weight = CODED[form](torch.bfloat16, *shape)
    for tokens in (1, 8, 9, 16, 24, 40, 64):
        x = torch.randn(tokens, shape[1], device="cuda").to(torch.bfloat16)
        wanted = F.linear(x.float(), weight[:].float())
        found = weight(x, None)
        assert float((found.float() - wanted).norm() / wanted.norm()) < BOUND, tokens
        assert torch.equal(found, weight(x, None))


FEW_TOKENS: dict[Any, int] = {
    "4 bits": 64,
    "act-order": 64,
    ("nvfp4", torch.bfloat16): 32,
    ("weights in nvfp4", torch.bfloat16): 32,
    ("weights in mxfp4", torch.bfloat16): 64,
}
"""Up to how many codes are multiplied, by the form and its type."""


@pytest.mark.parametrize("form", ["8 bits", "4 bits by 32", "nvfp4", *CODED])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_beside_codes(form: str, dtype: torch.dtype) -> None:
    """Many tokens are multiplied with the numbers themselves, few as without them."""
    weight, alone = FORMS[form](dtype), FORMS[form](dtype)
    assert isinstance(weight, CodedWeight)
    weight.dequantise()
    for tokens in TOKENS:
        x = torch.randn(tokens, INPUTS, device="cuda").to(dtype)
        found = weight(x, None, torch.empty(tokens, OUTPUTS, dtype=dtype, device="cuda"))
        if tokens <= FEW_TOKENS.get((form, dtype), FEW_TOKENS.get(form, 0)):
            assert torch.equal(found, alone(x, None))
        else:
            assert torch.equal(found, F.linear(weight.inputs(x), alone[:]))


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_of_fp4_are_the_references(size: int, dtype: torch.dtype) -> None:
    """To the bit, as packages round them."""
    from modeling.quantisation.kernels.fp4_product import dequantise_fp4

    weight = fp4(size, dtype, 200, 1024)
    own = Operands(weight[:1], weight.codes, fp4=Fp4Scales(weight.scales, weight.outer))
    found = dequantise_fp4(own, torch.empty(200, 1024, dtype=dtype, device="cuda"))
    assert torch.equal(found, weight[:])


@pytest.mark.parametrize("dtype", DTYPES)
def test_rounding_is_the_cpus(dtype: torch.dtype) -> None:
    """Bit by bit: a GPU divides by a number as by its inverse unless it is told not to."""
    from modeling.quantisation.kernels import rounding

    x = torch.randn(37, INPUTS, device="cuda").mul(3).to(dtype)
    x[0] = 0
    given = torch.tensor([0.02], device="cuda")
    pairs = [(rounding.by_group(x, 128), activations.by_group(x.cpu(), 128))]
    for scale, kind in product((None, given), (activations.FP8, torch.int8)):
        wanted = activations.by_token(x.cpu(), None if scale is None else scale.cpu(), kind)
        pairs.append((rounding.by_token(x, scale, kind), wanted))
    own, experts = torch.rand(5, device="cuda"), torch.randint(0, 5, (len(x), 3), device="cuda")
    for kind in (activations.FP8, torch.int8):
        scales = own[experts.flatten(), None].cpu()
        wanted = activations.by_token(x.cpu().repeat_interleave(3, 0), scales, kind)
        pairs.append((rounding.by_token(x, own, kind, experts), wanted))
    for found, wanted in pairs:
        assert torch.equal(found[0].cpu().view(torch.uint8), wanted[0].view(torch.uint8))
        assert torch.equal(found[1].cpu(), wanted[1].expand(found[1].shape))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "whole"), [(NVFP4, 437.0), (NVFP4, 3e4), (MXFP4, None)])
def test_rounding_to_4_bits_is_the_cpus(dtype: torch.dtype, size: int, whole: float | None) -> None:
    from modeling.quantisation.kernels import rounding

    x = torch.randn(37, INPUTS, device="cuda").mul(3)
    x[0] = 0
    x[1, :8] = torch.tensor([0.25, 0.75, 1.25, -1.75, 2.5, -3.5, 5.0, 6.0])
    x = x.to(dtype)
    number = None if whole is None else torch.tensor([whole])
    found = rounding.to_fp4(x, size, None if number is None else number.cuda())
    assert torch.equal(found.cpu(), rounded(x.cpu(), size, number))
