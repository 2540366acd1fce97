"""Whole quantised models on GPUs beside float32 and the reference, which a CPU computes."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from configs.engine import EngineConfig
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.modeling.parity.comparison import place_all
from tests.modeling.quantisation.test_models_cuda import bounded
from tests.modeling.teacher import errors, forced_logprobs

PAGE = 16

OTHER_CHOICES = 0.2
"""Of a routed model's rows, those in which rounding may have chosen other experts for a token."""


@dataclass(frozen=True)
class Task:
    """A model, adapters, and the logprobs [n, vocab] of the base and of each.

    truths, references: in float32, and in bfloat16 on a CPU. routed: whether not every expert
    computes every token.
    """

    name: str
    config: EngineConfig
    adapters: Sequence[Path]
    truths: Sequence[Tensor]
    references: Sequence[Tensor]
    routed: bool = False

    @classmethod
    def of(
        cls,
        name: str,
        vocab_size: int,
        configs: Sequence[EngineConfig],
        adapters: Sequence[Path],
        routed: bool = False,
    ) -> "Task":
        """configs: of the truth, the reference and what is compared with them."""
        truth, reference, ours = configs
        found = []
        for config in (truth, reference):
            runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
            place_all(runner, adapters)
            slots = range(-1, len(adapters))
            found.append([said(runner, vocab_size, slot, decode=False) for slot in slots])
        return cls(name, ours, adapters, found[0], found[1], routed)

    def line(self, slot: int, found: Tensor) -> tuple[str, bool]:
        """Return figures of one adapter's logprobs, and whether they are near enough."""
        truth, reference = self.truths[slot + 1], self.references[slot + 1]
        own, theirs = (
            errors(each[rows], truth[rows])
            for each, rows in ((each, self._rows(each, truth)) for each in (found, reference))
        )
        text = f"{self.name:24}{'base' if slot < 0 else f'adapter {slot}':12}{own}"
        return f"{text}  (reference: {theirs})", bounded(own, theirs)

    def _rows(self, found: Tensor, truth: Tensor) -> Tensor:
        far = (truth.exp() * (truth - found)).sum(-1).argsort()
        return far[: len(far) - int(len(far) * OTHER_CHOICES * self.routed)]


def said(runner: ModelRunner, vocab_size: int, slot: int, decode: bool) -> Tensor:
    """Return what a runner says after each prefix of the text."""
    return forced_logprobs(runner, vocab_size, slot, decode, PAGE).cpu()


def compare(tasks: Sequence[Task], group: TensorParallel, device: torch.device) -> None:
    """Run all tasks one after the other, as one rank; AssertionError names those that are far.

    Every prefix is asked for by a prefill and by a captured decode step.
    """
    far = []
    for each in tasks:
        runner = load_paged(each.config, group, device).allocate()
        place_all(runner, each.adapters, group)
        for slot in range(-1, len(each.adapters)):
            for decode in (False, True):
                line, near = each.line(slot, said(runner, each.truths[0].shape[1], slot, decode))
                line = f"{'decode ' if decode else 'prefill'} {line}"
                if group.rank == 0:
                    print(line, flush=True)
                far += [] if near else [line]
        assert runner.num_captured, f"{each.name}: no step was captured"
    assert not far, "\n".join(far)
