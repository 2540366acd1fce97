"""What adapters add to a step: `python -m benchmarks.kernels`, on one GPU.

Llama-3-8B's seven projections of 32 layers run in one CUDA graph, with adapters of random weights
and of one rank, or of several ranks in rotation. Bytes are those of A and B, once for each adapter;
they are compared with the bytes that a copy on the same device reads and writes. `--tune` tries
block sizes for modeling/adapters/kernels/forms.py.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch
import triton
from torch import Tensor

from modeling.adapters.bank import PAGE_ROWS, AdapterBank, BankSize
from modeling.adapters.kernels.forms import Blocks, Form, forms_of
from modeling.adapters.kernels.plan import TritonPlan
from modeling.adapters.product import OutputSlice
from modeling.adapters.projection import Projection
from sharding.linear_weight import DenseWeight

DTYPE = torch.bfloat16
NUM_LAYERS = 32
HIDDEN, KEYS, INNER = 4096, 1024, 14336
SHAPES = {
    "q_proj": (HIDDEN, HIDDEN),
    "k_proj": (HIDDEN, KEYS),
    "v_proj": (HIDDEN, KEYS),
    "o_proj": (HIDDEN, HIDDEN),
    "gate_proj": (HIDDEN, INNER),
    "up_proj": (HIDDEN, INNER),
    "down_proj": (INNER, HIDDEN),
}
FUSED = ((0, 1, 2), (3,), (4, 5), (6,))
"""Projections that share an input: q, k, v; o; gate, up; down."""

DECODE_CASES = [(1, 1), (64, 1), (64, 8), (64, 32), (64, 64), (256, 1), (256, 32)]
PREFILL_CASES = [(2048, 1), (2048, 8)]
TUNE_CASES = {
    64: [(1, 1), (64, 1), (64, 32)],
    256: [(256, 1), (256, 32)],
    2048: [(2048, 1), (2048, 8)],
}
"""For the largest step of a form: its (tokens, adapters)."""


@dataclass(frozen=True)
class Layer:
    """One fused linear map as a step meets it: its input, its output, the targets."""

    x: Tensor
    y: Tensor
    targets: tuple[OutputSlice, ...]


def make_bank(num_adapters: int, rotation: Sequence[int], max_rank: int) -> AdapterBank:
    """Return a bank of random adapters, of these ranks in rotation in all slots."""
    projections = [
        Projection(name, f"model.layers.{{layer}}.{name}", k, n, ((0, k),), ((0, n),), NUM_LAYERS)
        for name, (k, n) in SHAPES.items()
    ]
    ranks = ranks_of(num_adapters, rotation)
    pages = [-(-rank // PAGE_ROWS) for rank in ranks]
    size = BankSize(sum(pages), num_adapters, max_rank, 0)
    bank = AdapterBank(projections, size, DTYPE, torch.device("cuda"))
    for pool in bank.pools:
        pool.a.normal_(std=0.01)
        pool.bt.normal_(std=0.01)
    shuffled = torch.randperm(size.pages, device="cuda", dtype=torch.int32)
    ends = list(accumulate(pages))
    for slot, (count, end) in enumerate(zip(pages, ends, strict=True)):
        bank.page_table[slot, :, :count] = shuffled[end - count : end]
    bank.ranks.copy_(torch.tensor(ranks)[:, None, None].expand_as(bank.ranks))
    return bank


def ranks_of(num_adapters: int, rotation: Sequence[int]) -> list[int]:
    """Return each adapter's rank."""
    return [rotation[slot % len(rotation)] for slot in range(num_adapters)]


def make_layers(num_tokens: int) -> list[Layer]:
    """Return inputs and outputs of one layer's fused linear maps."""
    shapes = list(SHAPES.values())
    layers = []
    for group in FUSED:
        outputs = [shapes[p][1] for p in group]
        targets = [OutputSlice(p, sum(outputs[:i])) for i, p in enumerate(group)]
        x = torch.randn(num_tokens, shapes[group[0]][0], dtype=DTYPE, device="cuda")
        y = torch.randn(num_tokens, sum(outputs), dtype=DTYPE, device="cuda")
        layers.append(Layer(x, y, tuple(targets)))
    return layers


def make_weights() -> list[list[DenseWeight]]:
    """Return the base model's weights, [out, in]: 14 GB that no cache holds."""
    shapes = list(SHAPES.values())
    return [
        [
            DenseWeight(
                torch.empty(
                    sum(shapes[p][1] for p in group),
                    shapes[group[0]][0],
                    dtype=DTYPE,
                    device="cuda",
                ).normal_(std=0.02)
            )
            for group in FUSED
        ]
        for _ in range(NUM_LAYERS)
    ]


def _timer() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


def graph_ms(work: Callable[[], None], repeats: int = 20) -> float:
    """Capture some work and return the median time of its replays in milliseconds."""
    work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    times = []
    for _ in range(3 + repeats):
        start, stop = (_timer(), _timer())
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return statistics.median(times[3:])


def step(
    bank: AdapterBank,
    case: tuple[int, int],
    forms: tuple[Form, ...] | None = None,
    weights: list[list[DenseWeight]] | None = None,
) -> float:
    """Return the milliseconds of a step of (tokens, adapters); with `weights`, of both products.

    Up to 512 tokens the grid is that of a captured decode step, above the step's own.
    """
    num_tokens, num_adapters = case
    plan = TritonPlan(bank, num_tokens, forms)
    slots = [i % num_adapters for i in range(num_tokens)]
    if num_tokens > 512:
        slots.sort()
    tiles = plan.update(slots, [1] * num_tokens)
    data = plan.batch(num_tokens, tiles if num_tokens > 512 else None)
    layers = make_layers(num_tokens)

    def work() -> None:
        for index in range(NUM_LAYERS):
            for at, layer in enumerate(layers):
                x, y, targets = layer.x, layer.y, layer.targets
                if weights is not None and data.has_product(x, weights[index][at], targets):
                    data.product(y, x, weights[index][at], index, targets)
                elif weights is not None:
                    torch.mm(x, weights[index][at].matrix.t(), out=y)
                data.add(y, x, index, targets)

    return graph_ms(work)


def base_step(num_tokens: int, weights: list[list[DenseWeight]]) -> float:
    """Return the milliseconds of the base products alone."""
    layers = make_layers(num_tokens)

    def work() -> None:
        for index in range(NUM_LAYERS):
            for at, layer in enumerate(layers):
                torch.mm(layer.x, weights[index][at].matrix.t(), out=layer.y)

    return graph_ms(work)


def copy_bandwidth() -> float:
    """Return the bytes a second that a copy on the device reads and writes."""
    source = torch.empty(2**31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)

    def work() -> None:
        target.copy_(source)

    ms = graph_ms(work)
    return 2 * source.nbytes / ms * 1e3


def adapter_bytes(ranks: Iterable[int]) -> int:
    """Return the bytes of A and B of adapters of these ranks."""
    widths = sum(k + n for k, n in SHAPES.values())
    return sum(ranks) * widths * NUM_LAYERS * DTYPE.itemsize


def table(arguments: argparse.Namespace) -> None:
    """Print what steps cost: adapters alone, and beside the base products."""
    bandwidth = copy_bandwidth()
    print(f"copy on the device: {bandwidth / 1e12:.2f} TB/s (read plus written)")
    cases = DECODE_CASES + PREFILL_CASES
    bank = make_bank(max(n for _, n in cases), arguments.ranks, arguments.max_rank)
    weights = None if arguments.no_base else make_weights()
    base: dict[int, float] = {}
    print(
        " rows adapters  ms/step  us/layer     GB   TB/s  of copy | base ms  with adapters  added"
    )
    for case in cases:
        ms = step(bank, case)
        moved = adapter_bytes(ranks_of(case[1], arguments.ranks))
        rate = moved / ms * 1e3
        line = f"{case[0]:5} {case[1]:8} {ms:8.3f} {ms / NUM_LAYERS * 1e3:9.1f} {moved / 1e9:6.2f}"
        line += f" {rate / 1e12:6.2f} {rate / bandwidth:7.0%}  |"
        if weights is not None:
            own = base.setdefault(case[0], base_step(case[0], weights))
            both = step(bank, case, weights=weights)
            line += f" {own:7.3f} {both:14.3f} {both / own - 1:6.1%}"
        print(line, flush=True)


def products(arguments: argparse.Namespace) -> None:
    """Print what the base products alone cost by the number of tokens."""
    weights = make_weights()
    print("tokens       ms")
    for num_tokens in arguments.products:
        print(f"{num_tokens:6} {base_step(num_tokens, weights):8.3f}", flush=True)


def shrinks(form: Form) -> Iterator[Form]:
    """Yield the form with other splits and shrinks."""
    columns = (128, 256, 512) if form.tile_tokens < 64 else (64, 128)
    splits = (4, 8, 16) if form.tile_tokens < 32 else (1, 2, 4)
    for parts in splits:
        for width in columns:
            for warps in (2, 4) if width < 512 else (4, 8):
                for stages in (2, 4) if width < 512 else (2, 3):
                    yield replace(form, splits=parts, shrink=Blocks(width, warps, stages))


def expands(form: Form) -> Iterator[Form]:
    """Yield the form with other expands."""
    for columns, warps in ((64, 4), (128, 2), (128, 4), (128, 8), (256, 4), (256, 8), (512, 8)):
        for registers in (None, 80) if warps * 32 * 80 < 2**15 else (None,):
            yield replace(form, expand=Blocks(columns, warps, 1, registers))


def tried(
    bank: AdapterBank,
    forms: Iterator[Form],
    cases: list[tuple[int, int]],
    weights: list[list[DenseWeight]] | None,
) -> Form:
    """Time forms over cases, print them by rising product of their times, and return the best."""
    found = []
    for form in forms:
        try:
            times = [step(bank, case, (form,), weights) for case in cases]
        except (triton.runtime.errors.OutOfResources, triton.runtime.errors.PTXASError) as error:
            print(f"  does not fit: {form}: {error}")
            continue
        found.append((statistics.geometric_mean(times), times, form))
    found.sort(key=lambda entry: entry[0])
    for mean, times, form in found:
        each = " ".join(f"{ms:7.3f}" for ms in times)
        print(
            f"  {mean:7.3f} | {each} | splits {form.splits} programs {form.programs} "
            f"more_rows {form.more_rows} {form.shrink} {form.expand}"
        )
    return found[0][2]


def tune(arguments: argparse.Namespace) -> None:
    """Search the sizes of one form: shrink and splits, expand, more_rows, then programs.

    Beside the base products: what is best for the adapters alone takes registers and shared memory
    from the kernels that a step runs them with.
    """
    cases = TUNE_CASES[arguments.tune]
    weights = None if arguments.no_base else make_weights()
    bank = make_bank(max(n for _, n in cases), arguments.ranks, arguments.max_rank)
    start = next(form for form in forms_of(DTYPE) if arguments.tune <= form.max_tokens)
    if arguments.tile_tokens is not None:
        start = replace(start, tile_tokens=arguments.tile_tokens)
    print(f"mean | ms for (tokens, adapters) in {cases}; tiles of {start.tile_tokens} tokens")
    best = tried(bank, shrinks(start), cases, weights)
    best = tried(bank, expands(best), cases, weights)
    best = tried(bank, (replace(best, more_rows=n) for n in (16, 32, 64)), cases, weights)
    programs = (replace(best, programs=n) for n in (512, 1024, 2048, 4096))
    best = tried(bank, programs, cases, weights)
    print(f"best: {best}")


def main() -> None:
    """Print versions, then the table or the search."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[16], help="used in rotation")
    parser.add_argument("--max-rank", type=int, default=128, help="the bank's limit")
    parser.add_argument("--no-base", action="store_true", help="leave the base products out")
    parser.add_argument("--products", type=int, nargs="+", help="only the base's, of these tokens")
    parser.add_argument("--tune", type=int, choices=sorted(TUNE_CASES), help="tokens of the form")
    parser.add_argument("--tile-tokens", type=int, help="tune with tiles of another size")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    print(
        f"{torch.cuda.get_device_name()}, torch {torch.__version__}, CUDA {torch.version.cuda}, "
        f"triton {triton.__version__}, ranks {arguments.ranks} of at most {arguments.max_rank}"
    )
    with torch.inference_mode():
        (tune if arguments.tune else products if arguments.products else table)(arguments)


if __name__ == "__main__":
    main()
