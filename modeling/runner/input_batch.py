"""What a rank keeps for each place, and how a step's rows become its input tensors.

The token buffer lives on the device: a step reads its input ids there and leaves its samples
there, so the next step may name a token before the host has seen it. Block tables live on the
host, where slots are computed from them; a step ships the rows that it uses.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from configs.architectures.rope import POSITIONS_PER_SET
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.sampling.grammars import Grammars
from modeling.sampling.history import TokenHistory
from modeling.sampling.prompt_scores import PromptRow
from modeling.transfer import pack_to_device, to_device

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class BatchSize:
    """How many places there are, and how long a sequence may get in tokens."""

    max_running: int
    max_total_tokens: int
    block_size: int

    @property
    def max_blocks(self) -> int:
        """Blocks of the longest sequence."""
        return -(-self.max_total_tokens // self.block_size)


@dataclass(frozen=True)
class StepLayout:
    """One step on the host: T tokens in n rows, of which s sample; int64 unless said.

    Rows of one token come first, in the plan's order, then the others in theirs; what belongs to
    samples stays in the plan's order throughout.

    ids_at: [T], where in the flat token buffer the inputs lie. positions: [T], with each row's rope
    set (p + set * POSITIONS_PER_SET). slots: [T], block * block_size + offset. bounds: [n + 1],
    where rows start. tables: int32 [n, most blocks used]. key_lengths: [n], after this step.
    last_tokens: [s], the sampling rows' last tokens among the T. targets: [s], where in the flat
    token buffer the samples go. sampling: s parameters. sample_positions: s positions of the tokens
    to be. adapter_slots: n, -1 for the base model. prompt_lengths: [s], None where no sample looks
    at the tokens before it. prompt_rows: the rows that tell about their prompts.
    """

    ids_at: Ints
    positions: Ints
    slots: Ints
    bounds: Ints
    tables: npt.NDArray[np.int32]
    key_lengths: Ints
    last_tokens: Ints
    targets: Ints
    sampling: list[Sampling]
    sample_positions: list[int]
    adapter_slots: list[int]
    prompt_lengths: Ints | None = None
    prompt_rows: Sequence[PromptRow] = ()

    @property
    def num_rows(self) -> int:
        """How many requests take part."""
        return len(self.key_lengths)

    @property
    def decodes(self) -> bool:
        """Whether every row computes one token and samples the next."""
        return len(self.positions) == self.num_rows == len(self.targets)

    @classmethod
    def empty(cls) -> "StepLayout":
        """A step of nobody: what is left of a captured one when all its rows are padding."""
        none = np.zeros(0, dtype=np.int64)
        tables = np.zeros((0, 0), dtype=np.int32)
        return cls(none, none, none, none, tables, none, none, none, [], [], [])


@dataclass(frozen=True)
class StepTensors:
    """What a model reads, on the device; see StepLayout.

    input_ids: [T], the tokens themselves. cu_seqlens: int32 [n + 1]. block_tables: int32.
    """

    input_ids: Tensor
    positions: Tensor
    slots: Tensor
    cu_seqlens: Tensor
    block_tables: Tensor
    last_tokens: Tensor


@dataclass(frozen=True)
class StepInputs(StepTensors):
    """One step's tensors, and what of the layout the host still needs."""

    targets: Tensor
    query_lengths: list[int]
    key_lengths: list[int]
    sampling: list[Sampling]
    sample_positions: list[int]
    adapter_slots: list[int]


class InputBatch:
    """Token buffer, block tables, adapter slots and sampling parameters of all places."""

    def __init__(
        self, size: BatchSize, device: torch.device, grammars: Grammars | None = None
    ) -> None:
        """Allocate everything; nobody has joined."""
        self._grammars = grammars
        self.size = size
        self._device = device
        # One more than the longest sequence: its last token is sampled and never computed.
        self._width = size.max_total_tokens + 1
        # One place more, of one token: where padding rows of captured steps leave theirs.
        self.dummy_token = size.max_running * self._width
        self.tokens = torch.zeros(self.dummy_token + 1, dtype=torch.int64, device=device)
        self._blocks = np.zeros((size.max_running, size.max_blocks), dtype=np.int32)
        self._num_blocks = np.zeros(size.max_running, dtype=np.int64)
        self._adapter_slots = np.full(size.max_running, -1, dtype=np.int64)
        self._sampling = [Sampling()] * size.max_running
        self._adjusted = np.zeros(size.max_running, dtype=np.bool_)
        self._about_prompt = np.zeros(size.max_running, dtype=np.bool_)
        self._prompt_lengths = np.zeros(size.max_running, dtype=np.int64)

    def join(self, joins: Sequence[RequestJoin]) -> None:
        """Give each request its place, with its tokens and an empty block table."""
        for join in joins:
            count = len(join.tokens)
            assert 0 <= join.batch_slot < self.size.max_running, join.batch_slot
            assert 1 <= count <= self.size.max_total_tokens, (join.batch_slot, count)
            first = join.batch_slot * self._width
            tokens = to_device(np.array(join.tokens, dtype=np.int64), self._device)
            self.tokens[first : first + count].copy_(tokens, non_blocking=True)
            self._num_blocks[join.batch_slot] = 0
            self._adapter_slots[join.batch_slot] = join.adapter_slot
            self._sampling[join.batch_slot] = join.sampling
            self._adjusted[join.batch_slot] = join.sampling.adjusted
            self._about_prompt[join.batch_slot] = join.sampling.about_prompt
            self._prompt_lengths[join.batch_slot] = join.prompt_length
            if self._grammars is not None:
                answer = join.tokens[join.prompt_length :]
                self._grammars.join(join.batch_slot, join.matcher, answer)

    def layout(self, rows: Sequence[StepRow]) -> StepLayout:
        """Append the rows' blocks to their tables and lay the step out."""
        self._append_blocks(rows)
        places = np.array([row.batch_slot for row in rows], dtype=np.int64)
        starts = np.array([row.start for row in rows], dtype=np.int64)
        lengths = np.array([row.length for row in rows], dtype=np.int64)
        rope_sets = np.array([row.rope_set for row in rows], dtype=np.int64)
        sampled = np.flatnonzero([row.samples for row in rows])
        ends = starts + lengths
        self._check(places, starts, ends)
        targets = places[sampled] * self._width + ends[sampled]
        sampling = [self._sampling[place] for place in places[sampled].tolist()]
        sample_positions = ends[sampled].tolist()
        seats = places[sampled]
        prompt_lengths = self._prompt_lengths[seats] if self._adjusted[seats].any() else None
        asking = np.flatnonzero(self._about_prompt[places])
        order = np.argsort(lengths > 1, kind="stable")
        now_at = np.empty_like(order)
        now_at[order] = np.arange(len(order))
        columns = (places, starts, lengths, ends, rope_sets)
        places, starts, lengths, ends, rope_sets = (column[order] for column in columns)
        bounds = np.concatenate([np.zeros(1, dtype=np.int64), lengths.cumsum()])
        row_of = np.repeat(np.arange(len(rows)), lengths)
        positions = np.arange(bounds[-1]) + (starts - bounds[:-1])[row_of]
        place_of = places[row_of]
        block_size = self.size.block_size
        blocks = self._blocks[place_of, positions // block_size].astype(np.int64)
        return StepLayout(
            ids_at=place_of * self._width + positions,
            positions=positions + (rope_sets * POSITIONS_PER_SET)[row_of],
            slots=blocks * block_size + positions % block_size,
            bounds=bounds,
            tables=self._blocks[places, : -(-int(ends.max()) // block_size)],
            key_lengths=ends,
            last_tokens=bounds[1:][now_at[sampled]] - 1,
            targets=targets,
            sampling=sampling,
            sample_positions=sample_positions,
            adapter_slots=self._adapter_slots[places].tolist(),
            prompt_lengths=prompt_lengths,
            prompt_rows=[
                told
                for index in asking.tolist()
                if (told := self._prompt_row(index, rows[index], int(bounds[now_at[index]])))
            ],
        )

    def inputs(self, layout: StepLayout) -> StepInputs:
        """Send a step to the device, in one transfer."""
        ids_at, positions, slots, last_tokens, targets, cu_seqlens, tables = pack_to_device(
            [
                layout.ids_at,
                layout.positions,
                layout.slots,
                layout.last_tokens,
                layout.targets,
                layout.bounds.astype(np.int32),
                layout.tables,
            ],
            self._device,
        )
        return StepInputs(
            input_ids=self.tokens[ids_at],
            positions=positions,
            slots=slots,
            cu_seqlens=cu_seqlens,
            block_tables=tables,
            last_tokens=last_tokens,
            targets=targets,
            query_lengths=np.diff(layout.bounds).tolist(),
            key_lengths=layout.key_lengths.tolist(),
            sampling=layout.sampling,
            sample_positions=layout.sample_positions,
            adapter_slots=layout.adapter_slots,
        )

    def history(self, layout: StepLayout) -> TokenHistory | None:
        """Where the samples' own tokens lie; None where no sample looks at them."""
        if layout.prompt_lengths is None:
            return None
        places = layout.targets // self._width
        return TokenHistory(
            self.tokens, layout.targets, layout.prompt_lengths, places, self._grammars
        )

    def write(self, targets: Tensor, tokens: Tensor) -> None:
        """Leave a step's samples in the token buffer, where the next step finds them."""
        self.tokens[targets] = tokens

    def sampled(self, layout: StepLayout, targets: Tensor, tokens: Tensor) -> None:
        """Leave a step's samples in the token buffer, and let grammars follow those they hold."""
        self.write(targets, tokens)
        if self._grammars is not None and layout.prompt_lengths is not None:
            self._grammars.advance((layout.targets // self._width).tolist(), tokens)

    def _prompt_row(self, index: int, row: StepRow, at: int) -> PromptRow | None:
        """What a row tells about its prompt, None where that is nothing any more."""
        told = PromptRow(
            row=index,
            batch_slot=row.batch_slot,
            at=at,
            known_at=row.batch_slot * self._width + row.start,
            start=row.start,
            end=row.start + row.length,
            prompt_length=int(self._prompt_lengths[row.batch_slot]),
            sampling=self._sampling[row.batch_slot],
        )
        return told if told.num_scored or told.pools else None

    def _append_blocks(self, rows: Sequence[StepRow]) -> None:
        for row in rows:
            if row.blocks:
                first = self._num_blocks[row.batch_slot]
                last = first + len(row.blocks)
                assert last <= self.size.max_blocks, (row, first, self.size)
                self._blocks[row.batch_slot, first:last] = row.blocks
                self._num_blocks[row.batch_slot] = last

    def _check(self, places: Ints, starts: Ints, ends: Ints) -> None:
        """Assert that every row computes something, within its table and the longest sequence."""
        assert ((starts >= 0) & (starts < ends)).all(), (starts, ends)
        assert (ends <= self.size.max_total_tokens).all(), (places, ends, self.size)
        room = self._num_blocks[places] * self.size.block_size
        assert (ends <= room).all(), f"rows beyond their block tables: {places[ends > room]}"
        assert np.bincount(places).max() == 1, f"a place twice in one step: {places}"
