"""The block tables of all batch slots, and what each KV group's attention reads of them.

Rows of a group that forgets begin at the first block that is still needed: positions before it
have been given to others. Attention sees positions relative to each other alone, so a window's
rows are shorter ones, and a row across several chunks is as many rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from configs.kv_groups import KvGroup

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchSize:
    """How many batch slots there are, and how long a sequence may get in tokens.

    block_size: tokens of the smallest block. kv_groups: empty for one group that keeps all blocks.
    strides: of each group, see `KvLayout`; empty: 1 each.
    """

    max_running: int
    max_total_tokens: int
    block_size: int
    kv_groups: tuple[KvGroup, ...] = ()
    strides: tuple[int, ...] = ()

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups, one at least."""
        return self.kv_groups or (KvGroup(self.block_size),)

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence, those that it gives back while it runs not counted."""
        return sum(group.most_held(self.max_total_tokens) for group in self.groups)

    def blocks(self, tokens: int) -> int:
        """Blocks of a sequence of so many tokens, over all groups."""
        return sum(group.blocks(tokens) for group in self.groups)


class StepRows(NamedTuple):
    """The rows of one step, n of them with T tokens; int64.

    batch_slots, starts, ends: [n]. bounds: [n + 1]. slot_of, positions: [T], each token's.
    """

    batch_slots: Ints
    starts: Ints
    ends: Ints
    bounds: Ints
    slot_of: Ints
    positions: Ints


@dataclass(frozen=True)
class GroupLayout:
    """One step as a KV group's attention reads it: m rows of T tokens; int64 unless said.

    slots: [T], the tokens' cache slots: page * page_size + offset.
    bounds: [m + 1], where rows start.
    tables: int32 [m, most pages used].
    key_lengths: [m], keys of each row that the tables hold, its own tokens included.
    """

    slots: Ints
    bounds: Ints
    tables: npt.NDArray[np.int32]
    key_lengths: Ints

    def ends(self, tokens: Ints, rows: Ints, bounds: Ints) -> "GroupLayout":
        """The last tokens of some rows alone; bounds: of the rows among these tokens."""
        return GroupLayout(self.slots[tokens], bounds, self.tables[rows], self.key_lengths[rows])

    @classmethod
    def empty(cls) -> "GroupLayout":
        """A step without rows."""
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, np.zeros((0, 0), dtype=np.int32), none)


class BlockTables:
    """One KV group's block tables of all batch slots."""

    def __init__(self, group: KvGroup, stride: int, size: BatchSize) -> None:
        self.group = group
        self.stride = stride
        self.max_pages = group.most_held(size.max_total_tokens)
        self._width = group.blocks(size.max_total_tokens)
        self._blocks = np.zeros((size.max_running, self._width), dtype=np.int32)
        self._num_blocks = np.zeros(size.max_running, dtype=np.int64)

    def clear(self, batch_slot: int) -> None:
        """Empty a batch slot's table."""
        self._num_blocks[batch_slot] = 0

    def lacking(self, batch_slot: int, end: int) -> int:
        """How many blocks a table lacks to hold the positions below `end`."""
        return self.group.blocks(end) - int(self._num_blocks[batch_slot])

    def append(self, batch_slot: int, blocks: Sequence[int]) -> None:
        """Append blocks to a table."""
        first = self._num_blocks[batch_slot]
        last = first + len(blocks)
        assert last <= self._width, (batch_slot, first, blocks)
        self._blocks[batch_slot, first:last] = blocks
        self._num_blocks[batch_slot] = last

    def dummy_slot(self, block: int) -> int:
        """The first cache slot of a block."""
        return block * self.stride * self.group.block_size

    def layout(self, rows: StepRows) -> GroupLayout:
        """Lay a step out; the tables must hold all of its positions."""
        size = self.group.block_size
        room = self._num_blocks[rows.batch_slots] * size
        assert (rows.ends <= room).all(), f"rows beyond their block tables: {rows.batch_slots}"
        pages = self._blocks[rows.slot_of, rows.positions // size].astype(np.int64) * self.stride
        slots = pages * size + rows.positions % size
        if not self.group.forgets:
            tables = self._blocks[rows.batch_slots, : -(-int(rows.ends.max()) // size)]
            return GroupLayout(slots, rows.bounds, tables * self.stride, rows.ends)
        if self.group.chunk is None:
            return self._from(slots, rows.bounds, rows)
        return self._in_chunks(slots, rows, self.group.chunk)

    def _from(self, slots: Ints, bounds: Ints, rows: StepRows) -> GroupLayout:
        """Rows that begin at the first block that they need."""
        size, window = self.group.block_size, self.group.window
        seen = rows.starts // self.group.chunk * self.group.chunk if self.group.chunk else None
        if seen is None:
            assert window is not None
            seen = np.maximum(rows.starts - window + 1, 0)
        first = seen // size
        width = int((-(-rows.ends // size) - first).max())
        # Columns beyond a row's last page are not read; they only must exist.
        columns = np.minimum(first[:, None] + np.arange(width), self._width - 1)
        tables = self._blocks[rows.batch_slots[:, None], columns]
        return GroupLayout(slots, bounds, tables * self.stride, rows.ends - first * size)

    def _in_chunks(self, slots: Ints, rows: StepRows, chunk: int) -> GroupLayout:
        """A row for each chunk that a row of the step has tokens in."""
        first = rows.starts // chunk
        counts = (rows.ends - 1) // chunk - first + 1
        row_of = np.repeat(np.arange(len(counts)), counts)
        before = np.concatenate([np.zeros(1, dtype=np.int64), counts.cumsum()[:-1]])
        own = first[row_of] + np.arange(len(row_of)) - before[row_of]
        starts = np.maximum(rows.starts[row_of], own * chunk)
        ends = np.minimum(rows.ends[row_of], (own + 1) * chunk)
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), (ends - starts).cumsum()])
        parts = rows._replace(batch_slots=rows.batch_slots[row_of], starts=starts, ends=ends)
        return self._from(slots, bounds, parts)
