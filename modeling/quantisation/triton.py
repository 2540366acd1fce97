"""Rounding activations to fp8 in Triton: one read of x, one write of the codes and their scales.

A programmatic dependent launch (PDL), as `modeling.layers.triton` says.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.quantisation.activations import FP8, LARGEST, SMALLEST
from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _by_token(
    x: "Pointer", given: "Pointer", codes: "Pointer", scales: "Pointer",
    most: float, smallest: float,
    size: tl.constexpr, width: tl.constexpr, IS_GIVEN: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """codes = x / scale, scale = max |x| / most, of one row; width: the power of two over size.

    IS_GIVEN: the scale is `given`, of all rows.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    inside = columns < size
    if PDL:
        gdc_wait()
    values = tl.load(x + row * size + columns, mask=inside, other=0.0).to(tl.float32)
    if IS_GIVEN:
        scale = tl.load(given)
    else:
        scale = tl.div_rn(tl.max(tl.abs(values), axis=0), most)
        scale = tl.where(scale == 0, smallest, scale)
    found = tl.minimum(tl.maximum(tl.div_rn(values, scale), -most), most)
    tl.store(codes + row * size + columns, found.to(tl.float8e4nv), mask=inside)
    tl.store(scales + row, scale)


@triton.jit  # type: ignore[untyped-decorator]
def _by_group(
    x: "Pointer", codes: "Pointer", scales: "Pointer", rows: int,
    most: float, smallest: float,
    groups: tl.constexpr, height: tl.constexpr, size: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """The same for `height` groups of `size` numbers of one row; scales: [groups, rows]."""
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * height + tl.arange(0, height)
    inside = (group < groups)[:, None]
    place = row * groups * size + group[:, None] * size + tl.arange(0, size)[None, :]
    if PDL:
        gdc_wait()
    values = tl.load(x + place, mask=inside, other=0.0).to(tl.float32)
    scale = tl.div_rn(tl.max(tl.abs(values), axis=1), most)
    scale = tl.where(scale == 0, smallest, scale)
    found = tl.minimum(tl.maximum(tl.div_rn(values, scale[:, None]), -most), most)
    tl.store(codes + place, found.to(tl.float8e4nv), mask=inside)
    tl.store(scales + group * rows + row, scale, mask=group < groups)


@triton.jit  # type: ignore[untyped-decorator]
def _dequantise(
    codes: "Pointer", scales: "Pointer", zeros: "Pointer", y: "Pointer",
    INPUTS: tl.constexpr, GROUP: tl.constexpr, MIDDLE: tl.constexpr, HAS_ZEROS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """y = (code - zero) * scale for BLOCK bytes of one row, of two codes each."""
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < INPUTS // 2
    packed = tl.load(codes + row * (INPUTS // 2) + at, mask=inside, other=0)
    group = row * (INPUTS // GROUP) + 2 * at // GROUP
    factors = tl.load(scales + group, mask=inside, other=0.0).to(tl.float32)
    middle = tl.full([BLOCK], MIDDLE, tl.float32)
    if HAS_ZEROS:
        middle = tl.load(zeros + group, mask=inside, other=0).to(tl.float32)
    low = ((packed & 15).to(tl.float32) - middle) * factors
    high = ((packed >> 4).to(tl.float32) - middle) * factors
    both = tl.interleave(low, high)
    place = tl.program_id(1) * 2 * BLOCK + tl.arange(0, 2 * BLOCK)
    tl.store(y + row * INPUTS + place, both.to(y.dtype.element_ty), mask=place < INPUTS)


# fmt: on

_token = Launcher(_by_token)
_group = Launcher(_by_group)
_numbers = Launcher(_dequantise)


def by_token(x: Tensor, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`activations.by_token` of a contiguous x on a GPU; scale: of all tokens, float32 [1]."""
    rows, size = x.shape
    codes = torch.empty(rows, size, dtype=FP8, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if not rows:
        return codes, scales
    width, dependent = triton.next_power_of_2(size), has_dependent_launch(x.device)
    _token(
        (x.device, x.dtype, size, aligned(x, codes, scales), scale is None),
        (rows,),
        (x, scales if scale is None else scale, codes, scales, LARGEST, SMALLEST),
        {"size": size, "width": width, "IS_GIVEN": scale is not None, "PDL": dependent},
        {"num_warps": min(16, max(1, width // 512)), **launch_options(dependent)},
    )
    return codes, scales


def by_group(x: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """`activations.by_group` of a contiguous x on a GPU; a group's scales lie together."""
    rows, groups = x.shape[0], x.shape[1] // size
    codes = torch.empty(x.shape, dtype=FP8, device=x.device)
    scales = torch.empty(groups, rows, dtype=torch.float32, device=x.device)
    if not rows:
        return codes, scales.t()
    height = min(triton.next_power_of_2(groups), 16)
    dependent = has_dependent_launch(x.device)
    _group(
        (x.device, x.dtype, groups, size, aligned(x, codes, scales), rows % 16 == 0, rows == 1),
        (rows, -(-groups // height)),
        (x, codes, scales, rows, LARGEST, SMALLEST),
        {"groups": groups, "height": height, "size": size, "PDL": dependent},
        {"num_warps": 4, **launch_options(dependent)},
    )
    return codes, scales.t()


def dequantise(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, middle: int, group: int, y: Tensor
) -> Tensor:
    """Write packed codes [out, in / 2] as numbers into y [out, in], a contiguous one."""
    outputs, inputs = y.shape
    block = min(1024, triton.next_power_of_2(inputs // 2))
    _numbers(
        (y.device, y.dtype, scales.dtype, inputs, group, middle, zeros is None, aligned(codes, y)),
        (outputs, -(-inputs // (2 * block))),
        (codes, scales, codes if zeros is None else zeros, y),
        {"INPUTS": inputs, "GROUP": group, "MIDDLE": middle, "HAS_ZEROS": zeros is not None,
         "BLOCK": block},
        {"num_warps": 4},
    )  # fmt: skip
    return y
