"""Rounding activations in Triton: one read of x, one write of what it becomes.

A programmatic dependent launch (PDL), as `modeling.layers.kernels.operations` says.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.tiles import nearest, store_codes
from modeling.quantisation.activations import FP8, LARGEST, SMALLEST, SMALLEST_FP4, range_of

Pointer = Any

# Arguments are grouped by what they describe.
# fmt: off


@triton.jit  # type: ignore[untyped-decorator]
def _by_token(
    x: "Pointer", given: "Pointer", experts: "Pointer", codes: "Pointer", scales: "Pointer",
    most: float, smallest: float,
    size: tl.constexpr, width: tl.constexpr, repeats: tl.constexpr,
    IS_GIVEN: tl.constexpr, HAS_EXPERTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """codes = x / scale, scale = max |x| / most, of one row; width: the power of two over size.

    smallest: the scale of zeros. IS_GIVEN: the scale is `given`, of all rows, or with HAS_EXPERTS
    of the experts of the codes' rows. repeats: rows of codes of one row of x.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, width)
    inside = columns < size
    if PDL:
        gdc_wait()
    own = x + row // repeats * size + columns
    values = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    if IS_GIVEN:
        scale = tl.load(given + tl.load(experts + row) if HAS_EXPERTS else given)
    else:
        scale = tl.div_rn(tl.max(tl.abs(values), axis=0), most)
        scale = tl.where(scale == 0, smallest, scale)
    store_codes(values, scale, most, codes + row * size + columns, inside)
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
    store_codes(values, scale[:, None], most, codes + place, inside)
    tl.store(scales + group * rows + row, scale, mask=group < groups)


@triton.jit  # type: ignore[untyped-decorator]
def _to_fp4(
    x: "Pointer", global_scale: "Pointer", experts: "Pointer", y: "Pointer",
    most: float, smallest: float,
    groups: tl.constexpr, height: tl.constexpr, size: tl.constexpr, repeats: tl.constexpr,
    HAS_GLOBAL_SCALE: tl.constexpr, HAS_EXPERTS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """y = x rounded to e2m1 by the scales of `height` groups of `size` numbers of one row.

    most: of e4m3. smallest: the scale of zeros. Without `global_scale` scales are powers of two.
    repeats: rows of y of one row of x. HAS_EXPERTS: `global_scale` is of the experts of y's rows.
    """
    if PDL:
        gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    group = tl.program_id(1) * height + tl.arange(0, height)
    place = group[:, None] * size + tl.arange(0, size)[None, :]
    inside = (place >= 0) & (group < groups)[:, None]
    if PDL:
        gdc_wait()
    own = x + row // repeats * (groups * size) + place
    values = tl.load(own, mask=inside, other=0.0).to(tl.float32)
    largest = tl.max(tl.abs(values), axis=1)
    if HAS_GLOBAL_SCALE:
        number = tl.load(global_scale + tl.load(experts + row) if HAS_EXPERTS else global_scale)
        # Divided in the type of the numbers.
        sixth = tl.div_rn(largest, tl.full([height], 6.0, tl.float32))
        wanted = sixth.to(x.dtype.element_ty).to(tl.float32) * number
        wanted = tl.minimum(wanted, most)
        # Three bits behind the first one, of numbers from 2 ** -6 on.
        power = tl.maximum(wanted.to(tl.int32, bitcast=True) >> 23, 121) - 3
        fine = (power << 23).to(tl.float32, bitcast=True)
        coarse = ((254 - power) << 23).to(tl.float32, bitcast=True)
        stored = nearest(wanted * coarse) * fine
        stored = tl.where(stored == 0, smallest, stored)
        scale = tl.div_rn(stored, tl.zeros([height], tl.float32) + number)
    else:
        exponent = ((largest.to(tl.int32, bitcast=True) + (1 << 21)) >> 23) - 2
        scale = (tl.maximum(exponent, 1) << 23).to(tl.float32, bitcast=True)
    quotients = tl.div_rn(values, tl.zeros([height, size], tl.float32) + scale[:, None])
    quotients = tl.minimum(tl.maximum(quotients, -6.0), 6.0)
    amount = tl.abs(quotients)
    step = tl.where(amount < 2, 0.5, tl.where(amount < 4, 1.0, 2.0))
    inverse = tl.where(amount < 2, 2.0, tl.where(amount < 4, 1.0, 0.5))
    found = nearest(quotients * inverse) * step * scale[:, None]
    tl.store(y + row * (groups * size) + place, found.to(y.dtype.element_ty), mask=inside)


# fmt: on

_fp4 = Launcher(_to_fp4)
_token = Launcher(_by_token)
_group = Launcher(_by_group)


def by_token(
    x: Tensor,
    scale: Tensor | None = None,
    kind: torch.dtype = FP8,
    experts: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Codes of a contiguous x on a GPU, and their scales; scale: of all tokens, float32 [1].

    kind: of the codes, fp8 or int8, as `activations.by_token` has them. experts: contiguous [rows,
    experts of one], of x's rows; where they are given `scale` is each expert's, and the result has
    a row for each of a row's experts.
    """
    size = x.shape[1]
    rows = len(x) if experts is None else experts.numel()
    codes = torch.empty(rows, size, dtype=kind, device=x.device)
    scales = torch.empty(rows, 1, dtype=torch.float32, device=x.device)
    if not rows:
        return codes, scales
    width, dependent = triton.next_power_of_2(size), has_dependent_launch(x.device)
    given, of_rows = (scales if each is None else each for each in (scale, experts))
    constants = {"size": size, "width": width, "repeats": rows // len(x)}
    constants |= {"IS_GIVEN": scale is not None, "HAS_EXPERTS": experts is not None}
    constants |= {"PDL": dependent}
    _token(
        (x.device, x.dtype, kind, of_rows.dtype, aligned(x, of_rows, codes), *constants.values()),
        (rows,),
        (x, given, of_rows, codes, scales, *range_of(kind)),
        constants,
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


def to_fp4(
    x: Tensor, size: int, global_scale: Tensor | None, experts: Tensor | None = None
) -> Tensor:
    """`fp4.rounded` of a contiguous x on a GPU.

    experts: contiguous [rows, experts of one], of x's rows; where they are given `global_scale` is
    each expert's, and the result has a row for each of a row's experts.
    """
    groups = x.shape[1] // size
    rows = len(x) if experts is None else experts.numel()
    y = x.new_empty(rows, x.shape[1])
    if not rows:
        return y
    height = min(triton.next_power_of_2(groups), 64)
    dependent = has_dependent_launch(x.device)
    beside = [x if each is None else each for each in (global_scale, experts)]
    tensors, kinds = [x, *beside, y], [each.dtype for each in beside]
    constants = {"groups": groups, "height": height, "size": size, "repeats": rows // len(x)}
    constants |= {"HAS_GLOBAL_SCALE": global_scale is not None, "HAS_EXPERTS": experts is not None}
    constants |= {"PDL": dependent}
    _fp4(
        (x.device, x.dtype, *kinds, *constants.values(), aligned(*tensors)),
        (rows, -(-groups // height)),
        (*tensors, LARGEST, SMALLEST_FP4),
        constants,
        {"num_warps": 4, **launch_options(dependent)},
    )
    return y
