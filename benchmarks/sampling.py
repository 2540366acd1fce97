"""What sampling costs a decode step beyond a greedy one: `python -m benchmarks.sampling`.

    python -m benchmarks.sampling --rows 1 64 --adapters 0 32

One rank's runner is driven directly, with random weights: flat distributions, of which top-p keeps
tens of thousands of tokens, the costliest case. Rows have one set of parameters, each its own seed.
Every set is measured between two greedy runs, each step launched while the one before it runs, as
a server does. `--kernels` prints the costliest kernels of each step too.
"""

import argparse
import tempfile
from collections.abc import Sequence
from pathlib import Path

from msgspec.structs import replace

from benchmarks.offline import Benchmark, OfflineCase
from benchmarks.offline_setup import model_parser
from configs.wire.sampling import Sampling

TOP = Sampling(temperature=0.8, top_k=50, top_p=0.95)
PENALISED = replace(TOP, repetition_penalty=1.1, frequency_penalty=0.2)
MIXES = {
    "temperature": Sampling(temperature=1.0),
    "top_p 0.95": Sampling(temperature=1.0, top_p=0.95),
    "top_p 0.5": Sampling(temperature=1.0, top_p=0.5),
    "min_p 0.05": Sampling(temperature=1.0, min_p=0.05),
    "top_k 50, top_p 0.95": TOP,
    "the same, penalties": PENALISED,
    "the same, 5 logprobs": replace(PENALISED, logprobs=5),
    "penalties, greedy": Sampling(repetition_penalty=1.1, frequency_penalty=0.2),
    "typical_p 0.9": Sampling(temperature=1.0, typical_p=0.9),
    "5 logprobs, greedy": Sampling(logprobs=5),
}
"""Name to parameters."""


def measure(benchmark: Benchmark, rows: int, options: argparse.Namespace) -> None:
    """Print what each mix adds to a step of so many rows."""
    adapters = max(options.adapters)
    greedy = benchmark.decode(OfflineCase(rows, options.context, adapters))["ms_per_step"]
    print(f"{rows} rows over {adapters} adapters, greedy: {greedy:.3f} ms a step", flush=True)
    for name in options.mixes:
        case = OfflineCase(rows, options.context, adapters, MIXES[name])
        taken = benchmark.decode(case)["ms_per_step"]
        again = benchmark.decode(OfflineCase(rows, options.context, adapters))["ms_per_step"]
        added = taken - (greedy + again) / 2
        greedy = again
        share = 100 * added / greedy
        print(f"  {name:24} {taken:7.3f} ms {1000 * added:+6.0f} us {share:+5.1f} %", flush=True)
        if options.kernels:
            print(benchmark.kernels_of_decode(case, options.kernels), flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = model_parser(__doc__)
    parser.add_argument("--rows", dest="batches", type=int, nargs="+", default=[1, 64])
    parser.add_argument("--adapters", type=int, nargs="+", default=[0])
    parser.add_argument("--mixes", nargs="+", choices=MIXES, default=list(MIXES))
    parser.add_argument("--context", type=int, default=512)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--kernels", type=int, default=0, metavar="MOST")
    parser.set_defaults(block_size=16, num_blocks=None, max_step_tokens=2048, max_total_tokens=2048)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure on the device that is here."""
    options = _parser().parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder:
        benchmark = Benchmark(options, Path(folder))
        for rows in options.batches:
            measure(benchmark, rows, options)


if __name__ == "__main__":
    main()
