"""CausalLMBatch: rows of unequal length side by side, padded on the left to the longest.

Life: `from_requests` makes a batch of whole sequences; a forward fills its cache; `advance` takes
the sampled tokens, and from then on each row's input is its newest token. Rows leave by `filter`,
batches part by `split` and join by `concatenate`; all consume the caches that they are given.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from typing import cast

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from configs.wire.plan import RequestJoin
from modeling.models.padded.cache import (
    CachePart,
    Past,
    concatenate_caches,
    filter_cache,
    twin,
)
from modeling.transfer import to_device

ROOM = 64
"""Columns by which attention masks grow: a copy of a mask each ROOM tokens, not each token."""


@dataclass
class CausalLMBatch:
    """n rows; the longest has max_input_length tokens, the next input included.

    requests: one a row, in order; their tokens are those that the batch began with.
    input_ids, position_ids: int64 [n, max_input_length] before the first forward, then [n, 1].
    attention_mask: int64 [n, max_input_length + padding_right_offset]; 1 for a row's own tokens.
    input_lengths: each row's tokens. past_key_values: None before the first forward, then the
    cache of all columns but the next input's. keys_head_dim_last: how the cache lays out keys.
    """

    requests: list[RequestJoin]
    input_ids: Tensor
    attention_mask: Tensor
    position_ids: Tensor
    input_lengths: list[int]
    padding_right_offset: int = ROOM
    past_key_values: Past | None = field(default=None, repr=False)
    keys_head_dim_last: bool = True

    @classmethod
    def from_requests(
        cls,
        requests: Sequence[RequestJoin],
        pad_token_id: int,
        device: torch.device,
        keys_head_dim_last: bool = True,
    ) -> "CausalLMBatch":
        """Pad whole sequences on the left; every request has at least one token."""
        lengths = [len(request.tokens) for request in requests]
        longest = max(lengths)
        ids = np.full((len(requests), longest), pad_token_id, dtype=np.int64)
        mask = np.zeros((len(requests), longest + ROOM), dtype=np.int64)
        for row, request in enumerate(requests):
            ids[row, longest - lengths[row] :] = request.tokens
            mask[row, longest - lengths[row] : longest] = 1
        attention_mask = to_device(mask, device)
        return cls(
            requests=list(requests),
            input_ids=to_device(ids, device),
            attention_mask=attention_mask,
            position_ids=positions(attention_mask[:, :longest]),
            input_lengths=lengths,
            keys_head_dim_last=keys_head_dim_last,
        )

    def __len__(self) -> int:
        """How many rows."""
        return len(self.requests)

    @property
    def batch_slots(self) -> list[int]:
        """The rows' batch slots, by which `filter` names them."""
        return [request.batch_slot for request in self.requests]

    @property
    def max_input_length(self) -> int:
        """Tokens of the longest row, its next input included."""
        return max(self.input_lengths)

    @property
    def max_tokens(self) -> int:
        """Tokens that the rows take up, padding included."""
        return len(self) * self.max_input_length

    @property
    def seen(self) -> Tensor:
        """The mask as a forward needs it: [n, max_input_length]."""
        return self.attention_mask[:, : self.max_input_length]

    def advance(self, tokens: Tensor) -> None:
        """Append each row's sampled token, int64 [n], which becomes its next input.

        [n, k] are k tokens of each row that are known already.
        """
        assert self.past_key_values is not None, "a token follows a forward"
        tokens = tokens if tokens.dim() == 2 else tokens[:, None]
        count = tokens.shape[1]
        if self.padding_right_offset < count:
            self.attention_mask = pad(self.attention_mask, (0, ROOM + count))
            self.padding_right_offset += ROOM + count
        column = self.max_input_length
        self.attention_mask[:, column : column + count] = 1
        self.padding_right_offset -= count
        self.input_ids = tokens
        steps = torch.arange(1, count + 1, device=tokens.device)
        self.position_ids = self.position_ids[:, -1:] + steps
        self.input_lengths = [length + count for length in self.input_lengths]

    def split(self, group: Callable[[int], Hashable]) -> list["CausalLMBatch"]:
        """Part the rows by what `group` makes of their lengths.

        The batch itself must not be used any more.
        """
        groups: dict[Hashable, list[int]] = {}
        for slot, length in zip(self.batch_slots, self.input_lengths, strict=True):
            groups.setdefault(group(length), []).append(slot)
        if len(groups) == 1:
            return [self]
        assert self.past_key_values is not None
        parts = [replace(self, past_key_values=twin(self.past_key_values)) for _ in groups]
        return [part.filter(kept) for part, kept in zip(parts, groups.values(), strict=True)]

    def filter(self, batch_slots: Sequence[int]) -> "CausalLMBatch":
        """Keep the rows of `batch_slots`, in that order; columns that only others needed go too.

        The batch itself must not be used any more.
        """
        index = {slot: row for row, slot in enumerate(self.batch_slots)}
        kept = [index[slot] for slot in batch_slots]
        lengths = [self.input_lengths[row] for row in kept]
        rows = to_device(np.array(kept, dtype=np.int64), self.input_ids.device)
        first = self.max_input_length - max(lengths)
        width = self.input_ids.shape[1]
        spared = first if width > 1 else 0
        past = self.past_key_values
        if past is not None:
            past = filter_cache(past, len(self), rows, max(lengths) - 1, self.keys_head_dim_last)
        return CausalLMBatch(
            requests=[self.requests[row] for row in kept],
            input_ids=self.input_ids[rows, spared:],
            attention_mask=self.attention_mask[rows, first:],
            position_ids=self.position_ids[rows, spared:],
            input_lengths=lengths,
            padding_right_offset=self.padding_right_offset,
            past_key_values=past,
            keys_head_dim_last=self.keys_head_dim_last,
        )

    @classmethod
    def concatenate(cls, batches: Sequence["CausalLMBatch"]) -> "CausalLMBatch":
        """Put prefilled batches below each other; ValueError for one that is not.

        The batches must not be used any more.
        """
        if any(batch.past_key_values is None for batch in batches):
            raise ValueError("only prefilled batches can be concatenated: run a forward first")
        first = batches[0]
        longest = max(batch.max_input_length for batch in batches)
        room = max(batch.padding_right_offset for batch in batches)
        parts = [
            CachePart(cast(Past, batch.past_key_values), len(batch), batch.max_input_length - 1)
            for batch in batches
        ]
        return cls(
            requests=[request for batch in batches for request in batch.requests],
            input_ids=torch.cat([batch.input_ids for batch in batches]),
            attention_mask=torch.cat([batch._mask(longest, room) for batch in batches]),
            position_ids=torch.cat([batch.position_ids for batch in batches]),
            input_lengths=[length for batch in batches for length in batch.input_lengths],
            padding_right_offset=room,
            past_key_values=concatenate_caches(parts, first.keys_head_dim_last),
            keys_head_dim_last=first.keys_head_dim_last,
        )

    def check(self) -> None:
        """Assert that the mask counts each row's tokens and that all widths fit together."""
        rows, longest = len(self), self.max_input_length
        assert len(set(self.batch_slots)) == rows, self.batch_slots
        assert self.attention_mask.shape == (rows, longest + self.padding_right_offset)
        assert self.attention_mask.sum(1).tolist() == self.input_lengths
        assert bool(self.attention_mask[:, longest - 1].all()), "rows end in one column"
        assert self.position_ids[:, -1].tolist() == [n - 1 for n in self.input_lengths]

    def _mask(self, longest: int, room: int) -> Tensor:
        """The mask, moved into a window of `longest` columns with `room` on its right."""
        left = longest - self.max_input_length
        return pad(self.attention_mask, (left, room - self.padding_right_offset))


def positions(mask: Tensor) -> Tensor:
    """Number each row's own tokens from 0; padding, which is never read, gets 1."""
    return (mask.cumsum(dim=-1) - 1).masked_fill_(mask == 0, 1)
