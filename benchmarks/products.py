"""Products with quantised weights, by their form: `python -m benchmarks.products`, on one GPU.

Each case is launched over copies of its weights that the second-level cache does not hold, in one
CUDA graph, as a captured step launches it. Rounding the activations is part of a product. The
shapes are those of Llama-3-8B's linear layers, q, k, v and gate, up together.
"""

import argparse
import sys
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from configs.quantisation import Activations
from modeling.quantisation.fp8 import round_blocks, round_rows
from modeling.quantisation.integers import round_groups
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


def of(weight: LinearWeight) -> Product:
    """Make the product as models compute it."""
    return lambda x: weight(x, None)


FORMS: dict[str, Callable[[Tensor], Product]] = {
    "bfloat16": lambda matrix: of(DenseWeight(matrix)),
    "fp8": lambda matrix: of(round_rows(matrix, matrix.abs().amax(1).float(), DTYPE)),
    "fp8-blocks": lambda matrix: of(round_blocks(matrix, (128, 128), Activations.GROUP)),
    "4-bits": lambda matrix: of(round_groups(matrix, 4, 128)),
    "int4pack": int4pack,
}
BYTES = {"bfloat16": 2.0, "fp8": 1.0, "fp8-blocks": 1.0, "4-bits": 0.5, "int4pack": 0.5}
"""Of a number."""


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
            copies = max(2, int(BEYOND_CACHE / (BYTES[form] * matrix.numel())))
            products = [FORMS[form](matrix.clone()) for _ in range(copies)]
            for rows in arguments.rows:
                x = torch.randn(rows, inputs, device="cuda").to(DTYPE)
                found[rows].append(microseconds(products, x))
            del products
        for rows, times in found.items():
            each = " ".join(f"{time:.1f}" for time in times)
            print(f"{inputs} {outputs} {rows} {each}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the GPU that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64, 256, 2048])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    with torch.inference_mode():
        measure(parsed)


if __name__ == "__main__":
    main()
