"""Products of few tokens in fp8 or int8, in Triton: what libraries do more slowly.

    y[m, n] = a[m] * b[n] * sum_k X[m, k] W[n, k]         codes of both

They are programmatic dependent launches (PDL), as `modeling.layers.kernels.operations` says: the
first lines of the weights, which no kernel writes, are fetched while the kernel before still runs.
"""

from functools import cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.tiles import ProductCut, scaled_tile

Pointer = Any

MAX_BLOCKS = 1024
MAX_SUMS = 4 * 2**20
"""Counters and partial sums that a shared product takes at most."""

# Arguments are grouped by what they describe; a line for each would hide the kernels.
# fmt: off


@triton.jit(do_not_specialize=["num_rows"])  # type: ignore[untyped-decorator]
def _scaled(
    x: "Pointer", x_scales: "Pointer", codes: "Pointer", scales: "Pointer", bias: "Pointer",
    y: "Pointer", sums: "Pointer", arrived: "Pointer",
    num_rows: int, num_outputs: int, y_stride: int,
    INPUTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, SHARES: tl.constexpr, HAS_BIAS: tl.constexpr, PDL: tl.constexpr,
) -> None:
    """One block of outputs, all tokens, one share of the inputs; see `scaled_tile`."""
    if PDL:
        gdc_launch_dependents()
    num_blocks = tl.num_programs(0) // SHARES
    scaled_tile(
        tl.program_id(0) % num_blocks, tl.program_id(0) // num_blocks, num_blocks,
        x, x_scales, codes, scales, bias, y, sums, arrived, num_rows, num_outputs, y_stride,
        INPUTS, ROWS, BLOCK_N, BLOCK_K, GROUP, SHARES, HAS_BIAS, PDL,
    )


# fmt: on

_launch = Launcher(_scaled)


@cache
def product_memory(device: torch.device, _stream: int) -> tuple[Tensor, Tensor]:
    """Return memory for partial sums, and counters of zeros; one for each stream."""
    sums = torch.empty(MAX_SUMS, dtype=torch.float32, device=device)
    return sums, torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)


def scaled_product(
    x: Tensor,
    x_scales: Tensor,
    codes: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    y: Tensor,
    cut: ProductCut,
    group: int = 0,
) -> Tensor:
    """Write the product of x in codes [tokens, in] and codes [out, in] into y [tokens, out].

    group: outputs and inputs of a block of the codes that has a scale, of which x's groups of
    inputs have one too; x_scales: [tokens, groups], a group's side by side. 0: there are none.
    """
    (rows, inputs), outputs = x.shape, len(codes)
    shares, dependent = cut.shares(outputs, inputs), has_dependent_launch(x.device)
    sums, arrived = product_memory(x.device, torch.cuda.current_stream(x.device).cuda_stream)
    blocks = -(-outputs // cut.outputs)
    height = max(16, triton.next_power_of_2(rows))
    _launch(
        (x.device, x.dtype, y.dtype, inputs, outputs, height, cut, shares, bias is None,
         aligned(x, codes, y), y.stride(0), group),
        (blocks * shares,),
        (x, x_scales, codes, scales, y if bias is None else bias, y, sums, arrived, rows, outputs,
         y.stride(0)),
        {"INPUTS": inputs, "ROWS": height, "BLOCK_N": cut.outputs,
         "BLOCK_K": group or cut.inputs, "GROUP": group, "SHARES": shares,
         "HAS_BIAS": bias is not None, "PDL": dependent},
        {"num_warps": cut.warps, "num_stages": cut.stages, **launch_options(dependent)},
    )  # fmt: skip
    return y
