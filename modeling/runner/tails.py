"""Captured tails of mixed steps: what follows the last attention, for the tokens that are read.

Behind the last attention no token looks at another, so a tail computes the step's samples alone; it
computes all tokens where rows report on their prompts.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.product import AdapterData
from modeling.runner.cuda_graphs import StepAdapters, size_for
from modeling.runner.graph_recorder import Recorder, Replay
from modeling.runner.input_batch import StepInputs

FEW = (16, 32)
"""Tokens of the smallest tails; the others are of the sizes of mixed steps."""


@dataclass(frozen=True)
class TailParts:
    """What tails are made of.

    tail: see `SplitModel`. left: what steps leave for it, [most tokens, ...] each. adapters: None
    where steps with adapters are not captured. kinds: what adapters change in captured steps.
    """

    tail: Callable[[Tensor, Tensor, AdapterData | None], Tensor]
    left: Sequence[Tensor]
    adapters: AdapterStepPlan | None
    kinds: Sequence[StepAdapters]


class Tails:
    """All captured tails of one runner, by the tokens that are read and what adapters change."""

    def __init__(self, parts: TailParts, sizes: Sequence[int], recorder: Recorder) -> None:
        """Record them, the largest first, so that the others fit into its memory."""
        self._parts = parts
        few = tuple(size for size in FEW if size < sizes[-1])
        self.sizes = tuple(sorted({*few, *sizes}))
        self._read = torch.zeros(self.sizes[-1], dtype=torch.int64, device=parts.left[0].device)
        self._hidden = torch.empty(0)
        self._replays: dict[tuple[int, StepAdapters], Replay] = {}
        for size in reversed(self.sizes):
            for kind in parts.kinds:
                self._replays[size, kind] = self._record(size, kind, recorder)

    def run(self, inputs: StepInputs, kind: StepAdapters) -> Tensor:
        """Hidden states [tokens that are read, ...] of a step that has left what it leaves."""
        layout = inputs.layout.as_read
        count = sum(layout.adapter_lengths)
        size = size_for(self.sizes, count)
        assert size is not None, (count, self.sizes)
        if count:
            self._read[:count].copy_(inputs.tokens_read)
            self._read[count:size].zero_()
            adapters = self._parts.adapters if kind else None
            describe(adapters, layout.adapter_slots, layout.adapter_lengths, size)
            self._replays[size, kind]()
        return self._hidden[:count]

    def _record(self, size: int, kind: StepAdapters, recorder: Recorder) -> Replay:
        """Run a tail once to load its kernels, then once more to record it."""
        adapters, plan = None, self._parts.adapters
        if kind and plan is not None:
            describe(plan, [], [], size)
            adapters = plan.batch(size, None, kind is StepAdapters.EXPERTS)
        with recorder.recording():
            hidden = self._compute(size, adapters)
            if not self._replays:
                self._hidden = torch.zeros_like(hidden)
            recorder.begin()
            self._hidden[:size].copy_(self._compute(size, adapters))
            return recorder.end()

    def _compute(self, size: int, adapters: AdapterData | None) -> Tensor:
        read = self._read[:size]
        attended, stream = (each[read] for each in self._parts.left)
        return self._parts.tail(attended, stream, adapters)


def describe(
    adapters: AdapterStepPlan | None, slots: Sequence[int], lengths: Sequence[int], size: int
) -> None:
    """Describe a step's adapters, if any; the padding tokens are one row of the base model."""
    padding = size - sum(lengths)
    if padding:
        slots, lengths = [*slots, -1], [*lengths, padding]
    if adapters is not None:
        adapters.update(slots, lengths)
