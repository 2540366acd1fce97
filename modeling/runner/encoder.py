"""EncoderRunner: runs plans over an encoder. A request is one row of one forward.

It keeps nothing from step to step but the requests; cache blocks are a token budget only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Pooling
from modeling.batch import ForwardBatch, StepOutput
from modeling.runner.encoder_loading import LoadedEncoderWeights
from modeling.runner.outputs import step_output
from modeling.runner.padded import PaddedAdapters
from modeling.runner.padded_batches import groups_of_like_length
from modeling.runner.report import RunnerReport
from modeling.runner.shared import BaseRunner, RunnerParts, on_device
from modeling.sampling.prompt_scores import PromptScoresOnDevice, pooled, whole_row
from modeling.sampling.sampler import no_rows


@dataclass(frozen=True)
class EncoderParts(RunnerParts):
    """What an encoder's runner is made of once its weights are loaded."""

    weights: LoadedEncoderWeights
    adapters: PaddedAdapters


class EncoderRunner(BaseRunner):
    """One whole encoder, and the requests of its batch slots."""

    def __init__(self, parts: EncoderParts, report: RunnerReport) -> None:
        super().__init__(parts, report)
        self._encoder = parts.weights.model
        self._adapters = parts.adapters
        self._requests: dict[int, RequestJoin] = {}

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; the next may be launched before `wait` is called on its output."""
        for join in batch.joins:
            assert 1 <= join.prompt_length <= self._size.max_total_tokens, join.batch_slot
            self._requests[join.batch_slot] = join
        assert not any(row.samples for row in batch.rows), "an encoder generates nothing"
        requests = [self._requests[row.batch_slot] for row in batch.rows]
        due = [
            (index, request)
            for index, (row, request) in enumerate(zip(batch.rows, requests, strict=True))
            if request.sampling.about_prompt and row.start + row.length >= request.prompt_length
        ]
        with on_device(self._device):
            with self._bank.in_use([request.adapter_slot for request in requests]):
                scores = self._read(due) if due else None
            return step_output(no_rows(self._device), [], scores)

    def _read(self, due: Sequence[tuple[int, RequestJoin]]) -> PromptScoresOnDevice:
        """Read the prompts of requests, which come with their rows' indices in the batch."""
        by_slot: dict[int, Tensor] = {}
        for scored in (True, False):
            alike = [join for _, join in due if (join.sampling.pooling is Pooling.SCORE) is scored]
            for group in groups_of_like_length(alike):
                vectors = self._scores(group) if scored else self._embeddings(group)
                by_slot |= zip((join.batch_slot for join in group), vectors, strict=True)
        rows = [whole_row(index, join) for index, join in due]
        return PromptScoresOnDevice(rows, None, {row.row: by_slot[row.batch_slot] for row in rows})

    def _scores(self, group: Sequence[RequestJoin]) -> list[Tensor]:
        slots = [join.adapter_slot for join in group]
        return list(self._encoder.logits(group, self._adapters.of_slots(slots)))

    def _embeddings(self, group: Sequence[RequestJoin]) -> list[Tensor]:
        slots = [join.adapter_slot for join in group]
        states = self._encoder.states(group, self._adapters.of_slots(slots))
        return [
            pooled(own[: join.prompt_length], join.sampling.pooling)
            for own, join in zip(states, group, strict=True)
        ]
