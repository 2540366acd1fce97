"""Prompt logprobs and embeddings, computed from a step's hidden states.

Logits of whole chunks are never held: a vocabulary of 128,256 over 2,048 positions is a gigabyte
in float32. The head reads the hidden states in slices, and only those of rows that need them.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.wire.plan import PromptReport, TokenLogprobs
from configs.wire.sampling import Pooling, Sampling
from modeling.sampling.sampler import LogprobTensors, logprobs_of
from modeling.transfer import to_device

SLICE_BYTES = 64 * 2**20
"""Bytes of float32 logits that are computed at once."""

Ints = npt.NDArray[np.int64]

Head = Callable[[Tensor, Ints], Tensor]
"""From hidden states [n, width] of the step's n tokens at these indices to logits [n, vocab]."""


@dataclass(frozen=True)
class PromptRow:
    """A row of a request for prompt logprobs or an embedding.

    row: its index in the batch.
    batch_slot: of its request.
    at: the index of its first token among the step's.
    known_at: the index of the request's first token in the flat token buffer.
    start, end: the positions that it computes.
    prompt_length, sampling: of its request.
    """

    row: int
    batch_slot: int
    at: int
    known_at: int
    start: int
    end: int
    prompt_length: int
    sampling: Sampling

    @property
    def num_scored(self) -> int:
        """Return how many positions have a next prompt token to score."""
        if self.sampling.prompt_logprobs < 0:
            return 0
        return max(0, min(self.end, self.prompt_length - 1) - self.start)

    @property
    def pools(self) -> bool:
        """Return whether its hidden states are part of an embedding."""
        return self.sampling.pooling is not Pooling.NONE and self.start < self.prompt_length

    @property
    def completes(self) -> bool:
        """Return whether this row completes its embedding."""
        return self.pools and self.end >= self.prompt_length


@dataclass(frozen=True)
class PromptScoresOnDevice:
    """A step's prompt logprobs and embeddings, on the device.

    rows: as in `read`.
    logprobs: of all scored positions, row after row; None without any.
    embeddings: float32 [completed rows, width]; None without any.
    """

    rows: Sequence[PromptRow]
    logprobs: LogprobTensors | None
    embeddings: Tensor | None

    @property
    def tensors(self) -> list[Tensor]:
        """Return all tensors that the host needs."""
        found = self.logprobs
        scores = [] if found is None else [found.logprob, found.top_ids, found.top_logprobs]
        return scores if self.embeddings is None else [*scores, self.embeddings]

    def reports(self, copied: Sequence[Tensor]) -> list[PromptReport]:
        """Return the rows' reports, from `tensors` on the host."""
        logprobs: Iterator[TokenLogprobs] = iter(())
        embeddings: Iterator[Tensor] = iter(())
        if self.logprobs is not None:
            own, ids, top = (tensor.tolist() for tensor in copied[:3])
            logprobs = map(TokenLogprobs, own, ids, top)
        pooled = self.embeddings is not None
        if pooled:
            embeddings = iter(copied[-1])
        return [
            PromptReport(
                row=row.row,
                first=row.start + 1,
                logprobs=[
                    _cut(next(logprobs), row.sampling.prompt_logprobs)
                    for _ in range(row.num_scored)
                ],
                embedding=_bytes(next(embeddings)) if pooled and row.completes else b"",
            )
            for row in self.rows
        ]


class PromptReader:
    """Reads prompts for one rank; keeps the sums of those that are computed in several rows."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        self._slice = max(1, SLICE_BYTES // (4 * vocab_size))
        self._device = device
        self._sums: dict[int, Tensor] = {}

    def read(
        self, rows: Sequence[PromptRow], hidden: Tensor, known: Tensor, head: Head
    ) -> PromptScoresOnDevice:
        """Read a step's rows; every rank does so alike, for the head gathers its logits.

        hidden: [tokens, width], of the whole step, after the final norm. known: the flat token
        buffer.
        """
        scored = [row for row in rows if row.num_scored]
        logprobs = self._score(scored, hidden, known, head) if scored else None
        pooled = [self._pool(row, hidden) for row in rows if row.pools]
        complete = [embedding for embedding in pooled if embedding is not None]
        return PromptScoresOnDevice(rows, logprobs, torch.stack(complete) if complete else None)

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
        states = hidden[row.at : row.at + row.end - row.start]
        if row.sampling.pooling is Pooling.LAST:
            return states[-1].float() if row.completes else None
        # In float32: chunks of any size then give nearly the same mean.
        total = states.float().sum(dim=0)
        # The slot may still have the sum of a request that ended before its embedding was complete.
        before = self._sums.pop(row.batch_slot, None)
        if row.start > 0:
            assert before is not None, f"slot {row.batch_slot} has no sum up to {row.start}"
            total += before
        if row.completes:
            return total / row.prompt_length
        self._sums[row.batch_slot] = total
        return None


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
