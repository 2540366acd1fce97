"""Which runner serves a model: paged where it has a paged implementation, padded elsewhere."""

import logging

import torch

from configs.architectures.base import ArchitectureError
from configs.architectures.encoders import EncoderArchitecture
from configs.architectures.select import load_architecture, padded_reason
from configs.engine import EngineConfig
from modeling.runner.load_paged import load_paged
from modeling.runner.shared import LoadedRunner
from sharding.group import TensorParallel
from sources.model import fetch_model

logger = logging.getLogger("loray.modeling")


def load_runner(
    config: EngineConfig, group: TensorParallel, device: torch.device, spread: bool
) -> LoadedRunner:
    """Load the model that `config` names for the runner that serves it.

    spread: whether a model that is not paged may lie on all GPUs that this process sees.
    """
    architecture = load_architecture(fetch_model(config.model))
    why = padded_reason(architecture)
    if why is None:
        return load_paged(config, group, device)
    architecture.with_expert_parallel(config.expert_parallel)
    logger.info("%s runs in transformers' padded code: %s", architecture.architecture, why)
    # Here, not above: paged models start without transformers.
    if isinstance(architecture, EncoderArchitecture):
        from modeling.runner.load_encoder import load_encoder

        return load_encoder(config, group, device)
    from modeling.runner.load_padded import load_padded

    try:
        return load_padded(config, group, device, spread)
    except ArchitectureError as error:
        # The setting that keeps it from being paged may be the one to change.
        raise ArchitectureError(f"{error}; it would run padded because {why}") from error
