"""A paged model over one cache: from a step's tensors to logits or hidden states."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.norms import AdaptedNorms
from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionBackend, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.models.base import PagedModel, SplitModel
from modeling.models.context import GroupStep, PagedContext, StateRows
from modeling.runner.input_batch import StepInputs, StepTensors

StepPlans = Sequence[AttentionStep]
"""A step's attention: the plan of each KV group's backend."""


def prepare(backends: Sequence[AttentionBackend], inputs: StepInputs) -> StepPlans:
    """Plan a step; backends: of each KV group."""
    groups = zip(backends, inputs.group_lengths, inputs.groups, strict=True)
    return tuple(backend.prepare(*lengths, own.block_tables) for backend, lengths, own in groups)


@dataclass(frozen=True)
class TailStep:
    """The tokens of a step that are read, as a step of their own.

    read: int64, their indices among the step's tokens, ascending. attention: theirs, where the tail
    attends.
    """

    inputs: StepInputs
    read: Tensor
    attention: StepPlans


@dataclass(frozen=True)
class PagedForward:
    """A model over its cache.

    cache: one a layer. norms: the model's, with those of adapters; None without adapters.
    split: the model, if its steps with prompts end at a trunk, and `tail` computes the rest; None
        where every step is computed whole.
    """

    model: PagedModel
    cache: list[LayerCache]
    norms: AdaptedNorms | None = None
    split: SplitModel | None = None

    def logits(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> Tensor:
        """Return the logits [sampling rows, vocab]."""
        return self._run(tensors, attention, adapters, tensors.last_tokens, state_rows)

    def logits_and_states(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return the logits, and what the head read for them, [sampling rows, width]."""
        states = self.hidden(tensors, attention, adapters, state_rows)[tensors.last_tokens]
        return self.model.head(states, adapters), states

    def logits_and_inner(
        self,
        states: Callable[[], Tensor],
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> tuple[Tensor, Tensor]:
        """Return the logits, and what `states` has of inner layers, [sampling rows, any]."""
        logits = self.logits(tensors, attention, adapters, state_rows)
        return logits, states()[tensors.last_tokens]

    def logits_alone(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> tuple[Tensor, None]:
        """Return the logits, and no states."""
        return self.logits(tensors, attention, adapters, state_rows), None

    def hidden(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...] = (),
    ) -> Tensor:
        """Return all tokens' hidden states [tokens, ...], without the head."""
        return self._run(tensors, attention, adapters, None, state_rows)

    def trunk(
        self, tensors: StepTensors, attention: StepPlans, adapters: AdapterData | None
    ) -> tuple[Tensor, ...]:
        """Return what `SplitModel.trunk` does; hidden states alone where nothing is split."""
        if self.split is None:
            return (self.hidden(tensors, attention, adapters),)
        with self._captured(adapters):
            context = self._context(tensors, attention, adapters, ())
            return self.split.trunk(tensors.input_ids, tensors.positions, context)

    def tail(
        self,
        left: Sequence[Tensor],
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
    ) -> Tensor:
        """Return the hidden states of these tokens; see `SplitModel.tail`."""
        assert self.split is not None
        with self._captured(adapters):
            context = self._context(tensors, attention, adapters, ())
            return self.split.tail(left, tensors.input_ids, tensors.positions, context)

    def _run(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        head_tokens: Tensor | None,
        state_rows: tuple[StateRows, ...],
    ) -> Tensor:
        with self._captured(adapters):
            output, _ = self.model.paged(
                tensors.input_ids,
                tensors.positions,
                self._context(tensors, attention, adapters, state_rows),
                lm_head_indices=head_tokens,
                skip_lm_head=head_tokens is None,
            )
        return output

    def _context(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        state_rows: tuple[StateRows, ...],
    ) -> PagedContext:
        # A tail that does not attend has no plans, and reads no group.
        own = tensors.groups if attention else ()
        groups = tuple(
            GroupStep(group.cu_seqlens, group.block_tables, group.slots, step)
            for group, step in zip(own, attention, strict=True)
        )
        return PagedContext(self.cache, groups, adapters, state_rows=state_rows)

    def _captured(self, adapters: AdapterData | None) -> AbstractContextManager[None]:
        return nullcontext() if self.norms is None else self.norms.captured(adapters)
