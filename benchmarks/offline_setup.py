"""The engine that the command line of a benchmark without a server asks for."""

import argparse
from pathlib import Path

from benchmarks.workload import SHAPES
from configs.adapters import AdaptersConfig
from configs.engine import AttentionKind, CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, LoadFormat, ModelConfig

RANK = 16


def model_parser(doc: str | None) -> argparse.ArgumentParser:
    """A parser of what such benchmarks share; doc: the module's, whose first line it shows."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0] if doc else None)
    parser.add_argument("--shape", choices=sorted(SHAPES), default="llama3-8b")
    parser.add_argument("--device", choices=[d.value for d in Device], default="auto")
    parser.add_argument("--dtype", choices=[d.value for d in DType], default="bfloat16")
    parser.add_argument("--attention", choices=[a.value for a in AttentionKind], default="auto")
    return parser


def engine_config(options: argparse.Namespace, model: Path) -> EngineConfig:
    """The engine that the command line asks for."""
    count = max(options.adapters)
    pages = -(-RANK // 8) * max(count, 1)
    return EngineConfig(
        model=ModelConfig(id=str(model), load_format=LoadFormat.DUMMY, dtype=DType(options.dtype)),
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
