"""Which runner serves a model: paged where it has a paged implementation, padded elsewhere."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from configs.architectures.select import load_architecture, padded_reason
from configs.engine import EngineConfig
from configs.wire.adapters import AdapterKey, AdapterShape, FetchedAdapter
from modeling.adapters.device_copies import CopyEvent
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.paged import ModelRunner
from modeling.runner.report import RunnerReport
from sharding.group import TensorParallel
from sources.model import fetch_model

logger = logging.getLogger("loray.modeling")


class Runner(Protocol):
    """One rank's door, as `modeling.runner.paged.ModelRunner` describes it."""

    def measure(self) -> int:
        """Load the weights and return how many cache blocks fit."""
        ...

    def allocate(self, num_blocks: int) -> RunnerReport:
        """Take the buffers for so many blocks."""
        ...

    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step."""
        ...

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read an adapter into host memory; AdapterError or AdapterDeferred if it is not kept."""
        ...

    def place(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> CopyEvent:
        """Start to move a staged adapter to device pages, beside the steps."""
        ...

    def drop(self, key: AdapterKey) -> None:
        """Forget a host copy."""
        ...

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        """Make a constraint's matcher, beside the steps; "" or what is wrong with it."""
        ...

    def check(self) -> None:
        """Assert what must hold between steps."""
        ...


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
