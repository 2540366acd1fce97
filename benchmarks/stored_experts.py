"""One layer's experts, by the form that they are stored in: `python -m benchmarks.stored_experts`.

On one GPU, in microseconds: 16 launches in a CUDA graph, each routed by chance over the weights of
one of two layers. --cuts compares how forms of 4 bits may be cut:
PAIRS,UP,DOWN,WARPS,STAGES, see `StoredCut`; the last column is how far their results are from those
of the cuts that steps take.
"""

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

LAUNCHES, LAYERS = 16, 2

SHAPES: dict[str, tuple[int, int, int, int]] = {
    "qwen3-30b-a3b": (2048, 768, 128, 8),
    "gpt-oss-20b": (2880, 2880, 32, 4),
    "mixtral-8x7b": (4096, 14336, 8, 2),
}
"""Hidden size, inner size, experts, experts of a token."""

Step = tuple[Tensor, Tensor, Tensor]
"""x, the experts of each token and their shares."""

Layer = Callable[[Tensor, Tensor, Tensor], Tensor]


def _bytes(*shape: int) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, device="cuda")


def bfloat16(count: int, up: tuple[int, int], down: tuple[int, int]) -> Layer:
    """Make a layer of numbers as they are."""
    from modeling.layers.kernels import experts

    up_own, down_own = (
        torch.randn(count, *shape, device="cuda", dtype=torch.bfloat16) / shape[1] ** 0.5
        for shape in (up, down)
    )
    counts = torch.zeros(count, dtype=torch.int32, device="cuda")
    return lambda x, ids, shares: experts.experts(x, up_own, down_own, ids, shares, counts)


def mxfp4(count: int, outputs: int, inputs: int) -> Any:
    """Make weights as gpt-oss has them."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    chunks = -(-inputs // 128)
    codes = _bytes(count, chunks, outputs, 64).view(torch.int16)
    scales = (_bytes(count, chunks, 1, outputs, 4) % 4 + 118).view(torch.int32).squeeze(-1)
    return StoredWeight(codes, scales, None, (outputs, inputs), 32)


def nvfp4(rounds: bool, count: int, outputs: int, inputs: int) -> Any:
    """Make weights in nvfp4; rounds: whether inputs are rounded too."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    chunks, shape = -(-inputs // 128), (outputs, inputs)
    codes = _bytes(count, chunks, outputs, 64).view(torch.int16)
    scales = (_bytes(count, chunks, 2, outputs, 4) % 120).view(torch.int32).squeeze(-1)
    outer = torch.rand(count, outputs, device="cuda") / (400 * inputs**0.5)
    own = torch.rand(count, device="cuda") * 800 + 100 if rounds else None
    return StoredWeight(codes, scales, None, shape, 16, outer, rounds, own)


def fp8_blocks(count: int, outputs: int, inputs: int) -> Any:
    """Make weights as Qwen and DeepSeek publish them."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    codes = torch.randn(count, outputs, inputs, device="cuda").to(torch.float8_e4m3fn)
    scales = torch.rand(count, outputs // 128, inputs // 128, device="cuda") / inputs**0.5
    return StoredWeight(codes, scales, None, (outputs, inputs))


def scaled(kind: torch.dtype, static: bool, count: int, outputs: int, inputs: int) -> Any:
    """Make weights in 8 bits with scales of outputs; static: whether those of inputs are stored."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    codes = torch.randn(count, outputs, inputs, device="cuda").mul(40).to(kind)
    scales = torch.rand(count, outputs, device="cuda") / (40 * inputs**0.5)
    own = torch.rand(count, device="cuda") / 100 if static else None
    shape = outputs, inputs
    return StoredWeight(codes, scales, None, shape, rounds=True, input_scales=own)


def integers(group: int, zeros: bool, count: int, outputs: int, inputs: int) -> Any:
    """Make weights as GPTQ and AWQ have them."""
    from modeling.layers.kernels.stored_weights import StoredWeight

    codes = _bytes(count, -(-inputs // 128), outputs, 64).view(torch.int16)
    scales = torch.rand(count, -(-inputs // group), outputs, device="cuda") / (5 * inputs**0.5)
    points = _bytes(*scales.shape) % 16 if zeros else None
    shape = outputs, inputs
    return StoredWeight(codes, scales.bfloat16(), None, shape, group=group, middle=8, zeros=points)


def _stored(make: Callable[[int, int, int], Any], *sizes: Any) -> Layer:
    from modeling.layers.kernels.stored_experts import stored_experts
    from modeling.layers.kernels.stored_weights import Gate

    count, *shapes = sizes
    up, down = (make(count, *shape) for shape in shapes)
    counts = torch.zeros(count, dtype=torch.int32, device="cuda")
    gate = Gate(True, 7.0, 1.702) if make is mxfp4 else Gate()
    return lambda x, ids, shares: stored_experts(x, up, down, gate, ids, shares, counts)


FORMS: dict[str, Callable[[int, tuple[int, int], tuple[int, int]], Layer]] = {
    "bfloat16": bfloat16,
    "fp8-blocks": partial(_stored, fp8_blocks),
    "fp8": partial(_stored, partial(scaled, torch.float8_e4m3fn, False)),
    "fp8-static": partial(_stored, partial(scaled, torch.float8_e4m3fn, True)),
    "8-bits": partial(_stored, partial(scaled, torch.int8, False)),
    "mxfp4": partial(_stored, mxfp4),
    "nvfp4": partial(_stored, partial(nvfp4, True)),
    "nvfp4-weights": partial(_stored, partial(nvfp4, False)),
    "4-bits": partial(_stored, partial(integers, 128, False)),
    "4-bits-zeros": partial(_stored, partial(integers, 128, True)),
    "4-bits-32": partial(_stored, partial(integers, 32, True)),
}


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def microseconds(layers: Sequence[Layer], steps: Sequence[Step]) -> float:
    """Return the time of one layer, the least of several replays."""

    def launch() -> None:
        for number, step in enumerate(steps):
            layers[number % len(layers)](*step)

    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch()
    best = float("inf")
    for _ in range(5):
        start, stop = _event(), _event()
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        best = min(best, float(start.elapsed_time(stop)))
    return best / len(steps) * 1e3


def _steps(tokens: int, name: str) -> list[Step]:
    """Make inputs that are routed by chance, the same at each call."""
    hidden, _, count, active = SHAPES[name]
    torch.manual_seed(tokens)
    made = []
    for _ in range(LAUNCHES):
        x = torch.randn(tokens, hidden, device="cuda", dtype=torch.bfloat16)
        shares, ids = torch.rand(tokens, count, device="cuda").softmax(-1).topk(active)
        made.append((x, ids, shares.bfloat16()))
    return made


def measure(arguments: argparse.Namespace) -> None:
    """Print a line for each shape and form, or each cut of stored ones."""
    print(f"shape form cut {' '.join(map(str, arguments.tokens))} off")
    for name in arguments.shapes:
        hidden, inner, count, _ = SHAPES[name]
        for form in arguments.forms:
            if form == "fp8-blocks" and (hidden % 128 or inner % 128):
                continue
            made = FORMS[form]
            layers = [made(count, (2 * inner, hidden), (hidden, inner)) for _ in range(LAYERS)]
            cuts = [] if form == "bfloat16" else arguments.cuts
            own = [layers[0](*_steps(tokens, name)[0]) for tokens in arguments.tokens]
            for cut in ("own", *cuts):
                with _cut_so(cut):
                    found = [layers[0](*_steps(tokens, name)[0]) for tokens in arguments.tokens]
                    off = max(map(_off, found, own))
                    times = [microseconds(layers, _steps(each, name)) for each in arguments.tokens]
                print(name, form, cut, *(f"{time:.1f}" for time in times), f"{off:.0e}", flush=True)
            del layers


def _off(found: Tensor, own: Tensor) -> float:
    """How far results are from those of the cuts that steps take, of the norm."""
    return float((found.float() - own.float()).norm() / own.float().norm())


@contextmanager
def _cut_so(cut: str) -> Iterator[None]:
    """Cut codes so meanwhile; own: as steps do."""
    from modeling.layers.kernels import stored_weights

    names = ("INTEGER_CUTS", "FP4_CUTS", "SCALED_CUTS")
    own = {name: getattr(stored_weights, name) for name in names}
    if cut != "own":
        one = stored_weights.StoredCut(2**31, *map(int, cut.split(",")))
        vars(stored_weights).update(dict.fromkeys(names, (one,)))
    try:
        yield
    finally:
        vars(stored_weights).update(own)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the GPU that is here."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=list(SHAPES), default=["qwen3-30b-a3b"])
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 4, 16, 64, 256, 2048])
    parser.add_argument("--cuts", nargs="+", default=[], metavar="PAIRS,UP,DOWN,WARPS,STAGES")
    parsed = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    with torch.inference_mode():
        measure(parsed)


if __name__ == "__main__":
    main()
