"""How fast weights are loaded to the device, compared with a plain read of their files.

    python -m benchmarks.loading /tmp/m8b-weights --layers 8

Writes a checkpoint of random weights in safetensors, unless it is there, then reads its files
plainly, and loads them as a rank does. Both are done twice and the faster counts, so the files
are in the page cache. One JSON line: GB (10^9 bytes), seconds, GB/s, and how fast the load is
beside the plain reading.
"""

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from benchmarks.workload import SHAPES, config_of, is_model, projection_sizes, write_model
from configs.engine import Device, EngineConfig
from configs.model import ModelConfig
from modeling.runner.loading import load_model, pick_device, torch_dtype
from sharding.group import SingleRank

INDEX = "model.safetensors.index.json"
SHARD_LAYERS = 8
NOISE = 2**20
READ_BYTES = 2**26
ROUNDS = 2
GIGA = 1e9


def write_weights(folder: Path, shape: str, layers: int | None, dtype: str) -> None:
    """Write a model with weights, unless the folder holds this one; its index comes last."""
    if has_weights(folder, shape, layers, dtype):
        return
    write_model(folder, shape, layers=layers)
    names: dict[str, str] = {}
    for number, tensors in enumerate(shards(shape, layers, torch_dtype(dtype))):
        file = f"model-{number:05}.safetensors"
        save_file(tensors, folder / file)
        names.update(dict.fromkeys(tensors, file))
    made = {"shape": shape, "layers": layers, "dtype": dtype}
    (folder / INDEX).write_text(json.dumps({"metadata": made, "weight_map": names}))


def has_weights(folder: Path, shape: str, layers: int | None, dtype: str) -> bool:
    """Whether such a checkpoint was written here, to its end."""
    index = folder / INDEX
    made = {"shape": shape, "layers": layers, "dtype": dtype}
    if not index.is_file() or not is_model(folder, shape, layers):
        return False
    return bool(json.loads(index.read_text())["metadata"] == made)


def shards(shape: str, layers: int | None, dtype: torch.dtype) -> Iterator[dict[str, Tensor]]:
    """The checkpoint's tensors, a few layers at a time; the ends are shards of their own."""
    config = config_of(shape, layers)
    hidden = config["hidden_size"]
    noise = (torch.randn(NOISE, generator=torch.Generator().manual_seed(0)) * 0.02).to(dtype)

    def matrix(rows: int, columns: int) -> Tensor:
        times = -(-rows * columns // NOISE)
        return noise.repeat(times)[: rows * columns].view(rows, columns)

    ends = matrix(config["vocab_size"], hidden)
    yield {"model.embed_tokens.weight": ends, "model.norm.weight": torch.ones(hidden, dtype=dtype)}
    yield {"lm_head.weight": ends}
    for first in range(0, config["num_hidden_layers"], SHARD_LAYERS):
        tensors = {}
        for layer in range(first, min(first + SHARD_LAYERS, config["num_hidden_layers"])):
            prefix = f"model.layers.{layer}"
            for norm in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{prefix}.{norm}.weight"] = torch.ones(hidden, dtype=dtype)
            for name, (inputs, outputs) in projection_sizes(shape).items():
                tensors[f"{prefix}.{name}.weight"] = matrix(outputs, inputs)
        yield tensors


def read_plainly(folder: Path, buffer: memoryview) -> int:
    """Read all weights' bytes through `buffer` with one thread; returns how many."""
    total = 0
    for path in sorted(folder.glob("*.safetensors")):
        with path.open("rb", buffering=0) as file:
            while count := file.readinto(buffer):
                total += count
    return total


def fastest(work: Callable[[], object]) -> float:
    """Seconds of the faster of two rounds."""
    times = []
    for _ in range(ROUNDS):
        began = time.perf_counter()
        work()
        times.append(time.perf_counter() - began)
    return min(times)


def measure(folder: Path, device: Device) -> dict[str, Any]:
    """Read and load a checkpoint; returns the row."""
    target = pick_device(device)
    torch.zeros(1, device=target)  # the device's own start is no part of a load
    config = EngineConfig(model=ModelConfig(id=str(folder)), device=device)

    def load() -> None:
        load_model(config, SingleRank(), target)
        if target.type == "cuda":
            torch.cuda.synchronize(target)

    buffer = memoryview(bytearray(READ_BYTES))
    size = read_plainly(folder, buffer)
    reading, loading = fastest(lambda: read_plainly(folder, buffer)), fastest(load)
    return {
        "checkpoint_gb": round(size / GIGA, 3),
        "read_gb_per_s": round(size / GIGA / reading, 2),
        "load_s": round(loading, 3),
        "load_gb_per_s": round(size / GIGA / loading, 2),
        "load_of_reading": round(reading / loading, 3),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Write, read, load, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--shape", choices=SHAPES, default="llama3-8b")
    parser.add_argument("--layers", type=int, help="fewer than the shape's own")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--device", default="auto", choices=[device.value for device in Device])
    parser.add_argument("--write-only", action="store_true", help="measure nothing")
    parsed = parser.parse_args(arguments)
    write_weights(parsed.folder, parsed.shape, parsed.layers, parsed.dtype)
    if not parsed.write_only:
        print(json.dumps(measure(parsed.folder, Device(parsed.device))))


if __name__ == "__main__":
    main()
