"""How the sweep serves a tiny model: in the runner that `load_runner` chooses."""

from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from configs.architectures.select import load_architecture, padded_reason
from configs.engine import AttentionKind, CudaGraphs, Device
from configs.model import DType, ModelConfig
from configs.wire.sampling import Sampling
from modeling.adapters.projection import Projection
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from sharding.group import SingleRank
from tests.modeling.models.sweep_truth import NUM_TOKENS, VOCAB_SIZE, Prompt, prompts
from tests.modeling.padded import generate_padded, padded_runner
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    Setting,
    answers_by_hand,
    answers_scheduled,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.stepping import Answer, Asked, generate
from tests.ranks import run_in_memory

PREEMPTED = {1: 4, 4: 7}
"""Requests, and after how many tokens of its answer each is computed anew."""

CHUNK = 5
"""Tokens of a prompt in a step, more for each next one."""

AGAIN = 80
"""The turn at which long prompts come once more, when their blocks are in the prefix cache."""

Served = tuple[str, list[Prompt], list[Answer]]
"""How it was served, what was asked, and the answers."""


ROUNDED = "bfloat16"
"""How ways begin that round more than float32 does."""

ON_CPU = f"{ROUNDED} on a CPU"
"""What rounding alone does."""


class PaddedServer:
    """transformers' own code over padded batches, on one rank."""

    exact = False
    """Whether it is compared with float64: transformers' float32 rounds alike."""

    def __init__(self, model: Path, *, gpu: bool) -> None:
        """ArchitectureError and others say why it is refused."""
        self._model = model
        self._device = pick_device(Device.CUDA if gpu else Device.CPU)
        runner = padded_runner(model, device=self._device)
        self.projections: tuple[Projection, ...] = runner._bank.projections
        self._prompts = prompts(runner._size.max_total_tokens - NUM_TOKENS)

    def serve(self, folders: Sequence[Path]) -> Iterator[Served]:
        """All in one batch; every other one joins while the others decode."""
        runner = padded_runner(self._model, folders, device=self._device)
        yield "padded", self._prompts, generate_padded(runner, _asked(self._prompts, folders))


class PagedServer:
    """The paged runner on one rank and on two, by hand and then under the real scheduler."""

    exact = True

    def __init__(self, model: Path) -> None:
        """ArchitectureError and others say why it is refused."""
        self._config = engine_config(model)
        loaded = load_paged(self._config, SingleRank(), torch.device("cpu"))
        self.projections: tuple[Projection, ...] = loaded.parts.bank.projections

    def serve(self, folders: Sequence[Path]) -> Iterator[Served]:
        """Prompts in chunks beside rows that decode, preempted rows; then prefix hits, cut."""
        every = prompts()
        asked = _asked(every, folders, CHUNK)
        by_hand = partial(answers_by_hand, self._config, list(folders), asked)
        for ranks in (1, 2):
            way = f"{ranks} rank{'s' * (ranks > 1)}"
            yield from ((way, every, found) for found in run_in_memory(ranks, by_hand))
        long = [prompt for prompt in every if len(prompt[1]) > BLOCK_SIZE]
        asked = [*_asked(every, folders), *_asked(long, folders, joins_at=AGAIN)]
        for ranks in (1, 2):
            setting = Setting("", "", ranks, [], chunk=CHUNK)
            scheduled = partial(answers_scheduled, setting, self._config, list(folders), asked)
            way = f"{ranks} scheduled"
            yield from ((way, every + long, each) for each in run_in_memory(ranks, scheduled))


class GpuServer(PagedServer):
    """The paged runner with a GPU's kernels and fusions, launched and captured, in two types."""

    def serve(self, folders: Sequence[Path]) -> Iterator[Served]:
        """Prompts in chunks beside rows that decode, preempted rows."""
        every = prompts()
        asked = _asked(every, folders, CHUNK)
        for dtype in (DType.FLOAT32, DType.BFLOAT16):
            changes: dict[str, Any] = {"model": ModelConfig(id=self._config.model.id, dtype=dtype)}
            if dtype is DType.BFLOAT16:
                config = self._config.model_copy(update=changes)
                yield ON_CPU, every, answers_by_hand(config, list(folders), asked, SingleRank())
            changes |= {"device": Device.CUDA, "attention": AttentionKind.TRITON}
            for graphs in (CudaGraphs.NONE, CudaGraphs.ALL):
                config = self._config.model_copy(update={**changes, "cuda_graphs": graphs})
                runner = load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()
                poison(runner)
                place_all(runner, folders)
                found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
                runner.check()
                yield f"{dtype} {'captured' if runner.num_captured else 'launched'}", every, found


def server(model: Path, *, padded: bool, gpu: bool = False) -> PagedServer | PaddedServer:
    """Start what serves the model; padded: as if it were quantised, which no paged model can be."""
    if padded or padded_reason(load_architecture(model)) is not None:
        return PaddedServer(model, gpu=gpu)
    return GpuServer(model) if gpu else PagedServer(model)


def _asked(
    prompts: Sequence[Prompt], folders: Sequence[Path], chunk: int | None = None, joins_at: int = 0
) -> list[Asked]:
    slots = {folder.name: slot for slot, folder in enumerate(folders)}
    return [
        Asked(
            prompt, NUM_TOKENS, slot=slots.get(name, -1), joins_at=joins_at + 2 * (index % 2),
            rejoins_at=PREEMPTED.get(index), sampling=Sampling(logprobs=VOCAB_SIZE),
            **({} if chunk is None else {"chunk": chunk + index}),
        )
        for index, (name, prompt) in enumerate(prompts)
    ]  # fmt: skip
