"""Captured mixed steps: what is between two attentions is a CUDA graph, attention is launched.

Rows of a mixed step are of any lengths, so its attention is planned and launched as in a step
that is not captured. All the rest sees tokens alone: it is recorded once for each of some twenty
numbers of tokens, and a step takes the next larger number. Where the model splits, a step ends at
its trunk, and its tail computes the rest for the tokens that are read.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from modeling.adapters.product import AdapterData
from modeling.runner.cuda_graphs import StepAdapters
from modeling.runner.forward import PagedForward, StepPlans, TailStep
from modeling.runner.graph_recorder import Recorder
from modeling.runner.input_batch import StepInputs, StepTensors
from modeling.runner.pieces import CapturedParts, CapturedPieces, SplitPoint

TOKENS = (
    64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
    2560, 3072, 3584, 4096,
)  # fmt: skip
"""Tokens of captured mixed steps: at most 128 or a quarter of a step is padding. Not 448: on an
H200 the products of 448 tokens take longer than those of 512."""

FEW = (16, 32)
"""Tokens of the smallest tails; the others are of the sizes of mixed steps."""


def piecewise_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to record, ascending; the last holds every step, up to 4096."""
    most = min(max_step_tokens, TOKENS[-1])
    return (*(size for size in TOKENS if size < most), most)


class PiecewiseGraphs:
    """All captured mixed steps of one runner, by tokens and what adapters change."""

    def __init__(
        self,
        forward: PagedForward,
        parts: CapturedParts,
        sizes: Sequence[int],
        recorder: Recorder,
    ) -> None:
        """forward: computes tails, if the model splits. parts: of the steps until then.

        sizes: of tokens. `record_next` records one after the other.
        """
        largest = max(sizes)
        points = [SplitPoint.of(backend.spec, largest) for backend in parts.backends]
        device = points[0].spec.device
        self.has_experts = parts.has_experts
        self._tails: CapturedPieces | None = None
        if forward.split is not None:
            self._forward = forward
            self._read = torch.zeros(largest, dtype=torch.int64, device=device)
            few = (size for size in FEW if size < largest)
            tails = replace(parts, compute=self._tail)
            self._tails = CapturedPieces(tails, (*few, *sizes), points, recorder)
        self._steps = CapturedPieces(parts, sizes, points, recorder)
        self.unrecorded = self._steps.unrecorded

    def record_next(self) -> None:
        """Record the largest size that is left, and behind the first one all tails."""
        self._steps.record_next()
        while self._tails is not None and self._tails.unrecorded:
            self._tails.record_next()

    def run(
        self,
        inputs: StepInputs,
        attention: StepPlans,
        tail: Callable[[], TailStep | None],
        with_experts: bool = False,
    ) -> Tensor | None:
        """Hidden states of a step's tokens that are read, until the next step.

        None when no size holds it. tail: returns None where nothing is read; not called unless the
        model splits.
        with_experts: whether adapters change any. It must be false where `has_experts` is.
        """
        kind = StepAdapters.of(inputs.layout.adapter_slots, with_experts)
        if not self._steps.has(len(inputs.input_ids), kind):
            return None
        left = self._steps.run(inputs, attention, kind)
        if self._tails is None:
            return left[0][inputs.tokens_read]
        if (step := tail()) is None:
            return left[0][:0]
        count = len(step.read)
        self._read[:count].copy_(step.read)
        # Padding tokens compute a token of the step again.
        self._read[count:].zero_()
        hidden = self._tails.run(step.inputs, step.attention, kind)[0]
        return hidden[step.inputs.tokens_read]

    def _tail(
        self, tensors: StepTensors, attention: StepPlans, adapters: AdapterData | None
    ) -> tuple[Tensor, ...]:
        read = self._read[: len(tensors.input_ids)]
        left = [each[read] for each in self._steps.left]
        return (self._forward.tail(left, tensors, attention, adapters),)
