"""Reads prompts through a CausalLM: the logprobs of their tokens, and their final hidden states.

A prompt is read by itself, unpadded. Its logits are looked at in slices; each slice but the first
goes on from the cache of those before, where the model was seen to do that rightly.
"""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Pooling
from modeling.models.causal_lm import PROBE, CausalLM
from modeling.models.padded.adapters import RowAdapters
from modeling.models.padded.cache import Past
from modeling.sampling.prompt_scores import (
    SLICE_BYTES,
    Heads,
    PromptRow,
    PromptScoresOnDevice,
    joined,
    no_heads,
    pooled,
    whole_row,
)
from modeling.sampling.sampler import LogprobTensors, logprobs_of

Adapters = Callable[[int], RowAdapters | None]
"""From a slot (-1: base) to that adapter over one row."""

WHOLE = 2**31
"""A slice that holds any prompt."""


class CausalLMPrompts:
    """Prompts of one model; slice_length: logits of so many tokens are in memory at once."""

    def __init__(self, model: CausalLM, vocab_size: int) -> None:
        """Try whether the model can go on with several tokens at once."""
        self._model = model
        self.slice_length = max(1, SLICE_BYTES // (4 * vocab_size)) if self._goes_on() else WHOLE

    def score(
        self,
        requests: Sequence[tuple[int, RequestJoin]],
        adapters: Adapters,
        heads: Heads = no_heads,
    ) -> PromptScoresOnDevice:
        """Read the whole prompt of each (row's index in the batch, its request)."""
        rows = [whole_row(index, join) for index, join in requests]
        num_top = max(row.sampling.prompt_logprobs for row in rows)
        scores: list[LogprobTensors] = []
        vectors: dict[int, Tensor] = {}
        for row, (_, join) in zip(rows, requests, strict=True):
            ids = torch.tensor(join.tokens[: join.prompt_length], device=self._model.device)
            if row.num_scored:
                scores.append(self._score(ids, num_top, join.adapter_slot, adapters))
            if row.pools:
                states = self._model.hidden_states(ids, adapters(join.adapter_slot))
                vector = None if states is None else _vector(states, row, heads)
                if vector is not None:
                    vectors[row.row] = vector
        return PromptScoresOnDevice(rows, joined(scores) if scores else None, vectors)

    def _score(self, ids: Tensor, num_top: int, slot: int, adapters: Adapters) -> LogprobTensors:
        """What the model thinks of ids[1:]; int64 [n], n at least 2."""
        parts = []
        reader = _Reader(self._model, ids)
        for first in range(0, len(ids) - 1, self.slice_length):
            last = min(first + self.slice_length, len(ids) - 1)
            logits = reader.read(last, adapters(slot))
            parts.append(logprobs_of(logits, ids[first + 1 : last + 1], num_top))
        return joined(parts)

    @torch.inference_mode()
    def _goes_on(self) -> bool:
        """Whether three tokens behind four are what they are in a whole sequence."""
        ids = torch.tensor(PROBE[0], device=self._model.device)
        whole = _Reader(self._model, ids).read(len(ids))
        reader = _Reader(self._model, ids)
        try:
            reader.read(4)
            cut = reader.read(len(ids))
        except (RuntimeError, ValueError, TypeError, IndexError):
            # Code from elsewhere may take one token at a time only.
            return False
        tolerance = 1e-3 if whole.dtype == torch.float32 else 0.1
        return bool((cut - whole[4:]).abs().max() <= tolerance * whole.abs().max())


class _Reader:
    """One sequence on its way through a model, slice by slice; each slice is computed as it is
    in the whole sequence."""

    def __init__(self, model: CausalLM, ids: Tensor) -> None:
        self._model = model
        self._ids = ids
        self._seen = torch.zeros(1, 0, dtype=torch.int64, device=ids.device)
        self._past: Past | None = None
        self._done = 0

    def read(self, last: int, adapters: RowAdapters | None = None) -> Tensor:
        """Logits [last - done, vocab] of the tokens up to `last`."""
        first, self._done = self._done, last
        ids = self._ids[first:last]
        positions = torch.arange(first, last, device=ids.device)
        seen = torch.ones_like(ids)
        side = self._model.sharing.side
        padded = side(last) != side(len(self._ids))
        if padded:
            # A column that the mask hides, at the last position: what looks at the largest of all
            # positions sees the whole sequence's.
            ids, seen = pad(ids, (1, 0)), pad(seen, (1, 0))
            positions = pad(positions, (1, 0), value=len(self._ids) - 1)
        self._seen = torch.cat([self._seen, seen[None]], dim=1)
        logits, self._past = self._model.forward(
            ids[None], self._seen, positions[None], self._past, adapters
        )
        return logits[0, int(padded) :]


def _vector(states: Tensor, row: PromptRow, heads: Heads) -> Tensor | None:
    """Return the embedding or the scores of a prompt's states; None without a head for them."""
    if row.sampling.pooling is Pooling.SCORE:
        logits = heads(states[-1:], row.adapter_slot)
        return None if logits is None else logits[0]
    return pooled(states, row.sampling.pooling)
