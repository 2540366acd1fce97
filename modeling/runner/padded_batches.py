"""The padded batches of the rows that run: one for each group of rows that may share a forward.

A batch lives from step to step. Rows that a step leaves out leave it, new ones are prefilled
whole beside it and joined; a row that grows into another group moves there.
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence, Set

import numpy as np
import torch
from msgspec import structs
from torch import Tensor

from configs.wire.plan import RequestJoin
from modeling.models.causal_lm import CausalLM, CausalLMBatch
from modeling.models.padded.adapters import RowAdapters
from modeling.transfer import to_device

MAX_PADDING = 2
"""How many times a row's own length it may be padded to in a prefill, and what CUDA's token
budget allows for in the cache."""


class PaddedBatches:
    """Rows of one model and their caches.

    adapters: from a batch to the adapters of its rows.
    """

    def __init__(
        self, model: CausalLM, adapters: Callable[[CausalLMBatch], RowAdapters | None]
    ) -> None:
        self._model = model
        self._adapters = adapters
        self._running: list[CausalLMBatch] = []
        self._stepping: list[CausalLMBatch] = []

    @property
    def batch_slots(self) -> set[int]:
        """Of all rows that run."""
        return {slot for batch in self._running for slot in batch.batch_slots}

    def check(self) -> None:
        """Assert that each row is in one batch, and that each batch is sound."""
        for batch in self._running:
            batch.check()
            assert len(set(map(self._model.sharing.group, batch.input_lengths))) == 1
        assert len(self.batch_slots) == sum(map(len, self._running))

    def keep(self, slots: Set[int]) -> None:
        """Drop all rows but those of these batch slots; copies only batches that lose some."""
        kept = [[slot for slot in batch.batch_slots if slot in slots] for batch in self._running]
        self._running = [
            batch.filter(own) if len(own) < len(batch) else batch
            for batch, own in zip(self._running, kept, strict=True)
            if own
        ]

    def continuing(self, wanted: Sequence[tuple[int, int]]) -> set[int]:
        """Return the batch slots that can compute their step from the cache that they have.

        wanted: (batch slot, its length with the step's token).
        """
        lengths = {
            slot: length
            for batch in self._running
            for slot, length in zip(batch.batch_slots, batch.input_lengths, strict=True)
        }
        begins_anew = self._model.sharing.begins_anew
        return {
            slot
            for slot, length in wanted
            if lengths.get(slot) == length and not begins_anew(length)
        }

    def compute(
        self, continuing: Set[int], fresh: Sequence[RequestJoin]
    ) -> tuple[list[int], Tensor]:
        """Compute the step of rows that continue and of whole requests.

        Returns the batch slots of both, and logits [rows, vocab] in their order.
        """
        self.keep(continuing)
        batches, self._running = [*self._running, *self._batches(fresh)], []
        logits = [self._model.next_logits(batch, self._adapters(batch)) for batch in batches]
        self._stepping = batches
        return [slot for batch in batches for slot in batch.batch_slots], torch.cat(logits)

    def advance(self, tokens: Tensor) -> None:
        """Append each row's token, int64 [rows], in the order of `compute`."""
        parts = torch.split(tokens, [len(batch) for batch in self._stepping])
        group = self._model.sharing.group
        groups: dict[Hashable, list[CausalLMBatch]] = defaultdict(list)
        for batch, part in zip(self._stepping, parts, strict=True):
            batch.advance(part)
            for alike in batch.split(group):
                groups[group(alike.input_lengths[0])].append(alike)
        self._stepping = []
        self._running = [
            batches[0] if len(batches) == 1 else CausalLMBatch.concatenate(batches)
            for batches in groups.values()
        ]

    def _batches(self, fresh: Sequence[RequestJoin]) -> list[CausalLMBatch]:
        """Batches of whole requests, of like length and of one group."""
        groups: dict[Hashable, list[RequestJoin]] = defaultdict(list)
        batches = []
        for request in fresh:
            if len(self._cuts(request)) > 1:
                batches.append(self._in_pieces(request))
            else:
                groups[self._model.sharing.group(len(request.tokens))].append(request)
        for group in groups.values():
            batches += [self._model.batch(alike) for alike in groups_of_like_length(group)]
        return batches

    def _cuts(self, request: RequestJoin) -> list[int]:
        return self._model.sharing.cuts(request.prompt_length, len(request.tokens))

    def _in_pieces(self, request: RequestJoin) -> CausalLMBatch:
        """Compute a request up to its last piece, which is the batch's next input."""
        cuts = self._cuts(request)
        batch = self._model.batch([structs.replace(request, tokens=request.tokens[: cuts[0]])])
        for start, end in itertools.pairwise(cuts):
            self._model.next_logits(batch, self._adapters(batch))
            tokens = np.array([request.tokens[start:end]], dtype=np.int64)
            batch.advance(to_device(tokens, self._model.device))
        return batch


def groups_of_like_length(requests: Sequence[RequestJoin]) -> list[list[RequestJoin]]:
    """Group requests, longest first, so that none is padded to more than MAX_PADDING times."""
    groups: list[list[RequestJoin]] = []
    for request in sorted(requests, key=lambda each: -len(each.tokens)):
        if groups and len(groups[-1][0].tokens) <= MAX_PADDING * len(request.tokens):
            groups[-1].append(request)
        else:
            groups.append([request])
    return groups
