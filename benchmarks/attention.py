"""What paged attention costs: `python -m benchmarks.attention`, on one GPU.

Our Triton kernels beside FlashInfer's, for rows of one length: decode steps as one CUDA graph over
several layers, prefill launched. Bytes are those of keys and values, each once. `--tune` tries
sizes for modeling/attention/triton/forms.py.
"""

import argparse
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import accumulate

import numpy as np
import torch
import triton

from benchmarks.kernels import graph_ms
from modeling.attention.base import AttentionBackend, AttentionSpec
from modeling.attention.kv_cache import FP8, UNSCALED, CacheSpec, LayerCache, allocate
from modeling.attention.triton.backend import TritonAttention
from modeling.attention.triton.forms import DecodeForm, PrefillForm

DECODE_ROWS = (1, 8, 64, 256)
PREFILLS = ((8, 512, 512), (1, 4096, 4096), (8, 64, 2048))
"""Rows, queries of each, keys of each."""

WORKING_SET = 2**28
"""Bytes of keys and values of a graph's layers, beyond what the device's own cache holds."""

Times = dict[str, float]


class Rows:
    """Rows of equal lengths in shuffled pages, in each of several layers."""

    def __init__(self, spec: AttentionSpec, rows: int, queries: int, keys: int) -> None:
        self.spec, self.rows, self.queries, self.keys = spec, rows, queries, keys
        blocks = -(-keys // spec.page_size)
        dtype = spec.cache_dtype or spec.dtype
        is_latent = spec.value_dim is not None
        values = rows * keys * spec.num_kv_heads * spec.head_dim * dtype.itemsize
        self.layer_bytes = values if is_latent else 2 * values
        count = max(8, min(32, WORKING_SET // self.layer_bytes))
        scales = (UNSCALED,) * count if dtype == FP8 else ()
        sizes = (count, spec.page_size, spec.num_kv_heads, spec.head_dim)
        cache = CacheSpec(*sizes, dtype, scales, keys_only=is_latent)
        self.layers: list[LayerCache] = allocate(cache, rows * blocks, spec.device)
        for layer in self.layers:
            for part in (layer.keys, layer.values):
                part.copy_(torch.randn(part.shape, device=spec.device, dtype=spec.dtype).to(dtype))
        tables = torch.randperm(rows * blocks, device=spec.device).view(rows, blocks)
        self.tables = tables.to(torch.int32)
        shape = (rows * queries, spec.num_heads, spec.head_dim)
        self.q = torch.randn(shape, dtype=spec.dtype, device=spec.device)
        starts = [0, *accumulate([queries] * rows)]
        self.starts = torch.tensor(starts, dtype=torch.int32, device=spec.device)
        self.sinks = torch.zeros(spec.num_heads, device=spec.device) if spec.sinks else None

    def work(self, backend: AttentionBackend) -> Callable[[], None]:
        """All layers' attention, over words of a captured step or over a prepared one."""
        if self.queries == 1:
            count = backend.graph_words(self.rows, self.tables.shape[1])
            assert count is not None
            words = torch.zeros(count, dtype=torch.int32, device=self.spec.device)
            captured = backend.graph_form(self.rows, words)
            host = np.zeros(count, dtype=np.int32)
            keys = np.full(self.rows, self.keys, dtype=np.int32)
            captured.write(host, keys, self.tables.cpu().numpy())
            words.copy_(torch.from_numpy(host))
            captured.plan(0)
            step = captured.step
        else:
            lengths = ([self.queries] * self.rows, [self.keys] * self.rows)
            step = backend.prepare(*lengths, self.tables)
        (window,) = self.spec.windows

        def compute() -> None:
            for layer in self.layers:
                backend.forward(self.q, layer, self.starts, self.tables, step, window, self.sinks)

        return compute

    def us(self, backend: AttentionBackend) -> float:
        """Microseconds of one layer."""
        work = self.work(backend)
        ms = graph_ms(work) if self.queries == 1 else launched_ms(work)
        return ms * 1e3 / len(self.layers)

    def figures(self, us: float) -> str:
        """Bytes or operations a second."""
        if self.queries == 1:
            return f"{self.layer_bytes / us / 1e6:5.2f} TB/s"
        seen = self.queries * self.keys - self.queries * (self.queries - 1) // 2
        width = self.spec.head_dim + (self.spec.value_dim or self.spec.head_dim)
        operations = 2 * self.rows * seen * self.spec.num_heads * width
        return f"{operations / us / 1e6:5.0f} TFLOP/s"


def launched_ms(work: Callable[[], None], repeats: int = 20) -> float:
    """Median milliseconds of work that is launched, not captured."""
    times = []
    for _ in range(3 + repeats):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        work()
        stop.record()
        stop.synchronize()
        times.append(float(start.elapsed_time(stop)))
    return statistics.median(times[3:])


def backends(spec: AttentionSpec) -> dict[str, AttentionBackend]:
    """Triton, and FlashInfer if it is installed and serves the spec."""
    found: dict[str, AttentionBackend] = {"triton": TritonAttention(spec)}
    try:
        from modeling.attention.flashinfer import FlashInferAttention

        found["flashinfer"] = FlashInferAttention(spec)
    except (ImportError, ValueError) as error:
        print(f"without FlashInfer: {error}")
    return found


def table(spec: AttentionSpec, keys: int) -> None:
    """Print one layer's times."""
    found = backends(spec)
    shapes = [*((rows, 1, keys) for rows in DECODE_ROWS), *PREFILLS]
    for shape in shapes:
        rows = Rows(spec, *shape)
        times: Times = {name: rows.us(backend) for name, backend in found.items()}
        line = f"{shape[0]:4} rows, {shape[1]:4} queries, {shape[2]:5} keys:"
        for name, us in times.items():
            line += f"  {name} {us:7.1f} us {rows.figures(us)}"
        if len(times) == 2:
            line += f"  ratio {times['triton'] / times['flashinfer']:.2f}"
        print(line, flush=True)


def decode_forms(form: DecodeForm) -> Iterator[DecodeForm]:
    """Yield the form with other sizes."""
    for keys in {form.keys // 2, form.keys, form.keys * 2} - {8}:
        for warps in (2, 4):
            for stages in (2, 3, 4):
                yield replace(form, keys=keys, warps=warps, stages=stages)
    for min_split in (128, 512):
        yield replace(form, min_split=min_split)
    for programs in (512, 2048, 4096):
        yield replace(form, programs=programs)


def prefill_forms(form: PrefillForm) -> Iterator[PrefillForm]:
    """Yield the form with other sizes."""
    for rows, warps in ((64, 4), (128, 4), (128, 8)):
        for keys in (32, 64, 128):
            for stages in (2, 3, 4):
                yield replace(form, rows=rows, keys=keys, warps=warps, stages=stages)


def tune(spec: AttentionSpec, keys: int) -> None:
    """Print the times of other forms by their product, the best first."""
    start = TritonAttention(spec)
    decodes = [Rows(spec, count, 1, keys) for count in DECODE_ROWS]
    print_forms(spec, decodes, "decode_form", list(decode_forms(start.decode_form)))
    del decodes
    prefills = [Rows(spec, *shape) for shape in PREFILLS]
    print_forms(spec, prefills, "prefill_form", list(prefill_forms(start.prefill_form)))


def print_forms(
    spec: AttentionSpec, cases: list[Rows], name: str, forms: list[DecodeForm | PrefillForm]
) -> None:
    """Print the cases' microseconds with each form in the place `name` of a backend."""
    found = []
    for form in forms:
        backend = TritonAttention(spec)
        setattr(backend, name, form)
        try:
            times = [rows.us(backend) for rows in cases]
        except triton.runtime.errors.OutOfResources as error:
            print(f"  does not fit: {form}: {error}")
            continue
        found.append((statistics.geometric_mean(times), times, form))
    for mean, times, form in sorted(found, key=lambda entry: entry[0]):
        print(f"  {mean:7.1f} | {' '.join(f'{us:7.1f}' for us in times)} | {form}", flush=True)


def parsed() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--value-dim", type=int, help="of latents: the keys' first numbers")
    parser.add_argument("--page-size", type=int, default=16)
    parser.add_argument("--keys", type=int, default=768, help="of a decode row")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--fp8", action="store_true", help="an fp8 cache")
    parser.add_argument("--window", type=int)
    parser.add_argument("--softcap", type=float)
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--tune", action="store_true", help="try other sizes")
    return parser.parse_args()


def main() -> None:
    """Print versions, then the table or the search."""
    options = parsed()
    if not torch.cuda.is_available():
        sys.exit("this benchmark needs a CUDA device")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, triton {triton.__version__}")
    spec = AttentionSpec(
        num_heads=options.heads,
        num_kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        scale=options.head_dim**-0.5,
        page_size=options.page_size,
        dtype=getattr(torch, options.dtype),
        device=torch.device("cuda", 0),
        windows=(options.window,),
        cache_dtype=FP8 if options.fp8 else None,
        softcap=options.softcap,
        sinks=options.sinks,
        value_dim=options.value_dim,
    )
    with torch.inference_mode():
        (tune if options.tune else table)(spec, options.keys)


if __name__ == "__main__":
    main()
