"""A paged model over one cache: from a step's tensors to logits or hidden states."""

from dataclasses import dataclass

from torch import Tensor

from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.models.base import PagedModel
from modeling.models.context import PagedContext
from modeling.runner.input_batch import StepTensors


@dataclass(frozen=True)
class PagedForward:
    """cache: one a layer."""

    model: PagedModel
    cache: list[LayerCache]

    def logits(
        self, tensors: StepTensors, attention: AttentionStep, adapters: AdapterData | None
    ) -> Tensor:
        """Return the logits [sampling rows, vocab]."""
        return self._run(tensors, attention, adapters, tensors.last_tokens)

    def hidden(
        self, tensors: StepTensors, attention: AttentionStep, adapters: AdapterData | None
    ) -> Tensor:
        """Return all tokens' hidden states [tokens, ...], without the head."""
        return self._run(tensors, attention, adapters, None)

    def _run(
        self,
        tensors: StepTensors,
        attention: AttentionStep,
        adapters: AdapterData | None,
        head_tokens: Tensor | None,
    ) -> Tensor:
        context = PagedContext(
            self.cache,
            tensors.cu_seqlens,
            tensors.block_tables,
            tensors.slots,
            attention,
            adapters,
        )
        output, _ = self.model.paged(
            tensors.input_ids,
            tensors.positions,
            context,
            lm_head_indices=head_tokens,
            skip_lm_head=head_tokens is None,
        )
        return output
