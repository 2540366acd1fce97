"""PaddedRunner: runs plans over a padded CausalLM, for models without paged attention.

Every row that samples is in a padded batch, which lives from step to step (`PaddedBatches`).
Nothing is kept of a row that left but its tokens; if a plan names it again, it is
prefilled again. So any plan is computed rightly. Which plans are computed fast, the scheduler
knows as data (no chunks, no prefix cache). Cache blocks are a token budget only.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from configs.wire.plan import RequestJoin, StepRow
from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.select import KernelChoice
from modeling.adapters.score import ScoreHeads
from modeling.batch import ForwardBatch, StepOutput
from modeling.models.causal_lm import CausalLMBatch
from modeling.models.padded.adapters import RowAdapters
from modeling.models.padded.prompts import CausalLMPrompts
from modeling.runner.outputs import step_output
from modeling.runner.padded_batches import PaddedBatches
from modeling.runner.padded_loading import LoadedCausalLM
from modeling.runner.report import RunnerReport
from modeling.runner.shared import BaseRunner, RunnerParts, on_device
from modeling.sampling.history import TokenHistory
from modeling.sampling.prompt_scores import PromptScoresOnDevice
from modeling.sampling.sampler import no_rows, sample_tokens
from modeling.sampling.tensors import sampling_tensors
from modeling.transfer import to_device


@dataclass(frozen=True)
class PaddedAdapters:
    """Finds the adapters of padded rows by their adapter slots; None where all are the base's."""

    kernel: KernelChoice
    bank: AdapterBank

    def of_batch(self, batch: CausalLMBatch) -> RowAdapters | None:
        """Return the adapters of a batch's rows."""
        return self.of_slots([request.adapter_slot for request in batch.requests])

    def of_slot(self, slot: int) -> RowAdapters | None:
        """Return the adapter of one sequence by itself."""
        return self.of_slots([slot])

    def of_slots(self, slots: Sequence[int]) -> RowAdapters | None:
        """Return the adapters of rows with these adapter slots."""
        if max(slots) < 0:
            return None
        return lambda length: self.kernel.batch(self.bank, slots, [length] * len(slots))


@dataclass(frozen=True)
class PaddedParts(RunnerParts):
    """What a padded runner is made of once its weights are loaded.

    prompts: reads prompts for their logprobs and embeddings.
    adapters: of the rows of a batch.
    """

    weights: LoadedCausalLM
    prompts: CausalLMPrompts
    adapters: PaddedAdapters


class PaddedRunner(BaseRunner):
    """One whole model, its padded batches, adapters, and the batch slots' tokens."""

    def __init__(self, parts: PaddedParts, tokens: Tensor, report: RunnerReport) -> None:
        """tokens: int64 [batch slots, longest sequence + 1], on the device."""
        super().__init__(parts, report)
        self._model = parts.weights.model
        self._prompts = parts.prompts
        self._adapters = parts.adapters
        self._tokens = tokens
        self._requests: dict[int, RequestJoin] = {}
        self._heads = ScoreHeads(parts.bank, None).logits
        self._running = PaddedBatches(self._model, parts.adapters.of_batch)

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; the next may be launched before `wait` is called on its output."""
        with on_device(self._device):
            self._join(batch.joins)
            slots = [row.batch_slot for row in batch.rows]
            with self._bank.in_use([self._requests[slot].adapter_slot for slot in slots]):
                scores = self._score_prompts(batch.rows)
                # A chunk that samples nothing waits for the prefill of its last one.
                rows = [row for row in batch.rows if row.samples]
                if not rows:
                    return step_output(no_rows(self._device), [], scores)
                return self._step(rows, scores, slots)

    def check(self) -> None:
        """Assert what must hold between steps."""
        super().check()
        self._running.check()
        assert self._running.batch_slots <= self._requests.keys()

    def _join(self, joins: Sequence[RequestJoin]) -> None:
        """Give each request its batch slot; the request that had it before has left."""
        for join in joins:
            count = len(join.tokens)
            assert 0 <= join.batch_slot < self._size.max_running, join.batch_slot
            assert 1 <= count <= self._size.max_total_tokens, (join.batch_slot, count)
            tokens = to_device(np.array(join.tokens, dtype=np.int64), self._device)
            self._tokens[join.batch_slot, :count].copy_(tokens, non_blocking=True)
            self._requests[join.batch_slot] = join
            answer = join.tokens[join.prompt_length :]
            self._grammars.join(join.batch_slot, join.matcher, answer, join.sampling)
        self._running.keep(self._running.batch_slots - {join.batch_slot for join in joins})

    def _score_prompts(self, rows: Sequence[StepRow]) -> PromptScoresOnDevice | None:
        """Read the prompts that the rows complete, where their requests want a report on them."""
        requests = [
            (index, request)
            for index, row in enumerate(rows)
            for request in [self._requests[row.batch_slot]]
            if request.sampling.about_prompt and row.start < request.prompt_length <= _end(row)
        ]
        return (
            self._prompts.score(requests, self._adapters.of_slot, self._heads) if requests else None
        )

    def _step(
        self, rows: Sequence[StepRow], scores: PromptScoresOnDevice | None, slots: Sequence[int]
    ) -> StepOutput:
        """Compute the sampling rows. slots: of all rows; faults of their matchers are reported."""
        ends = [_end(row) for row in rows]
        continuing = self._running.continuing(
            [(row.batch_slot, end) for row, end in zip(rows, ends, strict=True) if row.length == 1]
        )
        fresh = [self._request(row) for row in rows if row.batch_slot not in continuing]
        computed, logits = self._running.compute(continuing, fresh)
        # Logits go from the batches' order to the plan's, and the sampled tokens back again.
        index_of = {slot: index for index, slot in enumerate(computed)}
        order = _indices([index_of[row.batch_slot] for row in rows], self._device)
        sampling = [self._requests[row.batch_slot].sampling for row in rows]
        history = self._history(rows, ends)
        sampled = sample_tokens(
            logits[order], sampling_tensors(sampling, ends, self._device, history)
        )
        sampling_slots = [row.batch_slot for row in rows]
        at = _indices(sampling_slots, self._device), _indices(ends, self._device)
        self._tokens[at] = sampled.tokens
        self._grammars.advance(sampling_slots, sampled.tokens)
        tokens = torch.empty_like(sampled.tokens)
        tokens[order] = sampled.tokens
        self._running.advance(tokens)
        return step_output(sampled, sampling, scores, faults=self._grammars.take_faults(slots))

    def _history(self, rows: Sequence[StepRow], ends: Sequence[int]) -> TokenHistory | None:
        """Where the rows' own tokens are; None where no row looks at them."""
        requests = [self._requests[row.batch_slot] for row in rows]
        if not any(request.sampling.adjusted for request in requests):
            return None
        slots = np.array([row.batch_slot for row in rows], dtype=np.int64)
        prompts = np.array([request.prompt_length for request in requests], dtype=np.int64)
        targets = slots * self._tokens.shape[1] + np.array(ends)
        return TokenHistory(self._tokens.view(-1), targets, prompts, slots, self._grammars)

    def _request(self, row: StepRow) -> RequestJoin:
        """Return a row's request with all tokens up to the row's last."""
        request, end = self._requests[row.batch_slot], _end(row)
        tokens = request.tokens[:end]
        if len(tokens) < end:
            # It paused, and only the device knows what it has sampled: this waits for the device.
            tokens = self._tokens[row.batch_slot, :end].tolist()
        return structs.replace(request, tokens=tokens)


def _end(row: StepRow) -> int:
    return row.start + row.length


def _indices(values: Sequence[int], device: torch.device) -> Tensor:
    return to_device(np.array(values, dtype=np.int64), device)
