"""ModelRunner: one rank of a paged model. Plans' numbers in, tensors inside, sampled tokens out."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from configs.wire.plan import StepRow, settled
from modeling.adapters.kernels.reference import NO_DELTAS
from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.norms import AdaptedNorms
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import ProjectionKind
from modeling.adapters.vocabulary import (
    VocabularyAdapters,
    adapts_more,
    needs_launches,
)
from modeling.attention.base import AttentionBackend
from modeling.attention.clamping import ClampWatch
from modeling.attention.kv_layout import KvLayout
from modeling.batch import ForwardBatch, Known, StepOutput
from modeling.models.base import SplitModel
from modeling.models.context import StateRows
from modeling.models.medusa import MedusaHeads
from modeling.runner.block_tables import Ints
from modeling.runner.cache import Choices
from modeling.runner.captures import StepGraphs
from modeling.runner.cuda_graphs import HeadForward
from modeling.runner.forward import PagedForward, StepPlans, TailStep, prepare
from modeling.runner.guesses import GuessedRows, Guesser, guess
from modeling.runner.input_batch import InputBatch, StepInputs, StepLayout
from modeling.runner.layer_guesses import LayerDrafter, LayerGuesser
from modeling.runner.loading import LoadedModel
from modeling.runner.outputs import step_output
from modeling.runner.report import RunnerReport
from modeling.runner.shared import BaseRunner, RunnerParts, on_device
from modeling.runner.state_rows import state_rows
from modeling.sampling.prompt_scores import PromptReader, PromptScoresOnDevice
from modeling.sampling.sampler import SampledStep, no_rows, sample_tokens
from modeling.sampling.tensors import SamplingTensors, sampling_tensors
from modeling.transfer import StepClock, to_device

logger = logging.getLogger("loray.modeling")


@dataclass(frozen=True)
class PagedParts(RunnerParts):
    """What a paged runner is made of once its weights are loaded.

    cache: what one cache block holds.
    attention: the backends that read the cache.
    adapter_plan: the captured steps' adapters; None where the kernel cannot be captured.
    norms: the model's, with those of adapters.
    heads: Medusa's, drafter: a layer beside the model, guess tokens; None without.
    """

    weights: LoadedModel
    cache: KvLayout
    attention: Choices
    adapter_plan: AdapterStepPlan | None
    norms: AdaptedNorms
    heads: MedusaHeads | None = None
    drafter: LayerDrafter | None = None

    @property
    def has_expert_kernels(self) -> bool:
        """Whether kernels multiply adapters of experts, in captured steps and in others."""
        pools = zip(self.bank.projections, self.bank.pool_pages, strict=True)
        kinds = {projection.kind for projection, pages in pools if pages}
        has_any = self.adapter_plan is not None and ProjectionKind.EXPERTS in kinds
        return has_any and self.weights.model.has_expert_kernels

    @property
    def backends(self) -> tuple[AttentionBackend, ...]:
        """The attention of each KV group."""
        return tuple(choice.backend for choice in self.attention)

    @property
    def bytes_per_block(self) -> int:
        """Bytes of one cache block, with a drafter's entries of its tokens."""
        own = 0 if self.drafter is None else self.drafter.spec.bytes_per_page
        return self.cache.bytes_per_block + own

    @property
    def split(self) -> SplitModel | None:
        """The model, if its steps with prompts end early; a drafter reads states of all tokens."""
        return self.weights.model.split if self.drafter is None else None

    def graph_forward(self, forward: PagedForward) -> tuple[HeadForward, int]:
        """Return what captured steps compute, and the width of the states that they keep."""
        if self.drafter is not None:
            width = self.drafter.heads.states_width
            return partial(forward.logits_and_inner, self.drafter.states.take), width
        if self.heads is not None:
            return forward.logits_and_states, self.weights.model.width
        return forward.logits_alone, 0

    @property
    def draft_heads(self) -> int | None:
        """How many tokens heads guess; None without."""
        if self.drafter is not None:
            return self.drafter.most
        return None if self.heads is None else self.heads.count


@dataclass(frozen=True)
class StepBuffers:
    """What steps write to, allocated for a number of cache blocks.

    forward: the model over the cache.
    input_batch: the batch slots' tokens and block tables.
    prompts: reads prompts for their logprobs and embeddings.
    clamp_watch: looks for values that an fp8 cache could not hold.
    clock: the device's idle time between steps.
    drafts: a drafter with the entries of all blocks; None without.
    """

    forward: PagedForward
    input_batch: InputBatch
    prompts: PromptReader
    clamp_watch: ClampWatch
    clock: StepClock
    drafts: LayerGuesser | None = None


class ModelRunner(BaseRunner):
    """One rank of a paged model: weights, cache blocks, adapters, and the batch slots' tokens.

    Matrix products of float32 models are in full float32: TF32, torch's switch for less, stays
    off as torch starts with it.

    num_steps: how many steps with rows were launched.
    num_captured: how many of those were replays.
    """

    def __init__(
        self, parts: PagedParts, buffers: StepBuffers, graphs: StepGraphs, report: RunnerReport
    ) -> None:
        super().__init__(parts, report)
        self._parts = parts
        self._backends = parts.backends
        self._adapter_plan = parts.adapter_plan
        self._norms = parts.norms
        self._forward = buffers.forward
        self._input_batch = buffers.input_batch
        self._prompts = buffers.prompts
        self._clamp_watch = buffers.clamp_watch
        self._clock = buffers.clock
        self._guesser = None if parts.heads is None else Guesser(parts.heads, parts.bank)
        self._drafts = buffers.drafts
        self._graphs = graphs
        self._decode_graphs, self._piecewise_graphs = graphs.decode, graphs.mixed
        self._checked_graphs = graphs.checked
        self._last: tuple[list[StepRow], Known | None] = ([], None)
        self.num_steps = 0
        self.num_captured = 0

    @torch.inference_mode()
    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step; every rank calls it with the same batch, in the same order.

        The next step may be launched before `wait` is called on this one's output. Where its rows
        follow this one's, this thread waits for this one's tokens.
        """
        with on_device(self._device):
            batch = replace(batch, rows=self._settled(batch.rows))
            output = self._launch(batch)
            self._last = batch.rows, output.known
            return output

    def _settled(self, rows: list[StepRow]) -> list[StepRow]:
        """Wait for the step before, if rows follow its own, and find their starts and drafts."""
        following = [row for row in rows if row.follows >= 0]
        if not following:
            return rows
        self._input_batch.append_blocks(following)
        before, known = self._last
        assert known is not None, "no step before"
        return settled(rows, before, *known())

    def _launch(self, batch: ForwardBatch) -> StepOutput:
        """Launch a step of settled rows."""
        start = self._clock.begin()
        self._input_batch.join(batch.joins)
        if (states := self._parts.weights.model.states) is not None:
            for join in batch.joins:
                if join.state >= 0:
                    states.go_on(join.batch_slot, join.state)
        if not batch.rows:
            return step_output(no_rows(self._device), [])
        self.num_steps += 1
        self._input_batch.write_drafts(batch.rows)
        layout = self._input_batch.layout(batch.rows)
        # No adapter that this step reads is overwritten before the device is past the step.
        with self._bank.in_use(layout.adapter_slots):
            before = self.num_captured
            found, scores = None if layout.prompt_rows else self._replay(layout), None
            if found is None:
                sampled, scores, hidden = self._compute(layout)
            else:
                sampled, hidden = found
            if self._drafts is not None:
                kept, tokens = None if found is None else hidden, self._input_batch.tokens
                guessed = self._drafts.follow(
                    batch, layout, tokens, sampled.tokens, kept, self._graphs.heads
                )
            else:
                guessed = self._guess(batch, layout, hidden, sampled)
        captured = self.num_captured > before
        self._clamp_watch.stepped()
        faults = self._grammars.take_faults([row.batch_slot for row in batch.rows])
        return step_output(sampled, layout.sampling, scores, start, captured, faults, guessed)

    @property
    def num_unrecorded(self) -> int:
        """How many sizes of steps are not recorded yet."""
        return self._graphs.num_unrecorded

    @torch.inference_mode()
    def record_next(self) -> None:
        """Record one more size; where memory does not suffice, no more are recorded."""
        with on_device(self._device):
            try:
                self._graphs.record_next()
            except torch.OutOfMemoryError as error:
                logger.warning("%d steps stay uncaptured: %s", self.num_unrecorded, error)
                self._graphs.forget_unrecorded()

    def _replay(self, layout: StepLayout) -> tuple[SampledStep, Tensor | None] | None:
        """Run a captured step of rows that sample at each token; None when none serves it.

        Returns also what the head read, where heads read it too.
        """
        slots, graphs = layout.adapter_slots, self._decode_graphs
        if graphs is None or self._replaces(slots, graphs.has_experts):
            return None
        with_experts = self._bank.changes(slots, (ProjectionKind.EXPERTS,))
        # With the least room first.
        runs = (each.run(layout, with_experts) for each in (graphs, *self._checked_graphs))
        found = (output for output in runs if output is not None)
        if (output := next(found, None)) is None:
            return None
        self.num_captured += 1
        params = self._sampling(layout)
        if params.plain:
            if not output.written:
                self._input_batch.write(output.targets, output.tokens)
            return SampledStep(output.tokens, None), output.states
        sampled = sample_tokens(output.logits, params)
        self._input_batch.sampled(layout, output.targets, sampled.tokens)
        return sampled, output.states

    def _compute(
        self, layout: StepLayout
    ) -> tuple[SampledStep, PromptScoresOnDevice | None, Tensor | None]:
        """Run a step launch by launch, or in graph pieces with launches between them.

        The head reads single tokens, or whole prompts in slices. Returns also what the head reads
        for the step's samples.
        """
        inputs = self._input_batch.inputs(layout)
        attention = prepare(self._backends, inputs)
        hidden = self._replay_piecewise(inputs, attention)
        if hidden is None:
            hidden = self._hidden(inputs, attention)
        head, scores = partial(self._head, layout), None
        if layout.prompt_rows:
            scores = self._prompts.read(layout.prompt_rows, hidden, self._input_batch.tokens, head)
            hidden = hidden[inputs.last_tokens]
        if not layout.sampling:
            return no_rows(self._device), scores, None
        return self._sample(layout, inputs, head(hidden, layout.last_tokens)), scores, hidden

    def _tail_step(self, layout: StepLayout) -> TailStep | None:
        """Return the tokens that are read; None without any, or where the model does not split."""
        split = self._forward.split
        if split is None or not (layout.sampling or layout.prompt_rows):
            return None
        inputs = self._input_batch.inputs(layout.tail)
        attention = prepare(self._backends, inputs) if split.tail_attends else ()
        return TailStep(inputs, to_device(layout.read, self._device), attention)

    def _hidden(self, inputs: StepInputs, attention: StepPlans) -> Tensor:
        """Return the hidden states of the tokens that are read, launch by launch."""
        layout = inputs.layout
        with self._norms.using(layout.adapter_slots, layout.adapter_lengths):
            adapters = self._step_adapters(layout)
            if self._forward.split is None or len(layout.read) == len(layout.positions):
                rows = self._state_rows(layout)
                hidden = self._forward.hidden(inputs, attention, adapters, rows)
                return hidden[inputs.tokens_read]
            left = self._forward.trunk(inputs, attention, adapters)
        if (tail := self._tail_step(layout)) is None:
            return left[0][:0]
        layout, read = tail.inputs.layout, [each[tail.read] for each in left]
        with self._norms.using(layout.adapter_slots, layout.adapter_lengths):
            adapters = self._step_adapters(layout)
            hidden = self._forward.tail(read, tail.inputs, tail.attention, adapters)
        return hidden[tail.inputs.tokens_read]

    def _guess(
        self, batch: ForwardBatch, layout: StepLayout, hidden: Tensor | None, sampled: SampledStep
    ) -> GuessedRows | None:
        """Guess behind the step's samples; hidden: what the head read for them."""
        guesser = self._guesser
        if guesser is None or hidden is None or not batch.guesses:
            return None
        slots = self._input_batch.adapters_of(batch.rows)
        return guess(guesser, batch.guesses, batch.rows, slots, layout, hidden, sampled.tokens)

    def _replay_piecewise(self, inputs: StepInputs, attention: StepPlans) -> Tensor | None:
        """Return the same, of a step in graph pieces; None when none serve this step."""
        slots, graphs = inputs.layout.adapter_slots, self._piecewise_graphs
        if graphs is None or self._replaces(slots, graphs.has_experts):
            return None
        with_experts = self._bank.changes(slots, (ProjectionKind.EXPERTS,))
        tail = partial(self._tail_step, inputs.layout)
        hidden = graphs.run(inputs, attention, tail, with_experts)
        self.num_captured += hidden is not None
        return hidden

    def _replaces(self, slots: Sequence[int], has_experts: bool = False) -> bool:
        """Return whether an adapter replaces what captured steps read of the base model.

        has_experts: whether those steps have adapters of experts.
        """
        has_norms = self._norms.changes(slots) and not self._norms.capturable
        return has_norms or needs_launches(self._bank, slots, has_experts)

    def _head(self, layout: StepLayout, hidden: Tensor, at: Ints) -> Tensor:
        """Return the logits of those of a step's tokens that are `at` these indices."""
        adapters = self._with_vocabulary(NO_DELTAS, replace(layout, last_tokens=at))
        return self._forward.model.head(hidden, adapters)

    def _sample(self, layout: StepLayout, inputs: StepInputs, logits: Tensor) -> SampledStep:
        sampled = sample_tokens(logits, self._sampling(layout))
        self._input_batch.sampled(layout, inputs.targets, sampled.tokens)
        return sampled

    def _sampling(self, layout: StepLayout) -> SamplingTensors:
        """Return the sampling parameters of the step's rows, on the device."""
        history = self._input_batch.history(layout)
        return sampling_tensors(layout.sampling, layout.sample_positions, self._device, history)

    def _step_adapters(self, layout: StepLayout) -> AdapterData | None:
        """Return the step's adapters, None where all rows are the base model's."""
        slots, lengths = layout.adapter_slots, layout.adapter_lengths
        if max(slots) < 0:
            return None
        if self._adapter_plan is None:
            adapters = self._kernel.batch(self._bank, slots, lengths)
            return self._with_vocabulary(adapters, layout)
        tiles = self._adapter_plan.update(slots, lengths)
        has_experts = self._bank.changes(slots, (ProjectionKind.EXPERTS,))
        by_kernels = has_experts and self._parts.has_expert_kernels
        adapters = self._adapter_plan.batch(sum(lengths), tiles, by_kernels)
        return self._with_vocabulary(adapters, layout)

    def _state_rows(self, layout: StepLayout) -> tuple[StateRows, ...]:
        """Return the step's rows as recurrent layers compute them; () for a model without."""
        if self._parts.weights.model.states is None:
            return ()
        slots = to_device(layout.row_slots, self._device)
        return state_rows(layout, slots, self._rows_adapters)

    def _rows_adapters(self, slots: Sequence[int], lengths: Sequence[int]) -> AdapterData:
        """Return the adapters of rows that recurrent layers compute by themselves."""
        adapters = self._kernel.batch(self._bank, slots, lengths)
        if not adapts_more(self._bank, slots):
            return adapters
        of_token = np.repeat(np.array(slots), lengths)
        return VocabularyAdapters(adapters, self._bank, of_token, of_token[:0])

    def _with_vocabulary(self, adapters: AdapterData, layout: StepLayout) -> AdapterData:
        """Join what the step's adapters change beside linear maps of the layers, where some do."""
        if not adapts_more(self._bank, layout.adapter_slots):
            return adapters
        slots = np.repeat(np.array(layout.adapter_slots), layout.adapter_lengths)
        return VocabularyAdapters(adapters, self._bank, slots, slots[layout.last_tokens])
