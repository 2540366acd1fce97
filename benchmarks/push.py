"""How soon pushed weights are served: from the trainer's call to all ranks, and to a first token.

    python -m benchmarks.push /tmp/push --shape llama-200m --rank 140

Serves a model of the shape with random weights in this process, without Ray; another one pushes
versions of one adapter in place, by a form and by shared memory in turn. llama3-8b needs a GPU; its
adapters of rank 16 have 84 MB, as those of llama-200m of rank 140. With --url it pushes to
a server that runs, which must serve this shape; --sleep has that one sleep and wake too.

One JSON line: medians and worst, in milliseconds. `served`: until the push was answered, when every
rank has staged it. `first_token`: until the first token of a request that was sent right after it,
which also loads the adapter. `free_gb`: of the GPU, as this process sees it before, in and after
the sleep.
"""

import argparse
import json
import multiprocessing
import statistics
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any

import httpx
import torch

from benchmarks.local import served
from benchmarks.workload import SHAPES, write_adapter, write_model
from configs.adapters import AdaptersConfig, PushConfig
from configs.engine import AttentionKind, CacheConfig, CudaGraphs, Device, EngineConfig
from configs.model import LoadFormat, ModelConfig
from configs.wire.adapters import AdapterSource

PATIENCE_S = 600.0
_NAME = "policy"
_PATH = "/v1/push_lora_adapter"
_SEND_BYTES = 1 << 20


class PushClient:
    """Pushes versions of one adapter to a server, as a trainer does."""

    def __init__(self, url: str, name: str, config: dict[str, Any], key: str | None = None) -> None:
        """config: the content of adapter_config.json. key: the admin's, if the server needs one."""
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        self.http = httpx.Client(base_url=url, timeout=PATIENCE_S, headers=headers)
        self._name = name
        self._config = config

    def push(self, weights: bytes) -> dict[str, Any]:
        """Send a version in a form; returns the adapter's row."""
        fields = {
            "lora_name": self._name,
            "load_inplace": "true",
            "adapter_config": json.dumps(self._config),
        }
        files = {"adapter_model": ("adapter_model.safetensors", weights)}
        form = self.http.build_request("POST", _PATH, data=fields, files=files)
        body = form.read()
        # httpx sends the parts of a form by 64 kB, which takes longer than all the rest.
        pieces = (body[at : at + _SEND_BYTES] for at in range(0, len(body), _SEND_BYTES))
        return _row(self.http.post(_PATH, content=pieces, headers=form.headers))

    def push_shared(self, memory: SharedMemory, size: int) -> dict[str, Any]:
        """Send a version that lies in shared memory; returns the adapter's row."""
        body = {
            "lora_name": self._name,
            "load_inplace": True,
            "adapter_config": self._config,
            "shared_memory": memory.name,
            "size": size,
        }
        return _row(self.http.post(_PATH, json=body))

    def complete(self, prompt: Any, max_tokens: int, **fields: Any) -> dict[str, Any]:
        """A completion of the adapter's present version."""
        body = {"model": self._name, "prompt": prompt, "max_tokens": max_tokens, **fields}
        return _row(self.http.post("/v1/completions", json=body))


def _row(reply: httpx.Response) -> dict[str, Any]:
    if reply.status_code != httpx.codes.OK:
        raise RuntimeError(f"HTTP {reply.status_code}: {reply.text}")
    row: dict[str, Any] = reply.json()
    return row


def version_of(weights: bytes, number: int) -> bytes:
    """The same weights with another last number: other content of the same shape."""
    return weights[:-2] + (number % 128).to_bytes(2, "little")


def measure(url: str, config: dict[str, Any], weights: bytes, versions: int) -> dict[str, Any]:
    """Push versions by turns; one is pushed before, so that nothing is the first of its kind."""
    client = PushClient(url, _NAME, config)
    took: dict[str, list[float]] = {}
    memory = SharedMemory(create=True, size=len(weights))
    try:
        for number in range(2 * versions + 2):
            by = ("form", "shared_memory")[number % 2]
            version = version_of(weights, number)
            assert memory.buf is not None
            memory.buf[: len(version)] = version
            began = time.perf_counter()
            shared = by == "shared_memory"
            client.push_shared(memory, len(version)) if shared else client.push(version)
            replied = time.perf_counter()
            client.complete([1, 2, 3], 1)
            ended = time.perf_counter()
            if number > 1:
                took.setdefault(f"{by}_served", []).append(1000 * (replied - began))
                took.setdefault(f"{by}_first_token", []).append(1000 * (ended - began))
    finally:
        memory.close()
        memory.unlink()
    return {
        name: {"median": round(statistics.median(times), 1), "worst": round(max(times), 1)}
        for name, times in took.items()
    }


def measure_sleep(url: str) -> dict[str, Any]:
    """Have a server on this GPU sleep and wake; returns seconds and free memory."""
    free, took = [_free_gb()], []
    with httpx.Client(base_url=url, timeout=PATIENCE_S) as http:
        for path in ("/sleep", "/wake_up"):
            began = time.perf_counter()
            http.post(path).raise_for_status()
            took.append(round(time.perf_counter() - began, 1))
            free.append(_free_gb())
    return {"sleep_s": took[0], "wake_s": took[1], "free_gb": free}


def _free_gb() -> float:
    return round(torch.cuda.mem_get_info()[0] / 1e9, 2)


def engine_config(folder: Path, options: argparse.Namespace) -> EngineConfig:
    """An engine with room for a few versions."""
    return EngineConfig(
        model=ModelConfig(id=str(folder), load_format=LoadFormat.DUMMY, name="base"),
        tensor_parallel=options.tensor_parallel,
        device=Device(options.device),
        attention=AttentionKind(options.attention),
        cuda_graphs=CudaGraphs.NONE,  # Their start is long, and no push waits for them.
        cache=CacheConfig(num_blocks=256),
        adapters=AdaptersConfig(
            default_source=AdapterSource.LOCAL,
            device_pages=4 * -(-options.rank // 8),
            max_device_adapters=4,
            max_rank=options.rank,
            host_bytes=2**30,
            push=PushConfig(folder=options.push_folder),
        ),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the model and the adapter, serve, push, and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama-200m")
    parser.add_argument("--rank", type=int, default=128)
    parser.add_argument("--versions", type=int, default=10, help="by each way")
    parser.add_argument("--device", choices=[each.value for each in Device], default="cpu")
    parser.add_argument("--attention", choices=AttentionKind, default=AttentionKind.AUTO)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--push-folder", default=PushConfig().folder)
    parser.add_argument("--url", help="of a server; without it one is started here")
    parser.add_argument("--sleep", action="store_true", help="measure sleep and wake of --url")
    parsed = parser.parse_args(arguments)
    write_model(parsed.folder, parsed.shape)
    adapter = parsed.folder / "pushed" / "adapter"
    write_adapter(adapter, parsed.shape, parsed.rank, seed=1)
    weights = (adapter / "adapter_model.safetensors").read_bytes()
    config = json.loads((adapter / "adapter_config.json").read_text())
    push = partial(measure, config=config, weights=weights, versions=parsed.versions)
    figures = push(parsed.url) if parsed.url else _measure_served(parsed, push)
    if parsed.sleep:
        figures |= measure_sleep(parsed.url)
    print(json.dumps({"bytes": len(weights), "device": parsed.device, **figures}))


def _measure_served(
    parsed: argparse.Namespace, push: Callable[[str], dict[str, Any]]
) -> dict[str, Any]:
    # A trainer has a process of its own: in the server's it would take turns with its threads.
    spawn = multiprocessing.get_context("spawn")
    with (
        served(engine_config(parsed.folder, parsed)) as url,
        ProcessPoolExecutor(1, mp_context=spawn) as trainer,
    ):
        return trainer.submit(push, url).result()


if __name__ == "__main__":
    main()
