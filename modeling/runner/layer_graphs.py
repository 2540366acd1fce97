"""Captured entries and guesses of a layer beside the model (EAGLE-3, MTP).

Entries: one CUDA graph for each size of captured steps, behind the step's samples. It writes the
entries of the step's tokens, finds each row's last right sample on the device, and leaves what
guesses begin with: g and the position of that token. Rows are in the plan's order.

Guesses: one graph draws the first, one each of those behind it, so a chain is as many replays of
the same graph. Its position is on the device alone: the host sends the slots of all positions that
a chain may reach. Rows that sample with noise draw between the replays, from the graph's logits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.architectures.rope import POSITIONS_PER_SET
from configs.wire.plan import StepRow
from modeling.attention.base import AttentionBackend
from modeling.attention.kv_cache import LayerCache
from modeling.layers.fused import fused_ops
from modeling.models.draft_layer import DraftLayer, DraftStep
from modeling.runner.block_tables import GroupLayout, Ints
from modeling.runner.cuda_graphs import INT32_BYTES, INT64_BYTES, Record, size_for
from modeling.runner.input_batch import StepLayout
from modeling.transfer import TransferBuffer, aligned

Pages = npt.NDArray[np.int32]

Draw = Callable[[Tensor, int], Tensor]
"""From logits [m, vocab] of m rows and how many guesses came before to tokens int64 [m]."""


@dataclass(frozen=True)
class HeadParts:
    """What captured heads are made of.

    cache, backend: of their entries. tokens: the token buffer; dummy_token: of no request. states:
    where replays of the target leave the states that heads read, [samples, width]. dummy_page: of
    entries, of no request. pages: of the longest row. most: guesses.
    """

    heads: DraftLayer
    cache: LayerCache
    backend: AttentionBackend
    tokens: Tensor
    dummy_token: int
    states: Tensor
    dummy_page: int
    pages: int
    most: int

    @property
    def page_size(self) -> int:
        """Tokens of a page."""
        return self.backend.spec.page_size


class StaticRows:
    """The static buffer of a graph over rows of equal room: int64 columns, then attention's words.

    columns: each [rows, its width], with what padding has in it.
    """

    def __init__(
        self, parts: HeadParts, rows: int, queries: int, widths: Sequence[int], pages: int
    ) -> None:
        """widths: of the columns. pages: of the longest row."""
        self.rows, self.queries = rows, queries
        self._parts, self._widths = parts, tuple(widths)
        words = parts.backend.graph_words(rows, pages, queries)
        assert words is not None, parts.backend.name
        self._words = words
        *self._starts, self._words_at = np.cumsum(
            [0, *(aligned(rows * width * INT64_BYTES) for width in self._widths)]
        ).tolist()
        self.num_bytes = self._words_at + aligned(words * INT32_BYTES)

    def view(self, static: Tensor) -> list[Tensor]:
        """Return the columns in static device memory, uint8, and keep the attention over it."""
        end = self._words_at + self._words * INT32_BYTES
        words = static[self._words_at : end].view(torch.int32)
        self.attention = self._parts.backend.graph_form(self.rows, words, self.queries)
        bounds = torch.arange(self.rows + 1, dtype=torch.int32, device=static.device)
        self.bounds = bounds * self.queries
        return [
            static[at : at + self.rows * width * INT64_BYTES]
            .view(torch.int64)
            .view(self.rows, width)
            for at, width in zip(self._starts, self._widths, strict=True)
        ]

    def columns(self, host: npt.NDArray[np.uint8]) -> list[Ints]:
        """The columns in host memory."""
        return [
            host[at : at + self.rows * width * INT64_BYTES].view(np.int64).reshape(self.rows, width)
            for at, width in zip(self._starts, self._widths, strict=True)
        ]

    def write(
        self,
        host: npt.NDArray[np.uint8],
        keys: Ints,
        queries: Ints,
        tables: Pages,
        least: int,
    ) -> int:
        """Write the attention's words; returns how many bytes must reach the device.

        keys, queries, tables: of fewer rows than there are. least: keys of padding rows.
        """
        count, rows = len(keys), self.rows
        lengths = np.full(rows, least, dtype=np.int32)
        own = np.ones(rows, dtype=np.int32)
        lengths[:count], own[:count] = keys, queries
        width = max(tables.shape[1], -(-least // self._parts.page_size))
        pages = np.full((rows, width), self._parts.dummy_page, dtype=np.int32)
        pages[:count, : tables.shape[1]] = tables
        words = host[self._words_at : self._words_at + self._words * INT32_BYTES].view(np.int32)
        used: int = self.attention.write(words, lengths, pages, own)
        return int(self._words_at) + used * INT32_BYTES

    def step(self, slots: Tensor) -> DraftStep:
        """What the heads' layer reads; slots: int64 [rows * queries]."""
        none = torch.empty(self.rows, 0, dtype=torch.int32, device=slots.device)
        return DraftStep(self._parts.cache, slots, self.bounds, none, self.attention.step)


class ChainGraphs:
    """Guesses behind rows' last tokens.

    g: [rows, hidden]; positions: int64 [rows], of these tokens; what a chain begins with.
    """

    def __init__(
        self, parts: HeadParts, sizes: Sequence[int], most_rows: int, record: Record
    ) -> None:
        """sizes: of rows. most_rows: of what a chain may begin with."""
        device = parts.tokens.device
        self.unrecorded = sorted(sizes)
        self._parts, self._record = parts, record
        self._recorded: list[int] = []
        self._fused = fused_ops(device)
        most, heads = self.unrecorded[-1], parts.heads
        self.g = torch.zeros(most_rows, heads.width, dtype=heads.dtype, device=device)
        self.positions = torch.zeros(most_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(most, dtype=torch.int64, device=device)
        self._logits = torch.zeros(most, heads.vocab_size, dtype=heads.dtype, device=device)
        # A row's first column is where its slots begin; drafts are as long as chains at most.
        widths = (1, 2 * parts.most)
        self._rows = {
            size: StaticRows(parts, size, 1, widths, parts.pages) for size in self.unrecorded
        }
        self._staging = TransferBuffer(max(r.num_bytes for r in self._rows.values()), device)
        self._first: dict[int, Callable[[], None]] = {}
        self._next: dict[int, Callable[[], None]] = {}

    def record_next(self) -> None:
        """Record the largest size that is left."""
        size = self.unrecorded.pop()
        rows = self._rows[size]
        columns = rows.view(self._staging.device_bytes)
        self._send(rows, *_no_rows())
        self._first[size] = self._record(partial(self._draw, size))
        self.begin(self.g[:0], self.positions[:0])
        self._next[size] = self._record(partial(self._guess, rows, *columns))
        self._recorded.insert(0, size)

    def begin(self, g: Tensor, positions: Tensor) -> None:
        """Let chains begin behind tokens with g [m, hidden] at `positions`, int64 [m]."""
        # Padding rows begin at 0 again, or they would walk out of their pages.
        self.positions.zero_()
        self.g[: len(g)].copy_(g)
        self.positions[: len(positions)].copy_(positions)

    def size(self, num_rows: int) -> int | None:
        """Return the size that serves so many rows; None if none does yet."""
        return size_for(self._recorded, num_rows)

    def run(self, size: int, firsts: Ints, tables: Pages, count: int, draw: Draw | None) -> Tensor:
        """Guess `count` tokens for each row, int64 [m, count].

        firsts: [m], the positions at which a chain may begin, at most `most` less than it does.
        tables: int32 [m, pages], with scratch pages behind the rows' own. draw: None takes the
        best tokens.
        """
        self._send(self._rows[size], firsts, tables)
        found: list[Tensor] = []
        own = self._tokens[: len(firsts)]
        for ahead in range(count):
            (self._next if ahead else self._first)[size]()
            if draw is not None:
                own.copy_(draw(self._logits[: len(firsts)], ahead))
            found.append(own.clone())
        return torch.stack(found, dim=1)

    def _send(self, rows: StaticRows, firsts: Ints, tables: Pages) -> None:
        """Send where a chain's slots and pages are; padding stays in the dummy page."""
        size, most, count = self._parts.page_size, self._parts.most, len(firsts)
        _, host = self._staging.begin()
        starts, slots = rows.columns(host)
        starts[:], slots[:] = 1, self._parts.dummy_page * size
        starts[:count, 0] = firsts + 1
        at = firsts[:, None] + 1 + np.arange(2 * most)
        # Positions behind the tables are never reached. Padding rows reach `most`, and two more
        # while they are recorded.
        columns = np.minimum(at // size, max(1, tables.shape[1]) - 1)
        slots[:count] = np.take_along_axis(tables, columns, axis=1) * size + at % size
        longest = np.minimum(firsts + 2 * most, tables.shape[1] * size)
        used = rows.write(host, longest, np.ones_like(firsts), tables, most + 3)
        self._staging.send(used)
        self._staging.sent()

    def _draw(self, size: int) -> None:
        """Draw the best tokens behind g."""
        logits = self._parts.heads.logits(self.g[:size])
        self._logits[:size].copy_(logits)
        best = self._fused.best(logits) if self._fused else logits.argmax(dim=-1)
        self._tokens[:size].copy_(best)

    def _guess(self, rows: StaticRows, starts: Tensor, slots: Tensor) -> None:
        """Make the entries of the tokens that were drawn last, and draw those behind them."""
        size, lengths = rows.rows, rows.attention.key_lengths
        assert lengths is not None, self._parts.backend.name
        at = self.positions[:size]
        # First of all: attention's kernel may read lengths before the kernel in front of it ends.
        at += 1
        lengths.copy_(at + 1)
        own = slots.gather(1, at[:, None] - starts)[:, 0]
        step, heads = rows.step(own), self._parts.heads
        self.g[:size].copy_(heads(self._tokens[:size], at, self.g[:size], step))
        self._draw(size)


class EntryGraphs:
    """Entries of captured steps, with room for `queries` tokens a row."""

    def __init__(
        self,
        parts: HeadParts,
        chain: ChainGraphs,
        queries: int,
        sizes: Sequence[int],
        record: Record,
    ) -> None:
        """sizes: of rows."""
        self.queries = queries
        self.unrecorded = sorted(sizes)
        self._parts, self._chain, self._record = parts, chain, record
        widths = (queries,) * 4 + (queries - 1,)
        self._rows = {size: StaticRows(parts, size, queries, widths, parts.pages) for size in sizes}
        device = parts.tokens.device
        self._staging = TransferBuffer(max(r.num_bytes for r in self._rows.values()), device)
        self._recorded: list[int] = []
        self._replays: dict[int, Callable[[], None]] = {}

    def record_next(self) -> None:
        """Record the largest size that is left."""
        size = self.unrecorded.pop()
        rows = self._rows[size]
        columns = rows.view(self._staging.device_bytes)
        self._send(rows, (), StepLayout.empty(), GroupLayout.empty())
        self._replays[size] = self._record(partial(self._compute, rows, *columns))
        self._recorded.insert(0, size)

    def run(self, rows: Sequence[StepRow], layout: StepLayout, group: GroupLayout) -> bool:
        """Write the entries of a step that was replayed, and begin a chain behind each row.

        group: of the entries. Returns False where no graph serves the step.
        """
        size = size_for(self._recorded, len(rows))
        if size is None or not 1 <= layout.most_queries <= self.queries:
            return False
        self._send(self._rows[size], rows, layout, group)
        self._replays[size]()
        return True

    def _send(
        self, own: StaticRows, rows: Sequence[StepRow], layout: StepLayout, group: GroupLayout
    ) -> None:
        """Send a step, each row at a multiple of its room."""
        _, host = self._staging.begin()
        dummy = self._parts.dummy_token, 0, self._parts.dummy_page * self._parts.page_size, 0, -1
        *columns, drafts = own.columns(host)
        for column, padding in zip((*columns, drafts), dummy, strict=True):
            column[:] = padding
        counts = np.array([row.num_samples for row in rows], dtype=np.int64)
        firsts = counts.cumsum() - counts
        samples = np.arange(len(layout.last_tokens))
        row_of = np.repeat(np.arange(len(rows)), counts)
        at, source = (row_of, samples - firsts[row_of]), layout.last_tokens
        filled = layout.ids_at[source] + 1, layout.positions[source], group.slots[source], samples
        for column, values in zip(columns, filled, strict=True):
            column[at] = values
        for index, row in enumerate(rows):
            drafts[index, : len(row.drafts)] = row.drafts
        order = np.searchsorted(group.bounds, source[firsts], side="right") - 1
        used = own.write(host, group.key_lengths[order], counts, group.tables[order], 1)
        self._staging.send(used)
        self._staging.sent()

    def _compute(
        self,
        rows: StaticRows,
        ids_at: Tensor,
        positions: Tensor,
        slots: Tensor,
        samples: Tensor,
        drafts: Tensor,
    ) -> None:
        """Write entries, and begin behind each row's last right sample."""
        parts, heads = self._parts, self._parts.heads
        following = parts.tokens[ids_at]
        states = heads.from_target(parts.states[samples.flatten()])
        step = rows.step(slots.flatten())
        g = heads(following.flatten(), positions.flatten(), states, step)
        right = (following[:, : self.queries - 1] == drafts).cumprod(1).sum(1)
        last = torch.arange(rows.rows, device=g.device) * self.queries + right
        self._chain.begin(g[last], positions.flatten()[last] % POSITIONS_PER_SET)


class LayerGraphs:
    """All captured entries and guesses of a runner's heads."""

    def __init__(
        self,
        parts: HeadParts,
        sizes: Sequence[tuple[int, Sequence[int]]],
        chains: Sequence[int],
        record: Record,
    ) -> None:
        """sizes: of rows, for each room of captured steps. chains: of rows that guess."""
        most_rows = max(*(max(rows) for _, rows in sizes), *chains)
        self.chain = ChainGraphs(parts, chains, most_rows, record)
        self._entries = [EntryGraphs(parts, self.chain, *each, record) for each in sizes]

    @property
    def all(self) -> tuple[ChainGraphs | EntryGraphs, ...]:
        """In the order in which they are recorded."""
        return (self.chain, *self._entries)

    def run_entries(self, rows: Sequence[StepRow], layout: StepLayout, group: GroupLayout) -> bool:
        """See `EntryGraphs.run`; with the least room."""
        return any(each.run(rows, layout, group) for each in self._entries)


def _no_rows() -> tuple[Ints, Pages]:
    return np.zeros(0, dtype=np.int64), np.zeros((0, 0), dtype=np.int32)
