"""The engine that the command line of a benchmark without a server asks for."""

import argparse
from collections.abc import Callable
from pathlib import Path

import torch
from torch.distributed import TCPStore
from torch.multiprocessing.spawn import spawn

from benchmarks.stored import STORED, mark_stored
from benchmarks.workload import SHAPES, write_model
from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, Device, EngineConfig, LimitsConfig
from configs.env import export_rank_environment
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from sharding.connect import connect
from sharding.group import SingleRank, TensorParallel

RANK, FP8 = 16, "fp8"
ALONE = SingleRank()
TIMEOUT_S = 120.0
RANK_THREADS = 1
"""Torch's, of a rank with a GPU: with more, copies that a launch waits for take milliseconds."""

Measurement = Callable[[argparse.Namespace, TensorParallel], None]
"""What a rank measures: of the command line's options, as a member of a group."""


def model_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what such benchmarks share; doc: the module's, whose first line it shows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", choices=[d.value for d in Device], default="auto")
    parser.add_argument("--dtype", choices=[d.value for d in DType], default="bfloat16")
    parser.add_argument("--attention", choices=[a.value for a in AttentionKind], default="auto")
    return parser


def add_quantised(parser: argparse.ArgumentParser) -> None:
    """Add how the random weights are quantised."""
    parser.add_argument("--quantised", choices=(FP8, *STORED), help="default: they are not")


def write_named_model(options: argparse.Namespace, folder: Path) -> None:
    """Write the model that the command line asks for, its weights left out."""
    write_model(folder, options.shape, spells_json=True)
    if getattr(options, "quantised", None) in STORED:
        mark_stored(folder, options.quantised)


def engine_config(options: argparse.Namespace, model: Path) -> EngineConfig:
    """The engine that the command line asks for."""
    count = max(options.adapters)
    pages = -(-RANK // 8) * max(count, 1)
    is_fp8 = getattr(options, "quantised", None) == FP8
    return EngineConfig(
        model=ModelConfig(
            id=str(model),
            load_format=LoadFormat.DUMMY,
            dtype=DType(options.dtype),
            quantize=Quantize.FP8 if is_fp8 else Quantize.NONE,
        ),
        device=Device(options.device),
        attention=AttentionKind(options.attention),
        cpu_threads=2,
        cache=CacheConfig(
            block_size=options.block_size,
            num_blocks=options.num_blocks,
            device_memory_fraction=0.85,
        ),
        limits=LimitsConfig(
            max_step_tokens=options.max_step_tokens,
            max_running=max(options.batches),
            max_total_tokens=options.max_total_tokens,
        ),
        adapters=AdaptersConfig(
            enabled=count > 0,
            device_pages=pages,
            max_device_adapters=max(count, 1),
            max_rank=RANK,
        ),
    )


def start_ranks(options: argparse.Namespace, measure: Measurement) -> None:
    """Measure on one device, or as each rank of a model that `options.gpus` GPUs share."""
    if options.gpus == 1:
        if options.device != Device.CPU.value:
            torch.set_num_threads(RANK_THREADS)
        measure(options, ALONE)
        return
    export_rank_environment()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    work = (store.port, options, measure)
    spawn(_rank_main, work, nprocs=options.gpus)  # type: ignore[no-untyped-call]


def _rank_main(rank: int, port: int, options: argparse.Namespace, measure: Measurement) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    torch.set_num_threads(RANK_THREADS)
    store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    measure(options, connect(store, rank, options.gpus, device, TIMEOUT_S))
    torch.distributed.destroy_process_group()
