"""Captured decode steps: one CUDA graph for each of a dozen batch sizes, base and with adapters.

Steps that check drafts are captured alike: each row has room for as many tokens. A graph replays
the same launches at the same addresses, so all that varies is in static buffers: one packed
transfer brings a step's tables, the attention's plan and the adapters' tiles follow, then the
replay. A step of fewer rows than the graph's is filled up with padding rows of one key, and a row
with room for more tokens with padding tokens. These read and write the dummy block, which no
request owns, and their samples go to the token buffer's dummy token. Recurrent layers read and
write the states of the dummy batch slot for them; steps in which a row begins are launched there.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import partial
from typing import NamedTuple, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionBackend, GraphAttention
from modeling.layers.fused import fused_ops
from modeling.models.context import StateRows
from modeling.runner.block_tables import BlockTables, GroupLayout
from modeling.runner.forward import StepPlans
from modeling.runner.input_batch import GroupTensors, InputBatch, StepLayout, StepTensors
from modeling.transfer import TransferBuffer, aligned

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Rows of captured steps; a step takes the next larger one."""

INT64_BYTES, INT32_BYTES = 8, 4

COLUMNS = 5
"""Of a step: where its ids are, positions, targets, sampling tokens, the rows' batch slots. Each
group's slots follow."""

HeadForward = Callable[
    [StepTensors, StepPlans, AdapterData | None, tuple[StateRows, ...]],
    tuple[Tensor, Tensor | None],
]
"""From a step's tensors, planned attention, adapters and rows of recurrent layers to logits
[samples, vocab], and to the states [samples, width] that they are of, where heads read those."""

Record = Callable[[Callable[[], None]], Callable[[], None]]
"""From a computation on fixed addresses to its replay."""


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """The sizes of captured steps, ascending; the last one holds all batch slots, up to 256."""
    most = min(max_running, SIZES[-1])
    return (*(size for size in SIZES if size < most), most)


def size_for(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest size that holds the rows; None when there is none."""
    return next((size for size in sizes if num_rows <= size), None)


class StepAdapters(IntEnum):
    """What the adapters of a captured step change: nothing, all but experts, or these too."""

    NONE = 0
    OTHERS = 1
    EXPERTS = 2

    @classmethod
    def captured(cls, adapters: AdapterStepPlan | None, has_experts: bool) -> tuple[Self, ...]:
        """Return those of which steps are captured; see `GraphParts`."""
        most = cls.EXPERTS if has_experts else cls.OTHERS
        return tuple(cls)[: 1 + (most if adapters else 0)]

    @classmethod
    def of(cls, slots: Sequence[int], with_experts: bool) -> Self:
        """Return what a step's adapters change. with_experts: whether some change experts."""
        return cls.EXPERTS if with_experts else cls.OTHERS if max(slots) >= 0 else cls.NONE


@dataclass(frozen=True)
class GraphParts:
    """What captured steps are made of.

    forward: from a step's tensors to logits and states.
    backends: the attention of each KV group.
    state: the batch slots that steps read and write.
    dummy_block: a cache block that no request owns.
    vocab_size, logits_dtype: of the logits.
    adapters: None where steps with adapters are not captured.
    has_experts: whether those are that have adapters of experts.
    queries: tokens that each row has room for; more than 1 in steps that check drafts.
    width: of the states; 0 where no heads read them.
    is_recurrent: whether layers keep states of the rows' batch slots.
    """

    forward: HeadForward
    backends: Sequence[AttentionBackend]
    state: InputBatch
    dummy_block: int
    vocab_size: int
    logits_dtype: torch.dtype
    adapters: AdapterStepPlan | None
    queries: int = 1
    width: int = 0
    has_experts: bool = False
    is_recurrent: bool = False


@dataclass(frozen=True)
class GraphOutput:
    """What a replay computed; the next replay overwrites it. Padding is cut off.

    tokens: int64 [s], each sample's greedy token.
    logits: [s, vocab].
    targets: int64 [s], as in StepLayout.
    written: whether the tokens are in the token buffer already. Not where drafts are: a sample
    behind them may look at them.
    states: [s, width], from which the logits are made; None where no heads read them.
    """

    tokens: Tensor
    logits: Tensor
    targets: Tensor
    written: bool
    states: Tensor | None = None


@dataclass(frozen=True)
class PaddedGroup:
    """One KV group's part of a step of one size.

    tables: of the group. rows: of the size. slots: int64 [tokens], a view of the static buffer.
    words_at, words_end: where the attention's words are in the static buffer, in bytes.
    """

    tables: BlockTables
    rows: int
    slots: Tensor
    attention: GraphAttention
    words_at: int
    words_end: int

    def fill(self, host: npt.NDArray[np.uint8], layout: GroupLayout, dummy_block: int) -> int:
        """Write the attention's words, padded; returns where those that count end."""
        rows, size = len(layout.key_lengths), self.rows
        key_lengths, query_lengths = np.ones((2, size), dtype=np.int32)
        key_lengths[:rows] = layout.key_lengths
        query_lengths[:rows] = np.diff(layout.bounds)
        width = max(1, layout.tables.shape[1])
        dummy_page = dummy_block * self.tables.stride
        tables = np.full((size, width), dummy_page, dtype=np.int32)
        tables[:rows, : layout.tables.shape[1]] = layout.tables
        words = host[self.words_at : self.words_end].view(np.int32)
        used = self.attention.write(words, key_lengths, tables, query_lengths)
        return self.words_at + used * INT32_BYTES


class PaddedStep:
    """One size's part of the static buffer: how a layout is written there, and the views of it."""

    def __init__(self, parts: GraphParts, size: int, static: Tensor) -> None:
        """size: rows. static: uint8 on the device, at least `step_bytes` of them."""
        self.size = size
        self.tokens = size * parts.queries
        self._queries = parts.queries
        self._dummy_block = parts.dummy_block
        tables = parts.state.tables
        # What padding has in the columns.
        dummy = parts.state.dummy_token
        own = [each.dummy_slot(parts.dummy_block) for each in tables]
        self._padding = (dummy, 0, dummy, 0, parts.state.size.max_running, *own)
        columns = [static[a:b].view(torch.int64) for a, b in self._columns()]
        self.ids_at, self.positions, self.targets, self.last_tokens, *others = columns
        self.row_slots, slots = others[0][:size], others[1:]
        self.groups = _padded_groups(parts, size, static, slots)
        device = static.device
        rows = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.cu_seqlens = rows * parts.queries
        self.block_tables = torch.zeros(size, 0, dtype=torch.int32, device=device)

    def fill(self, host: npt.NDArray[np.uint8], layout: StepLayout) -> int:
        """Write a step, padded; returns how many bytes must reach the device."""
        rows, count, samples = layout.num_rows, len(layout.positions), len(layout.targets)
        # Rows begin at multiples of their room; samples stay as they are.
        shifts = np.arange(rows) * self._queries - layout.bounds[:rows]
        at = np.arange(count) + np.repeat(shifts, np.diff(layout.bounds))
        sampled = np.arange(samples)
        columns = (
            (at, layout.ids_at),
            (at, layout.positions),
            (sampled, layout.targets),
            (sampled, at[layout.last_tokens]),
            (np.arange(rows), layout.row_slots),
            *((at, group.slots) for group in layout.groups),
        )
        for bounds, (own_at, own), padding in zip(
            self._columns(), columns, self._padding, strict=True
        ):
            column = host[slice(*bounds)].view(np.int64)
            column[:] = padding
            column[own_at] = own
        filled = zip(self.groups, layout.groups, strict=True)
        return max(group.fill(host, own, self._dummy_block) for group, own in filled)

    def tensors(self, tokens: Tensor) -> StepTensors:
        """What a model reads. tokens: the token buffer."""
        return StepTensors(
            input_ids=tokens[self.ids_at],
            positions=self.positions,
            groups=tuple(
                GroupTensors(group.slots, self.cu_seqlens, self.block_tables)
                for group in self.groups
            ),
            last_tokens=self.last_tokens,
        )

    def state_rows(self, adapters: AdapterData | None) -> tuple[StateRows, ...]:
        """The rows as recurrent layers compute them: all have a state, padding rows the dummy's."""
        every = slice(0, self.size)
        return (StateRows(every, True, False, self.row_slots, adapters),)

    def plans(self) -> StepPlans:
        """What a model's attention reads."""
        return tuple(group.attention.step for group in self.groups)

    def _columns(self) -> list[tuple[int, int]]:
        """The int64 columns' bounds, in bytes."""
        stride = aligned(self.tokens * INT64_BYTES)
        starts = (index * stride for index in range(len(self._padding)))
        return [(start, start + self.tokens * INT64_BYTES) for start in starts]


def _padded_groups(
    parts: GraphParts, size: int, static: Tensor, slots: Sequence[Tensor]
) -> tuple[PaddedGroup, ...]:
    """The groups' words behind the columns; the first group's last, for they may be the most."""
    made = []
    at = (COLUMNS + len(slots)) * aligned(size * parts.queries * INT64_BYTES)
    sized = zip(parts.backends, parts.state.tables, slots, _words(parts, size), strict=True)
    for backend, tables, own, words in reversed(list(sized)):
        end = at + words * INT32_BYTES
        attention = backend.graph_form(size, static[at:end].view(torch.int32), parts.queries)
        made.append(PaddedGroup(tables, size, own, attention, at, end))
        at += aligned(words * INT32_BYTES)
    return tuple(reversed(made))


def step_bytes(parts: GraphParts, size: int) -> int:
    """Bytes of static buffer that steps of one size take."""
    words = [aligned(count * INT32_BYTES) for count in _words(parts, size)]
    columns = COLUMNS + len(words)
    return columns * aligned(size * parts.queries * INT64_BYTES) + sum(words)


def _words(parts: GraphParts, size: int) -> list[int]:
    """How many words each group's attention reads."""
    found = []
    for backend, tables in zip(parts.backends, parts.state.tables, strict=True):
        words = backend.graph_words(size, tables.max_pages, parts.queries)
        assert words is not None, backend.name
        found.append(words)
    return found


class StepOutputs(NamedTuple):
    """Where graphs write: outputs of their own could not share memory with those of others.

    logits: [samples, vocab]. tokens: int64 [samples]. states: [samples, width].
    """

    logits: Tensor
    tokens: Tensor
    states: Tensor

    @classmethod
    def of(cls, parts: GraphParts, samples: int, device: torch.device) -> "StepOutputs":
        """Allocate for so many samples."""
        dtype = parts.backends[0].spec.dtype
        logits = torch.empty(samples, parts.vocab_size, dtype=parts.logits_dtype, device=device)
        states = torch.empty(samples, parts.width, dtype=dtype, device=device)
        return cls(logits, torch.zeros(samples, dtype=torch.int64, device=device), states)


class DecodeGraphs:
    """A runner's captured steps with so much room a row, for base rows alone and with adapters."""

    def __init__(
        self,
        parts: GraphParts,
        sizes: Sequence[int],
        device: torch.device,
        record: Record,
        outputs: "StepOutputs | None" = None,
    ) -> None:
        """sizes: of rows. `record_next` records one after the other. outputs: None for its own."""
        self.sizes = tuple(sorted(sizes))
        self.queries = parts.queries
        self.has_experts = parts.has_experts
        most = self.sizes[-1] * parts.queries
        self._parts = parts
        self._fused = fused_ops(device)
        self._staging = TransferBuffer(max(step_bytes(parts, size) for size in self.sizes), device)
        self._outputs = outputs or StepOutputs.of(parts, most, device)
        self._record = record
        self._steps: dict[int, PaddedStep] = {}
        self._replays: dict[tuple[int, StepAdapters], Callable[[], None]] = {}
        # The largest first, so that the others fit into its memory.
        self.unrecorded = list(self.sizes)
        self._recorded: list[int] = []

    def record_next(self) -> None:
        """Record the largest size that is left, for each kind of adapters."""
        size, parts = self.unrecorded.pop(), self._parts
        step = PaddedStep(parts, size, self._staging.device_bytes)
        for kind in StepAdapters.captured(parts.adapters, parts.has_experts):
            self._copy_inputs(step, StepLayout.empty(len(parts.backends)), kind)
            # Without tiles there are the base products of few rows alone.
            tiles = None if kind else 0
            has_experts = kind is StepAdapters.EXPERTS
            plan = parts.adapters
            adapters = plan.batch(step.tokens, tiles, has_experts) if plan else None
            compute = partial(self._compute, step, adapters)
            self._replays[size, kind] = self._record(compute)
        self._steps[size] = step
        self._recorded.insert(0, size)

    def run(self, layout: StepLayout, with_experts: bool = False) -> GraphOutput | None:
        """Replay a step; None when no graph serves it. with_experts: whether adapters change any.

        It must be false where `GraphParts.has_experts` is.
        """
        rows = layout.num_rows
        # Padding rows cost little: until its own size is recorded, a step takes a larger one.
        size = size_for(self._recorded, rows)
        kind = StepAdapters.of(layout.adapter_slots, with_experts)
        if size is None or (size, kind) not in self._replays or not self._has_form(layout):
            return None
        step, samples = self._steps[size], len(layout.targets)
        self._copy_inputs(step, layout, kind)
        self._replays[size, kind]()
        logits, tokens, states = (each[:samples] for each in self._outputs)
        own = states if self._parts.width else None
        return GraphOutput(tokens, logits, step.targets[:samples], self.queries == 1, own)

    def _has_form(self, layout: StepLayout) -> bool:
        """Whether each token samples, and each row fits into its room, in one piece.

        Also whether all rows have a state, where layers keep one.
        """
        rows = layout.num_rows
        pieces = (len(layout.adapter_slots), *(len(each.key_lengths) for each in layout.groups))
        if self._parts.is_recurrent and not layout.row_starts.all():
            return False
        return 1 <= layout.most_queries <= self.queries and set(pieces) == {rows}

    def _copy_inputs(self, step: PaddedStep, layout: StepLayout, kind: StepAdapters) -> None:
        """Queue all that the step's graph reads, on the current stream."""
        # The device bytes exist once: the stream's order puts this copy behind the last replay.
        # The host bytes exist twice: the last step's copy may not have read its own yet.
        buffer, host = self._staging.begin()
        self._staging.send(step.fill(host, layout))
        for group in step.groups:
            group.attention.plan(buffer)
        self._staging.sent()
        if kind and self._parts.adapters is not None:
            padding = [-1] * (step.size - layout.num_rows)
            self._parts.adapters.update(layout.adapter_slots + padding, [self.queries] * step.size)

    def _compute(self, step: PaddedStep, adapters: AdapterData | None) -> None:
        """Compute what a graph captures: from the token buffer to its outputs, and back."""
        state = self._parts.state
        rows = step.state_rows(adapters) if self._parts.is_recurrent else ()
        tensors = step.tensors(state.tokens)
        logits, states = self._parts.forward(tensors, step.plans(), adapters, rows)
        tokens = self._fused.best(logits) if self._fused else logits.argmax(dim=-1)
        self._outputs.logits[: step.tokens].copy_(logits)
        self._outputs.tokens[: step.tokens].copy_(tokens)
        if states is not None:
            self._outputs.states[: step.tokens].copy_(states)
        if self.queries == 1:
            state.write(step.targets, tokens)
