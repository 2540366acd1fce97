"""What reading adapters costs the thread that launches steps beside it.

    python -m benchmarks.staging --readers 4 --switch-ms 0.5
    python -m benchmarks.staging --large --adapters 8

Writes small adapters of Llama-3-8B's shape (r = 4, q and v; `--large`: r = 16 on all maps), stages
each once so that files and memory are warm, then stages all of them again on some threads while
another thread makes 150 small torch calls every 5 ms, as a launch does. One JSON line: milliseconds
of one staging alone, by the clock and of CPU, of all of them together, and of a launch alone and
meanwhile. `--switch-ms`: how long a thread may keep the interpreter while others wait; Python's own
is 5.
"""

import argparse
import json
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from benchmarks.serving import percentile
from benchmarks.workload import SHAPES, projection_sizes, recipes, write_adapters
from configs.interpreter import SWITCH_INTERVAL_S
from configs.wire.adapters import AdapterKey, FetchedAdapter
from modeling.adapters.bank import AdapterBank, BankSize
from modeling.adapters.projection import Projection

HOST_BYTES, CALLS, EVERY_S = 2**32, 150, 0.005
LARGEST_RANK = 16


def make_bank(shape: str, device: str) -> AdapterBank:
    """A bank with a host tier for all of them, in bfloat16."""
    layers = SHAPES[shape]["num_hidden_layers"]
    projections = [
        Projection(name, f"model.layers.{{layer}}.{name}", i, o, ((0, i),), ((0, o),), layers)
        for name, (i, o) in projection_sizes(shape).items()
    ]
    size = BankSize(pages=2, slots=1, max_rank=LARGEST_RANK, host_bytes=HOST_BYTES)
    return AdapterBank(projections, size, torch.bfloat16, torch.device(device))


class LaunchThread:
    """A thread that launches and records the seconds of each launch."""

    def __init__(self) -> None:
        """Start at once."""
        self.took: list[float] = []
        self._ended = threading.Event()
        self._numbers = torch.zeros(64)
        self._thread = threading.Thread(target=self._launch)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the last launch."""
        self._ended.set()
        self._thread.join()

    def _launch(self) -> None:
        while not self._ended.wait(EVERY_S):
            began = time.perf_counter()
            for _ in range(CALLS):
                self._numbers.add_(1)
            self.took.append(time.perf_counter() - began)


def measure(
    folder: Path, shape: str, names: Sequence[str], readers: int, device: str
) -> dict[str, float | None]:
    """Stage all alone, then side by side beside launches."""
    bank, count = make_bank(shape, device), len(names)
    fetched = [
        FetchedAdapter(AdapterKey(i), name, str(folder / name), name)
        for i, name in enumerate(names)
    ]
    alone, computed = [], []
    for adapter in fetched * 2:
        bank.drop(adapter.key)
        began, cpu = time.perf_counter(), time.thread_time()
        bank.stage(adapter)
        alone.append(time.perf_counter() - began)
        computed.append(time.thread_time() - cpu)
    for adapter in fetched:
        bank.drop(adapter.key)
    launcher = LaunchThread()
    time.sleep(0.5)
    quiet, launcher.took = launcher.took, []
    began = time.perf_counter()
    with ThreadPoolExecutor(readers) as pool:
        list(pool.map(bank.stage, fetched))
    together = time.perf_counter() - began
    launcher.stop()
    return {
        "one_alone_p50_ms": percentile(alone[count:], 0.5),
        "one_alone_cpu_p50_ms": percentile(computed[count:], 0.5),
        "all_ms": round(together * 1e3, 2),
        "launch_alone_p50_ms": percentile(quiet, 0.5),
        "launch_meanwhile_p50_ms": percentile(launcher.took, 0.5),
        "launch_meanwhile_max_ms": percentile(launcher.took, 1.0),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--work", type=Path, default=Path("/tmp/loray-staging"))
    made.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    made.add_argument("--adapters", type=int, default=40)
    made.add_argument("--large", action="store_true")
    made.add_argument("--readers", type=int, default=4)
    made.add_argument("--device", default="cpu", help="cuda: as ranks with a GPU stage")
    made.add_argument("--switch-ms", type=float, default=SWITCH_INTERVAL_S * 1e3)
    parsed = made.parse_args(arguments)
    count = parsed.adapters
    wanted = recipes(count, 0, 0, (LARGEST_RANK,)) if parsed.large else recipes(0, 0, count)
    write_adapters(parsed.work, parsed.shape, wanted)
    torch.set_num_threads(1)
    sys.setswitchinterval(parsed.switch_ms / 1e3)
    settings = {
        "readers": parsed.readers,
        "device": parsed.device,
        "switch_ms": parsed.switch_ms,
        "adapters": parsed.adapters,
    }
    row = measure(
        parsed.work, parsed.shape, [each.name for each in wanted], parsed.readers, parsed.device
    )
    print(json.dumps(settings | row))


if __name__ == "__main__":
    main()
