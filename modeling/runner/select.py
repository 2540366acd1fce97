"""Which runner serves a model: paged where it has a paged implementation, padded elsewhere."""

import logging
from dataclasses import dataclass

import torch

from configs.architectures.select import load_architecture, padded_reason
from configs.engine import EngineConfig
from modeling.runner.base import Runner
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel
from sources.model import fetch_model

logger = logging.getLogger("loray.modeling")


@dataclass(frozen=True)
class RunnerChoice:
    """A runner, and whether sequences may be cut into chunks and share cached blocks on it."""

    runner: Runner
    paged: bool


def choose_runner(
    config: EngineConfig, group: TensorParallel, device: torch.device, spread: bool
) -> RunnerChoice:
    """Return the runner for the model that `config` names; nothing is loaded yet.

    spread: whether a model that is not paged may lie on all GPUs that this process sees.
    """
    architecture = load_architecture(fetch_model(config.model))
    why = padded_reason(architecture, config.model.quantize)
    if why is None:
        return RunnerChoice(ModelRunner(config, group, device), paged=True)
    logger.info("%s runs in transformers' padded code: %s", architecture.architecture, why)
    # Here, not above: paged models start without transformers.
    from modeling.runner.padded import PaddedRunner

    return RunnerChoice(PaddedRunner(config, group, device, spread), paged=False)
