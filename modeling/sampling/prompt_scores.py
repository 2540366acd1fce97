"""Prompt logprobs, embeddings and scores, computed from a step's hidden states.

Logits of whole chunks are never held: a vocabulary of 128,256 over 2,048 positions is a gigabyte
in float32. The head reads the hidden states in slices, and only those of rows that need them.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.wire.plan import PromptReport, RequestJoin, TokenLogprobs
from configs.wire.sampling import Pooling, Sampling
from modeling.sampling.sampler import LogprobTensors, logprobs_of
from modeling.transfer import to_device

SLICE_BYTES = 64 * 2**20
"""Bytes of float32 logits that are computed at once."""

Ints = npt.NDArray[np.int64]

Head = Callable[[Tensor, Ints], Tensor]
"""From hidden states [n, width] of the step's n tokens at these indices to logits [n, vocab]."""


Heads = Callable[[Tensor, int], Tensor | None]
"""From states [n, width] and an adapter slot (-1: base) to the float32 logits [n, labels] of that
slot's classification head; None where it has none."""


def no_heads(states: Tensor, slot: int) -> Tensor | None:
    """Return None: no slot has a classification head."""
    return None


@dataclass(frozen=True)
class PromptRow:
    """A row of a request for prompt logprobs, an embedding or scores.

    row: its index in the batch.
    batch_slot: of its request.
    at: the index of its first token among the step's.
    known_at: the index of the request's first token in the flat token buffer.
    start, end: the positions that it computes.
    prompt_length, sampling, adapter_slot: of its request; -1 for the base model.
    """

    row: int
    batch_slot: int
    at: int
    known_at: int
    start: int
    end: int
    prompt_length: int
    sampling: Sampling
    adapter_slot: int = -1

    @property
    def num_scored(self) -> int:
        """Return how many positions have a next prompt token to score."""
        if self.sampling.prompt_logprobs < 0:
            return 0
        return max(0, min(self.end, self.prompt_length - 1) - self.start)

    @property
    def pools(self) -> bool:
        """Return whether its hidden states are part of an embedding, or are scored."""
        return self.sampling.pooling is not Pooling.NONE and self.start < self.prompt_length

    @property
    def completes(self) -> bool:
        """Return whether this row completes its embedding or its scores."""
        return self.pools and self.end >= self.prompt_length


def whole_row(index: int, join: RequestJoin) -> PromptRow:
    """Return the row, of this index in the batch, that computes a request's whole prompt."""
    length = join.prompt_length
    return PromptRow(
        index, join.batch_slot, 0, 0, 0, length, length, join.sampling, join.adapter_slot
    )


@dataclass(frozen=True)
class PromptScoresOnDevice:
    """A step's prompt logprobs, embeddings and scores, on the device.

    rows: as in `read`.
    logprobs: of all scored positions, row after row; None without any.
    vectors: the embedding or the scores, float32, of each row that completes them; a row of a
    model that cannot has none.
    """

    rows: Sequence[PromptRow]
    logprobs: LogprobTensors | None
    vectors: Mapping[int, Tensor]

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors that the host needs."""
        found = self.logprobs
        scores = [] if found is None else [found.logprob, found.top_ids, found.top_logprobs]
        # One tensor: a step's results are copied one by one.
        return [*scores, torch.cat(list(self.vectors.values()))] if self.vectors else scores

    def reports(self, copied: Sequence[Tensor]) -> list[PromptReport]:
        """Return the rows' reports, from `tensors` on the host."""
        logprobs: Iterator[TokenLogprobs] = iter(())
        if self.logprobs is not None:
            own, ids, top = (tensor.tolist() for tensor in copied[:3])
            logprobs = map(TokenLogprobs, own, ids, top)
        found: dict[int, Tensor] = {}
        if self.vectors:
            sizes = [len(vector) for vector in self.vectors.values()]
            found = dict(zip(self.vectors, torch.split(copied[-1], sizes), strict=True))
        return [
            PromptReport(
                row=row.row,
                first=row.start + 1,
                logprobs=[
                    _cut(next(logprobs), row.sampling.prompt_logprobs)
                    for _ in range(row.num_scored)
                ],
                embedding=_bytes(found[row.row]) if row.row in found else b"",
            )
            for row in self.rows
        ]


class PromptReader:
    """Reads prompts for one rank; keeps the parts of those that are computed in several rows."""

    def __init__(self, vocab_size: int, device: torch.device, heads: Heads) -> None:
        self._heads = heads
        self._slice = max(1, SLICE_BYTES // (4 * vocab_size))
        self._device = device
        self._parts: dict[int, Tensor] = {}

    def read(
        self, rows: Sequence[PromptRow], hidden: Tensor, known: Tensor, head: Head
    ) -> PromptScoresOnDevice:
        """Read a step's rows; every rank does so alike, for the head gathers its logits.

        hidden: [tokens, width], of the whole step, after the final norm. known: the flat token
        buffer.
        """
        scored = [row for row in rows if row.num_scored]
        logprobs = self._score(scored, hidden, known, head) if scored else None
        pooled = {row.row: self._pool(row, hidden) for row in rows if row.pools}
        vectors = {row: vector for row, vector in pooled.items() if vector is not None}
        return PromptScoresOnDevice(rows, logprobs, vectors | self._classify(rows, hidden))

    def _classify(self, rows: Sequence[PromptRow], hidden: Tensor) -> dict[int, Tensor]:
        """Return the scores of the rows that complete theirs, by row; one product for each head."""
        by_slot: dict[int, list[PromptRow]] = defaultdict(list)
        for row in rows:
            if row.sampling.pooling is Pooling.SCORE and row.completes:
                by_slot[row.adapter_slot].append(row)
        vectors: dict[int, Tensor] = {}
        for slot, own in by_slot.items():
            last = np.array([row.at + row.end - row.start - 1 for row in own], dtype=np.int64)
            logits = self._heads(hidden[to_device(last, self._device)], slot)
            if logits is not None:
                vectors |= {row.row: vector for row, vector in zip(own, logits, strict=True)}
        return vectors

    def _score(
        self, rows: Sequence[PromptRow], hidden: Tensor, known: Tensor, head: Head
    ) -> LogprobTensors:
        num_top = max(row.sampling.prompt_logprobs for row in rows)
        at = np.concatenate([row.at + np.arange(row.num_scored) for row in rows])
        next_at = np.concatenate([row.known_at + 1 + np.arange(row.num_scored) for row in rows])
        hidden_at, tokens = to_device(at, self._device), known[to_device(next_at, self._device)]
        parts = []
        for first in range(0, len(at), self._slice):
            cut = slice(first, first + self._slice)
            # Every rank makes the same slices: the head gathers logits from all of them.
            logits = head(hidden[hidden_at[cut]], at[cut])
            parts.append(logprobs_of(logits, tokens[cut], num_top))
        return joined(parts)

    def _pool(self, row: PromptRow, hidden: Tensor) -> Tensor | None:
        """Add a row's hidden states; returns the embedding if it is complete."""
        pooling = row.sampling.pooling
        if pooling is Pooling.SCORE:
            return None
        states = hidden[row.at : row.at + row.end - row.start]
        if pooling is Pooling.LAST:
            return states[-1].float() if row.completes else None
        part = _part(states, pooling)
        # The slot may still have the part of a request that ended before its embedding was
        # complete.
        before = self._parts.pop(row.batch_slot, None)
        if row.start > 0:
            assert before is not None, f"slot {row.batch_slot} has no part up to {row.start}"
            part = _JOINS[pooling](before, part)
        if row.completes:
            return part / row.prompt_length if pooling is Pooling.MEAN else part
        self._parts[row.batch_slot] = part
        return None


_JOINS: dict[Pooling, Callable[[Tensor, Tensor], Tensor]] = {
    Pooling.MEAN: torch.add,
    Pooling.MAX: torch.maximum,
    Pooling.CLS: lambda first, _: first,
}
"""What a prompt's chunks make of the part of those before and their own."""


def _part(states: Tensor, pooling: Pooling) -> Tensor:
    """What a chunk's states [n, width] add: float32 [width], of the mean the sum."""
    if pooling is Pooling.CLS:
        # A copy: the next step writes its hidden states to the same memory.
        return states[0].to(torch.float32, copy=True)
    # In float32: chunks of any size then give nearly the same mean.
    return states.float().sum(dim=0) if pooling is Pooling.MEAN else states.amax(dim=0).float()


def pooled(states: Tensor, pooling: Pooling) -> Tensor:
    """Return the embedding, float32 [width], of a whole prompt's states [n, width]."""
    if pooling is Pooling.LAST:
        return states[-1].float()
    part = _part(states, pooling)
    return part / len(states) if pooling is Pooling.MEAN else part


def joined(parts: Sequence[LogprobTensors]) -> LogprobTensors:
    """Concatenate logprobs that have the same number of alternatives."""
    return LogprobTensors(
        torch.cat([part.logprob for part in parts]),
        torch.cat([part.top_ids for part in parts]),
        torch.cat([part.top_logprobs for part in parts]),
    )


def _cut(found: TokenLogprobs, num_top: int) -> TokenLogprobs:
    return TokenLogprobs(found.logprob, found.top_ids[:num_top], found.top_logprobs[:num_top])


def _bytes(embedding: Tensor) -> bytes:
    return embedding.numpy().astype("<f4").tobytes()
