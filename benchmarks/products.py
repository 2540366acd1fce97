"""Products with quantised weights, by their form: `python -m benchmarks.products`, on one GPU.

Each case is launched over copies of its weights that the second-level cache does not hold, in one
CUDA graph, as a captured step launches it. Rounding the activations is part of a product. The
shapes are those of Llama-3-8B's linear layers, q, k, v and gate, up together.

--cuts compares how products of many tokens with 4 bits may be cut, beside numbers that are made and
multiplied by a library: TILE,OUTPUTS,WARPS,STAGES,BLOCKS, see `TiledCut`. The last column is how
far results are from float32's, of the norm.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.quantisation import Activations
from modeling.quantisation.fp4 import MXFP4, NVFP4, round_fp4
from modeling.quantisation.fp8 import round_blocks
from modeling.quantisation.integers import Groups, IntegerWeight, round_groups
from modeling.quantisation.scaled import round_rows
from sharding.linear_weight import DenseWeight, LinearWeight

DTYPE = torch.bfloat16
SHAPES = ((4096, 6144), (4096, 4096), (4096, 28672), (14336, 4096))
"""Inputs and outputs."""

BEYOND_CACHE = 160e6
"""Bytes of copies, three times the cache of an H200."""

LAUNCHES = 60

Product = Callable[[Tensor], Tensor]


def int4pack(matrix: Tensor) -> Product:
    """Make torch's own product of 4 bits, groups of 128."""
    outputs, inputs = matrix.shape
    codes = torch.randint(0, 256, (outputs, inputs // 2), dtype=torch.uint8, device="cuda")
    packed = torch._convert_weight_to_int4pack(codes, 8)
    scales = torch.rand(inputs // 128, outputs, 2, device="cuda").to(DTYPE)
    return lambda x: torch._weight_int4pack_mm(x, packed, 128, scales)


def with_zeros(matrix: Tensor) -> IntegerWeight:
    """Make integers of 4 bits with zero points, groups of 128; the matrix gives the shape."""
    groups = matrix.shape[0], matrix.shape[1] // 128
    zeros = torch.randint(0, 16, groups, dtype=torch.uint8, device="cuda")
    scales = torch.rand(groups, device="cuda").div(5 * matrix.shape[1] ** 0.5).to(DTYPE)
    return _integers(matrix, Groups(scales, zeros, _group_of(matrix, 128), 128), None)


def from_table(matrix: Tensor) -> IntegerWeight:
    """Make codes that stand for other numbers, as nf4's do, groups of 64."""
    scales = torch.rand(matrix.shape[0], matrix.shape[1] // 64, device="cuda")
    groups = Groups(scales / matrix.shape[1] ** 0.5, None, _group_of(matrix, 64), 64)
    return _integers(matrix, groups, torch.randn(16, device="cuda"))


def _group_of(matrix: Tensor, size: int) -> Tensor:
    return torch.arange(matrix.shape[1], device="cuda") // size


def _integers(matrix: Tensor, groups: Groups, table: Tensor | None) -> IntegerWeight:
    codes = torch.randint(0, 16, matrix.shape, dtype=torch.uint8, device="cuda")
    return IntegerWeight(codes, groups, 4, DTYPE, table)


INTEGERS: dict[str, Callable[[Tensor], IntegerWeight]] = {
    "4-bits": lambda matrix: round_groups(matrix, 4, 128),
    "4-bits-zeros": with_zeros,
    "4-bits-table": from_table,
}


def of(weight: LinearWeight) -> Product:
    """Make the product as models compute it."""
    return lambda x: weight(x, None)


def _of_integers(form: str, matrix: Tensor) -> Product:
    return of(INTEGERS[form](matrix))


FORMS: dict[str, Callable[[Tensor], Product]] = {
    "bfloat16": lambda matrix: of(DenseWeight(matrix)),
    "fp8": lambda matrix: of(round_rows(matrix, matrix.abs().amax(1).float(), DTYPE)),
    "fp8-blocks": lambda matrix: of(round_blocks(matrix, (128, 128), Activations.GROUP)),
    **{form: partial(_of_integers, form) for form in INTEGERS},
    "nvfp4": lambda matrix: of(round_fp4(matrix, NVFP4, rounds=True)),
    "nvfp4-weights": lambda matrix: of(round_fp4(matrix, NVFP4, rounds=False)),
    "mxfp4-weights": lambda matrix: of(round_fp4(matrix, MXFP4, rounds=False)),
    "int4pack": int4pack,
}
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8-blocks": 1.0}
"""Of a number, where it is not half of one."""

ROWS, ROWS_OF_CUTS = (1, 16, 64, 256, 2048), (96, 128, 192, 256, 384, 512, 768, 1024)


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def microseconds(products: Sequence[Product], x: Tensor) -> float:
    """Return the time of one product, the least of several replays."""
    graph = torch.cuda.CUDAGraph()
    for product in products:
        product(x)
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for launch in range(LAUNCHES):
            products[launch % len(products)](x)
    best = float("inf")
    for _ in range(4):
        start, stop = _event(), _event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, float(start.elapsed_time(stop)))
    return best / LAUNCHES * 1e3


def measure(arguments: argparse.Namespace) -> None:
    """Print a line for each shape and number of rows."""
    print("inputs outputs rows " + " ".join(arguments.forms))
    for inputs, outputs in SHAPES:
        matrix = F.normalize(torch.randn(outputs, inputs, device="cuda"), dim=1).to(DTYPE)
        found: dict[int, list[float]] = {rows: [] for rows in arguments.rows}
        for form in arguments.forms:
            copies = max(2, int(BEYOND_CACHE / (BYTES.get(form, 0.5) * matrix.numel())))
            products = [FORMS[form](matrix.clone()) for _ in range(copies)]
            for rows in arguments.rows:
                x = torch.randn(rows, inputs, device="cuda").to(DTYPE)
                found[rows].append(microseconds(products, x))
            del products
        for rows, times in found.items():
            each = " ".join(f"{time:.1f}" for time in times)
            print(f"{inputs} {outputs} {rows} {each}", flush=True)


def library(weight: IntegerWeight, x: Tensor) -> Tensor:
    """Make numbers and multiply them."""
    from modeling.quantisation.kernels import integers

    operands = weight.operands(x)
    assert operands.groups is not None
    numbers = x.new_empty(weight.shape)
    integers.dequantise(operands.weight, operands.groups, numbers)
    return F.linear(operands.x, numbers)


def tiled(cut: str, weight: IntegerWeight, x: Tensor) -> Tensor:
    """Multiply codes as a cut for so many rows says."""
    from modeling.quantisation.kernels.tiled_integers import TiledCut, tiled_product

    own = TiledCut(len(x), *map(int, cut.split(",")))
    return tiled_product(weight.operands(x), None, x.new_empty(len(x), weight.shape[0]), own)


def measure_cuts(arguments: argparse.Namespace) -> None:
    """Print a line for each shape, form and cut."""
    print(f"inputs outputs form cut {' '.join(map(str, arguments.rows))} off")
    ways: dict[str, Callable[[IntegerWeight, Tensor], Tensor]] = {
        "library": library,
        "models": lambda weight, x: weight(x, None),
        **{cut: partial(tiled, cut) for cut in arguments.cuts},
    }
    for (inputs, outputs), form in _integer_cases(arguments.forms):
        matrix = F.normalize(torch.randn(outputs, inputs, device="cuda"), dim=1).to(DTYPE)
        copies = max(2, int(BEYOND_CACHE / (BYTES.get(form, 0.5) * matrix.numel())))
        weights = [INTEGERS[form](matrix) for _ in range(copies)]
        xs = [torch.randn(rows, inputs, device="cuda").to(DTYPE) for rows in arguments.rows]
        numbers = weights[0][:].float()
        wanted = [F.linear(x.float(), numbers) for x in xs]
        for name, way in ways.items():
            off = max(_off(way(weights[0], x), own) for x, own in zip(xs, wanted, strict=True))
            products = [partial(way, weight) for weight in weights]
            times = " ".join(f"{microseconds(products, x):.1f}" for x in xs)
            print(inputs, outputs, form, name, times, f"{off:.1e}", flush=True)


def _integer_cases(forms: Sequence[str]) -> Iterator[tuple[tuple[int, int], str]]:
    return ((shape, form) for shape in SHAPES for form in forms if form in INTEGERS)


def _off(found: Tensor, wanted: Tensor) -> float:
    """How far results are from those of float32, of the norm."""
    return float((found.float() - wanted).norm() / wanted.norm())


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the GPU that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--cuts", nargs="+", metavar="TILE,OUTPUTS,WARPS,STAGES,BLOCKS")
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    parsed.rows = parsed.rows or (ROWS_OF_CUTS if parsed.cuts else ROWS)
    with torch.inference_mode():
        if parsed.cuts:
            measure_cuts(parsed)
        else:
            measure(parsed)


if __name__ == "__main__":
    main()
