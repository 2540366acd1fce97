"""What a rank keeps for each batch slot, and how a step's rows become its input tensors.

The token buffer is on the device: a step reads its input ids there and writes its samples there,
so the next step may use a token before the host has seen it. Block tables are on the host, where
cache slots are computed from them; a step sends the rows that it uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from configs.architectures.rope import POSITIONS_PER_SET
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.runner.block_tables import BatchSize, BlockTables, GroupLayout, Ints, StepRows
from modeling.sampling.grammars import Grammars
from modeling.sampling.history import TokenHistory
from modeling.sampling.prompt_scores import PromptRow
from modeling.transfer import pack_to_device, to_device


@dataclass(frozen=True)
class StepLayout:
    """One step on the host: T tokens in n rows, which sample s tokens; int64 unless said.

    Rows of one token come first, in the plan's order, then the others in theirs. What belongs to
    samples stays in the plan's order throughout.

    ids_at: [T], the inputs' indices in the flat token buffer.
    positions: [T], with each row's rope set (p + set * POSITIONS_PER_SET).
    bounds: [n + 1], where rows start.
    row_slots, row_starts: [n], the rows' batch slots, and their first positions.
    groups: the same for each KV group's attention.
    last_tokens: [s], the tokens among the T at which rows sample: a row's last one, and before it
    as many as it has drafts.
    targets: [s], the samples' indices in the flat token buffer.
    sampling: the s samples' parameters.
    sample_positions: the s samples' positions in their sequences.
    adapter_slots, adapter_lengths: of runs of tokens in their order, -1 for the base model; one run
    for each row, two where an activated adapter begins within it.
    prompt_lengths: [s]; None where no sample looks at the tokens before it.
    prompt_rows: the rows that report on their prompts.
    row_keeps: [n], as `StepRow.keeps` has them; () for no row.
    """

    ids_at: Ints
    positions: Ints
    bounds: Ints
    row_slots: Ints
    row_starts: Ints
    groups: tuple[GroupLayout, ...]
    last_tokens: Ints
    targets: Ints
    sampling: list[Sampling]
    sample_positions: list[int]
    adapter_slots: list[int]
    adapter_lengths: list[int]
    prompt_lengths: Ints | None = None
    prompt_rows: Sequence[PromptRow] = ()
    row_keeps: Sequence[tuple[tuple[int, int], ...]] = ()

    @property
    def num_rows(self) -> int:
        """How many requests take part."""
        return max(0, len(self.bounds) - 1)

    @property
    def most_queries(self) -> int:
        """Tokens of the longest row, if each token of the step samples the next one; else 0."""
        if len(self.positions) != len(self.targets):
            return 0
        return int(np.diff(self.bounds).max(initial=0))

    @property
    def read(self) -> Ints:
        """Indices of the tokens that the head reads, ascending."""
        return np.arange(len(self.positions)) if self.prompt_rows else np.sort(self.last_tokens)

    @property
    def tail(self) -> "StepLayout":
        """The tokens that are read as a step of their own; it samples what this one does."""
        if self.prompt_rows:
            return self
        read = self.read
        slots = np.repeat(np.array(self.adapter_slots), self.adapter_lengths)[read]
        rows = np.searchsorted(self.bounds, read, side="right") - 1
        used, lengths = np.unique(rows, return_counts=True)
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        return replace(
            self,
            ids_at=self.ids_at[read],
            positions=self.positions[read],
            bounds=bounds,
            row_slots=self.row_slots[used],
            row_starts=self.row_starts[used] + np.diff(self.bounds)[used] - lengths,
            groups=tuple(group.ends(read, used, bounds) for group in self.groups),
            last_tokens=np.searchsorted(read, self.last_tokens),
            adapter_slots=slots.tolist(),
            adapter_lengths=[1] * len(slots),
            row_keeps=(),
        )

    @classmethod
    def empty(cls, num_groups: int = 1) -> "StepLayout":
        """A step without rows: a captured step over it consists of padding rows alone."""
        none = np.zeros(0, dtype=np.int64)
        groups = (GroupLayout.empty(),) * num_groups
        return cls(none, none, none, none, none, groups, none, none, [], [], [], [])


@dataclass(frozen=True)
class GroupTensors:
    """What the layers of one KV group read; see GroupLayout. cu_seqlens: its bounds, int32."""

    slots: Tensor
    cu_seqlens: Tensor
    block_tables: Tensor


@dataclass(frozen=True)
class StepTensors:
    """What a model reads, on the device; see StepLayout.

    input_ids: [T], the tokens themselves.
    """

    input_ids: Tensor
    positions: Tensor
    groups: tuple[GroupTensors, ...]
    last_tokens: Tensor


@dataclass(frozen=True)
class StepInputs(StepTensors):
    """One step's tensors, and its layout on the host.

    group_lengths: the query lengths and the key lengths of each KV group's rows.
    """

    layout: StepLayout
    targets: Tensor
    group_lengths: tuple[tuple[list[int], list[int]], ...]

    @property
    def tokens_read(self) -> Tensor:
        """Indices of the tokens that the head reads: all where rows report on their prompts."""
        if self.layout.prompt_rows:
            return torch.arange(len(self.input_ids), device=self.input_ids.device)
        return self.last_tokens


class InputBatch:
    """Token buffer, block tables, adapter slots and sampling parameters of all batch slots."""

    def __init__(
        self, size: BatchSize, device: torch.device, grammars: Grammars | None = None
    ) -> None:
        self._grammars = grammars
        self.size = size
        self._device = device
        # One more than the longest sequence: its last token is sampled and never computed.
        self._width = size.max_total_tokens + 1
        # One token more than all slots: padding rows of captured steps write their samples there.
        self.dummy_token = size.max_running * self._width
        self.tokens = torch.zeros(self.dummy_token + 1, dtype=torch.int64, device=device)
        strides = size.strides or (1,) * len(size.groups)
        self.tables = tuple(map(BlockTables, size.groups, strides, [size] * len(strides)))
        self._adapter_slots = np.full(size.max_running, -1, dtype=np.int64)
        self._active_from = np.zeros(size.max_running, dtype=np.int64)
        self._sampling = [Sampling()] * size.max_running
        self._adjusted = np.zeros(size.max_running, dtype=np.bool_)
        self._about_prompt = np.zeros(size.max_running, dtype=np.bool_)
        self._prompt_lengths = np.zeros(size.max_running, dtype=np.int64)

    def join(self, joins: Sequence[RequestJoin]) -> None:
        """Give each request its batch slot, with its tokens and an empty block table."""
        for join in joins:
            count = len(join.tokens)
            assert 0 <= join.batch_slot < self.size.max_running, join.batch_slot
            assert 1 <= count <= self.size.max_total_tokens, (join.batch_slot, count)
            first = join.batch_slot * self._width
            tokens = to_device(np.array(join.tokens, dtype=np.int64), self._device)
            self.tokens[first : first + count].copy_(tokens, non_blocking=True)
            for tables in self.tables:
                tables.clear(join.batch_slot)
            self._adapter_slots[join.batch_slot] = join.adapter_slot
            self._active_from[join.batch_slot] = join.active_from
            self._sampling[join.batch_slot] = join.sampling
            self._adjusted[join.batch_slot] = join.sampling.adjusted
            self._about_prompt[join.batch_slot] = join.sampling.about_prompt
            self._prompt_lengths[join.batch_slot] = join.prompt_length
            if self._grammars is not None:
                answer = join.tokens[join.prompt_length :]
                self._grammars.join(join.batch_slot, join.matcher, answer, join.sampling)

    def write_drafts(self, rows: Sequence[StepRow]) -> None:
        """Write the rows' drafts where the step reads its input ids; grammars mask them."""
        if self._grammars is not None:
            self._grammars.expect(rows, self._prompt_lengths)
        drafts = [token for row in rows for token in row.drafts]
        if drafts:
            ends = [row.batch_slot * self._width + row.start + row.length for row in rows]
            at = [
                end - behind
                for end, row in zip(ends, rows, strict=True)
                for behind in range(len(row.drafts), 0, -1)
            ]
            self.write(*pack_to_device([np.array(at), np.array(drafts)], self._device))

    def layout(self, rows: Sequence[StepRow]) -> StepLayout:
        """Append the rows' blocks to their tables and lay the step out."""
        self.append_blocks(rows)
        batch_slots = np.array([row.batch_slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        rope_sets = np.array([row.rope_set for row in rows], dtype=np.int64)
        counts = np.array([row.num_samples for row in rows], dtype=np.int64)
        # A row with a draft samples at its last positions, others at the last one alone.
        sampled = np.repeat(np.arange(len(rows)), counts)
        before_end = counts.cumsum()[sampled] - 1 - np.arange(len(sampled))
        ends = starts + lengths
        self._check(batch_slots, starts, ends)
        sampling_slots, sampled_at = batch_slots[sampled], ends[sampled] - before_end
        targets = sampling_slots * self._width + sampled_at
        sampling = [self._sampling[slot] for slot in sampling_slots.tolist()]
        adjusted = self._adjusted[sampling_slots].any()
        prompt_lengths = self._prompt_lengths[sampling_slots] if adjusted else None
        about_prompt = np.flatnonzero(self._about_prompt[batch_slots])
        # Attention backends take leading rows of one token as decode rows.
        order = np.argsort(lengths > 1, kind="stable")
        now_at = np.empty_like(order)
        now_at[order] = np.arange(len(order))
        columns = (batch_slots, starts, lengths, ends, rope_sets)
        batch_slots, starts, lengths, ends, rope_sets = (column[order] for column in columns)
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[row_of]
        step = StepRows(batch_slots, starts, ends, bounds, batch_slots[row_of], positions)
        adapter_slots, adapter_lengths = self._adapter_runs(batch_slots, starts, ends)
        return StepLayout(
            ids_at=step.slot_of * self._width + positions,
            positions=positions + (rope_sets * POSITIONS_PER_SET)[row_of],
            bounds=bounds,
            row_slots=batch_slots,
            row_starts=starts,
            groups=tuple(tables.layout(step) for tables in self.tables),
            last_tokens=bounds[1:][now_at[sampled]] - 1 - before_end,
            targets=targets,
            row_keeps=[rows[index].keeps for index in order.tolist()],
            sampling=sampling,
            sample_positions=sampled_at.tolist(),
            adapter_slots=adapter_slots,
            adapter_lengths=adapter_lengths,
            prompt_lengths=prompt_lengths,
            prompt_rows=[
                found
                for index in about_prompt.tolist()
                if (found := self._prompt_row(index, rows[index], int(bounds[now_at[index]])))
            ],
        )

    def inputs(self, layout: StepLayout) -> StepInputs:
        """Send a step to the device, in one transfer."""
        groups = [
            part
            for group in layout.groups
            for part in (group.slots, group.bounds.astype(np.int32), group.tables)
        ]
        ids_at, positions, last_tokens, targets, *parts = pack_to_device(
            [layout.ids_at, layout.positions, layout.last_tokens, layout.targets, *groups],
            self._device,
        )
        return StepInputs(
            input_ids=self.tokens[ids_at],
            positions=positions,
            groups=tuple(
                GroupTensors(*parts[first : first + 3]) for first in range(0, len(parts), 3)
            ),
            last_tokens=last_tokens,
            layout=layout,
            targets=targets,
            group_lengths=tuple(
                (np.diff(group.bounds).tolist(), group.key_lengths.tolist())
                for group in layout.groups
            ),
        )

    def _adapter_runs(
        self, batch_slots: Ints, starts: Ints, ends: Ints
    ) -> tuple[list[int], list[int]]:
        """The rows' adapters and lengths; a row in which one becomes active is two runs."""
        slots, lengths = self._adapter_slots[batch_slots], ends - starts
        active_from = self._active_from[batch_slots]
        if not (active_from > starts).any():
            return slots.tolist(), lengths.tolist()
        before = np.clip(active_from - starts, 0, lengths)
        runs = np.stack((np.full_like(slots, -1), slots), axis=1).ravel()
        counts = np.stack((before, lengths - before), axis=1).ravel()
        used = counts > 0
        return runs[used].tolist(), counts[used].tolist()

    def adapters_of(self, rows: Sequence[StepRow]) -> Ints:
        """The rows' adapter slots, -1 for the base model."""
        slots: Ints = self._adapter_slots[[row.batch_slot for row in rows]]
        return slots

    def history(self, layout: StepLayout) -> TokenHistory | None:
        """Where the samples' own tokens are; None where no sample looks at them."""
        if layout.prompt_lengths is None:
            return None
        batch_slots = layout.targets // self._width
        return TokenHistory(
            self.tokens, layout.targets, layout.prompt_lengths, batch_slots, self._grammars
        )

    def write(self, targets: Tensor, tokens: Tensor) -> None:
        """Write a step's samples to the token buffer, where the next step reads them."""
        self.tokens[targets] = tokens

    def sampled(self, layout: StepLayout, targets: Tensor, tokens: Tensor) -> None:
        """Write a step's samples to the token buffer, and advance their grammars' matchers."""
        self.write(targets, tokens)
        if self._grammars is not None and layout.prompt_lengths is not None:
            self._grammars.advance((layout.targets // self._width).tolist(), tokens)

    def _prompt_row(self, index: int, row: StepRow, at: int) -> PromptRow | None:
        """Return what a row reports about its prompt; None where nothing is left to report."""
        found = PromptRow(
            row=index,
            batch_slot=row.batch_slot,
            at=at,
            known_at=row.batch_slot * self._width + row.start,
            start=row.start,
            end=row.start + row.length,
            prompt_length=int(self._prompt_lengths[row.batch_slot]),
            sampling=self._sampling[row.batch_slot],
            adapter_slot=int(self._adapter_slots[row.batch_slot]),
        )
        return found if found.num_scored or found.pools else None

    def append_blocks(self, rows: Sequence[StepRow]) -> None:
        """Append the rows' blocks to their tables."""
        for row in rows:
            first, end = 0, row.start + row.length
            if row.blocks:
                for tables in self.tables:
                    last = first + tables.lacking(row.batch_slot, end)
                    tables.append(row.batch_slot, row.blocks[first:last])
                    first = last
            assert first == len(row.blocks), f"not the blocks that a row needs: {row}"

    def _check(self, batch_slots: Ints, starts: Ints, ends: Ints) -> None:
        """Assert that every row computes something, within its table and the longest sequence."""
        assert ((starts >= 0) & (starts < ends)).all(), (starts, ends)
        assert (ends <= self.size.max_total_tokens).all(), (batch_slots, ends, self.size)
        assert np.bincount(batch_slots).max() == 1, f"a batch slot twice in a step: {batch_slots}"
