"""Compile the kernels of a server's start, without its other ranks and without its weights."""

import torch

from configs.engine import EngineConfig
from configs.model import LoadFormat
from modeling.runner.select import load_runner
from sharding.group import LoneRank


def compile_kernels(config: EngineConfig, device: torch.device) -> None:
    """Start ranks of a server on this GPU as far as they compile, one after the other.

    Kernels depend on the sizes of a rank's share, of which the first and the last rank have all
    that occur. The model's folder needs no weights.
    """
    model = config.model.model_copy(update={"load_format": LoadFormat.DUMMY})
    config = config.model_copy(update={"model": model})
    for rank in sorted({0, config.tensor_parallel - 1}):
        group = LoneRank(rank, config.tensor_parallel)
        load_runner(config, group, device, spread=False).allocate()
        torch.cuda.empty_cache()
