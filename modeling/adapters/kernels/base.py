"""Launches of a base product that adapters' shrink joins, by the form of the base's weights."""

from dataclasses import dataclass
from typing import Any

from torch import Tensor
from triton import next_power_of_2
from triton.tools.tensor_descriptor import TensorDescriptor

from modeling.adapters.kernels.product import (
    AHEAD,
    ProductForm,
    fp4_product_kernel,
    integer_product_kernel,
    product_kernel,
    scaled_product_kernel,
)
from modeling.adapters.kernels.row_product import fp4_row_product_kernel, row_product_kernel
from modeling.kernels import fp4_rows, fp4_tiles
from modeling.kernels.integer_rows import rows_cut, rows_options
from modeling.kernels.integer_tiles import (
    CUTS,
    integer_arguments,
    integer_constants,
    tile_options,
)
from modeling.kernels.launch import launch_options
from modeling.kernels.tiles import SCALED_CUTS, cut_of
from sharding.linear_weight import Operands


@dataclass(frozen=True)
class Shrink:
    """The shrink's part of a launch.

    programs: how many. tile_programs: of each block of columns. x: what it reads, [tokens, in].
    arguments, constants: the kernel's.
    """

    programs: int
    tile_programs: int
    x: Tensor
    arguments: tuple[Any, ...]
    constants: dict[str, Any]


def takes(x: Tensor) -> bool:
    """Return whether the kernels take x: half precision, aligned rows."""
    return x.dtype.itemsize == 2 and x.shape[1] % 256 == 0 and x.stride(0) % 8 == 0


def launch_product(
    form: ProductForm, y: Tensor, operands: Operands, sums: Tensor, arrived: Tensor, shrink: Shrink
) -> None:
    """Write the product into y [tokens, out], and the shrink's partial sums."""
    launch = _dense if operands.scales is None else _scaled
    if operands.groups is not None:
        launch = _integers
    if operands.fp4 is not None:
        launch = _fp4
    launch(form, y, operands, sums, arrived, shrink)


def _dense(
    form: ProductForm, y: Tensor, operands: Operands, sums: Tensor, arrived: Tensor, shrink: Shrink
) -> None:
    weight, x = operands.weight, operands.x
    outputs, inputs = weight.shape
    shares = form.splits(outputs)
    # fmt: off
    product_kernel[(shrink.programs + -(-outputs // form.outputs) * shares,)](
        *_tiles(form, weight, x),
        x, weight, y,
        sums, arrived, len(x), outputs, y.stride(0),
        shrink.programs, shrink.tile_programs, *shrink.arguments,
        INPUTS=inputs, ROWS=form.rows, BLOCK_N=form.outputs, SHARES=shares,
        PRODUCT_K=form.inputs, AHEAD=AHEAD, BULK=form.bulk,
        num_warps=form.warps, num_stages=form.stages,
        **shrink.constants, **launch_options(shrink.constants["PDL"]),
    )
    # fmt: on


def _scaled(
    form: ProductForm, y: Tensor, operands: Operands, sums: Tensor, arrived: Tensor, shrink: Shrink
) -> None:
    codes, cut = operands.weight, cut_of(SCALED_CUTS, len(y))
    assert cut is not None, (len(y), form)
    outputs, inputs = codes.shape
    shares = cut.shares(outputs, inputs)
    # fmt: off
    scaled_product_kernel[(shrink.programs + -(-outputs // cut.outputs) * shares,)](
        operands.x, operands.x_scales, codes, operands.scales, y,
        sums, arrived, len(y), outputs, y.stride(0),
        shrink.programs, shrink.tile_programs, shrink.x, *shrink.arguments,
        INPUTS=inputs, ROWS=max(16, next_power_of_2(len(y))),
        BLOCK_N=cut.outputs, SHARES=shares, PRODUCT_K=cut.inputs,
        num_warps=cut.warps, num_stages=cut.stages,
        **shrink.constants, **launch_options(shrink.constants["PDL"]),
    )
    # fmt: on


def _integers(
    form: ProductForm, y: Tensor, operands: Operands, sums: Tensor, arrived: Tensor, shrink: Shrink
) -> None:
    (chunks, outputs, _), rows, groups = operands.weight.shape, len(y), operands.groups
    assert groups is not None
    found = rows_cut(rows, groups, shrink.x.shape[1], outputs)
    if found is None:
        kernel, cut = integer_product_kernel, cut_of(CUTS, rows)
        assert cut is not None, (rows, form)
        shares, width = cut.shares(outputs, shrink.x.shape[1]), cut.outputs
        sizes, options = tile_options(cut, rows, shares)
    else:
        kernel, width = row_product_kernel, found.outputs
        sizes, options = rows_options(found, outputs, chunks)
        shares = sizes["SHARES"]
    # fmt: off
    kernel[(shrink.programs + -(-outputs // width) * shares,)](
        *integer_arguments(operands), y,
        sums, arrived, rows, outputs, operands.x.stride(0),
        y.stride(0), shrink.programs, shrink.tile_programs, shrink.x, *shrink.arguments,
        **integer_constants(operands), **sizes, **options,
        **shrink.constants, **launch_options(shrink.constants["PDL"]),
    )
    # fmt: on


def _fp4(
    form: ProductForm, y: Tensor, operands: Operands, sums: Tensor, arrived: Tensor, shrink: Shrink
) -> None:
    own, (chunks, outputs, _), rows = operands.fp4, operands.weight.shape, len(y)
    assert own is not None
    inputs = shrink.x.shape[1]
    made: dict[str, Any] = {"INPUTS": inputs, "IS_NVFP4": own.outer is not None}
    found = fp4_rows.joined_cut(rows)
    if found is None:
        kernel, cut = (
            fp4_product_kernel,
            fp4_tiles.FEW if rows <= fp4_tiles.FEW.rows else fp4_tiles.MORE,
        )
        shares, width = cut.shares(outputs, inputs), cut.outputs
        sizes, options = tile_options(cut, rows, shares)
        made |= fp4_tiles.ASSEMBLY
    else:
        kernel, width = fp4_row_product_kernel, found.outputs
        sizes, options = rows_options(found, outputs, chunks)
        shares = sizes["SHARES"]
    # fmt: off
    kernel[(shrink.programs + -(-outputs // width) * shares,)](
        operands.x, operands.weight, own.scales, own.scales if own.outer is None else own.outer, y,
        sums, arrived, rows, outputs, operands.x.stride(0),
        y.stride(0), shrink.programs, shrink.tile_programs, shrink.x, *shrink.arguments,
        **made, **sizes, **options,
        **shrink.constants, **launch_options(shrink.constants["PDL"]),
    )
    # fmt: on


def _tiles(form: ProductForm, weight: Tensor, x: Tensor) -> tuple[Any, Any]:
    """Return descriptors of weight and x for the copy engine, or the tensors themselves."""
    if not form.bulk:
        return weight, x
    return (
        TensorDescriptor.from_tensor(weight, [form.outputs, form.inputs]),
        TensorDescriptor.from_tensor(x, [form.rows, form.inputs]),
    )
