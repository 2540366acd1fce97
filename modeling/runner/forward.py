"""A paged model over one cache: from a step's tensors to logits or hidden states."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.norms import AdaptedNorms
from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionBackend, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.models.base import PagedModel
from modeling.models.context import GroupStep, PagedContext, StateRows
from modeling.runner.input_batch import StepInputs, StepTensors

StepPlans = Sequence[AttentionStep]
"""A step's attention: the plan of each KV group's backend."""


def prepare(backends: Sequence[AttentionBackend], inputs: StepInputs) -> StepPlans:
    """Plan a step; backends: of each KV group."""
    groups = zip(backends, inputs.group_lengths, inputs.groups, strict=True)
    return tuple(backend.prepare(*lengths, own.block_tables) for backend, lengths, own in groups)


@dataclass(frozen=True)
class PagedForward:
    """cache: one a layer. norms: the model's, with those of adapters; None without adapters."""

    model: PagedModel
    cache: list[LayerCache]
    norms: AdaptedNorms | None = None

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

    def _run(
        self,
        tensors: StepTensors,
        attention: StepPlans,
        adapters: AdapterData | None,
        head_tokens: Tensor | None,
        state_rows: tuple[StateRows, ...],
    ) -> Tensor:
        groups = tuple(
            GroupStep(group.cu_seqlens, group.block_tables, group.slots, step)
            for group, step in zip(tensors.groups, attention, strict=True)
        )
        context = PagedContext(self.cache, groups, adapters, state_rows=state_rows)
        with nullcontext() if self.norms is None else self.norms.captured(adapters):
            output, _ = self.model.paged(
                tensors.input_ids,
                tensors.positions,
                context,
                lm_head_indices=head_tokens,
                skip_lm_head=head_tokens is None,
            )
        return output
