"""Captured decode steps: one CUDA graph for each of a dozen batch sizes, base and with adapters.

A graph replays the same launches at the same addresses, so all that varies is in static buffers:
one packed transfer brings a step's tables, the attention's plan and the adapters' tiles follow,
then the replay. A step of fewer rows than the graph's is filled up with padding rows of one key.
These read and write the dummy block, which no request owns, and their tokens go to the token
buffer's dummy token.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionBackend, GraphAttention
from modeling.layers.fused import fused_ops
from modeling.runner.block_tables import BlockTables, GroupLayout
from modeling.runner.forward import StepPlans
from modeling.runner.input_batch import GroupTensors, InputBatch, StepLayout, StepTensors
from modeling.transfer import TransferBuffer, aligned

SIZES = (1, 2, 4, 8, 16, 32, 48, 64, 96, 128, 192, 256)
"""Rows of captured steps; a step takes the next larger one."""

WARM_UPS = 2
"""Runs before a capture: the first one loads kernels and makes the libraries' workspaces."""

INT64_BYTES, INT32_BYTES = 8, 4

COLUMNS = 3
"""Of a step: where its ids are, positions, targets. The slots of each KV group follow."""

Forward = Callable[[StepTensors, StepPlans, AdapterData | None], Tensor]
"""From a step's tensors, planned attention and adapters to logits [sampling rows, vocab]."""


Record = Callable[[Callable[[], None]], Callable[[], None]]
"""From a computation on fixed addresses to its replay."""


def graph_sizes(max_running: int) -> tuple[int, ...]:
    """The sizes of captured steps, ascending; the last one holds all batch slots, up to 256."""
    most = min(max_running, SIZES[-1])
    return (*(size for size in SIZES if size < most), most)


def size_for(sizes: Sequence[int], num_rows: int) -> int | None:
    """The smallest size that holds the rows; None when there is none."""
    return next((size for size in sizes if num_rows <= size), None)


@dataclass(frozen=True)
class GraphParts:
    """What captured steps are made of.

    forward: from a step's tensors to logits [sampling rows, vocab].
    backends: the attention of each KV group.
    state: the batch slots that steps read and write.
    dummy_block: a cache block that no request owns.
    vocab_size, dtype: of the logits.
    adapters: None where steps with adapters are not captured.
    """

    forward: Forward
    backends: Sequence[AttentionBackend]
    state: InputBatch
    dummy_block: int
    vocab_size: int
    dtype: torch.dtype
    adapters: AdapterStepPlan | None


@dataclass(frozen=True)
class GraphOutput:
    """What a replay computed; the next replay overwrites it. Padding rows are cut off.

    tokens: int64 [n], each row's greedy token, in the token buffer already.
    logits: [n, vocab].
    targets: int64 [n], as in StepLayout.
    """

    tokens: Tensor
    logits: Tensor
    targets: Tensor


@dataclass(frozen=True)
class PaddedGroup:
    """One KV group's part of a step of one size.

    tables: of the group. slots: int64 [size], a view of the static buffer. words_at, words_end:
    where the attention's words are in the static buffer, in bytes.
    """

    tables: BlockTables
    slots: Tensor
    attention: GraphAttention
    words_at: int
    words_end: int

    def fill(self, host: npt.NDArray[np.uint8], layout: GroupLayout, dummy_block: int) -> int:
        """Write the attention's words, padded; returns where those that count end."""
        rows, size = len(layout.key_lengths), len(self.slots)
        key_lengths = np.ones(size, dtype=np.int32)
        key_lengths[:rows] = layout.key_lengths
        width = max(1, layout.tables.shape[1])
        dummy_page = dummy_block * self.tables.stride
        tables = np.full((size, width), dummy_page, dtype=np.int32)
        tables[:rows, : layout.tables.shape[1]] = layout.tables
        words = host[self.words_at : self.words_end].view(np.int32)
        return self.words_at + self.attention.write(words, key_lengths, tables) * INT32_BYTES


class PaddedStep:
    """One size's part of the static buffer: how a layout is written there, and the views of it."""

    def __init__(self, parts: GraphParts, size: int, static: Tensor) -> None:
        """static: uint8 on the device, at least `step_bytes` of them."""
        self.size = size
        self._dummy_block = parts.dummy_block
        tables = parts.state.tables
        # The padding rows' values in the columns: ids_at, positions, targets, each group's slots.
        dummy = parts.state.dummy_token
        own = [each.dummy_slot(parts.dummy_block) for each in tables]
        self._padding = (dummy, 0, dummy, *own)
        columns = [static[a:b].view(torch.int64) for a, b in self._columns()]
        self.ids_at, self.positions, self.targets, *slots = columns
        self.groups = _padded_groups(parts, size, static, slots)
        device = static.device
        self.cu_seqlens = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.last_tokens = torch.arange(size, device=device)
        self.block_tables = torch.zeros(size, 0, dtype=torch.int32, device=device)

    def fill(self, host: npt.NDArray[np.uint8], layout: StepLayout) -> int:
        """Write a decode step, padded; returns how many bytes must reach the device."""
        rows = layout.num_rows
        slots = (group.slots for group in layout.groups)
        values = (layout.ids_at, layout.positions, layout.targets, *slots)
        for (start, stop), own, padding in zip(self._columns(), values, self._padding, strict=True):
            column = host[start:stop].view(np.int64)
            column[:rows] = own
            column[rows:] = padding
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

    def plans(self) -> StepPlans:
        """What a model's attention reads."""
        return tuple(group.attention.step for group in self.groups)

    def _columns(self) -> list[tuple[int, int]]:
        """The int64 columns' bounds, in bytes."""
        stride = aligned(self.size * INT64_BYTES)
        starts = (index * stride for index in range(len(self._padding)))
        return [(start, start + self.size * INT64_BYTES) for start in starts]


def _padded_groups(
    parts: GraphParts, size: int, static: Tensor, slots: Sequence[Tensor]
) -> tuple[PaddedGroup, ...]:
    """The groups' words behind the columns; the first group's last, for they may be the most."""
    made = []
    at = (COLUMNS + len(slots)) * aligned(size * INT64_BYTES)
    sized = zip(parts.backends, parts.state.tables, slots, _words(parts, size), strict=True)
    for backend, tables, own, words in reversed(list(sized)):
        end = at + words * INT32_BYTES
        attention = backend.graph_form(size, static[at:end].view(torch.int32))
        made.append(PaddedGroup(tables, own, attention, at, end))
        at += aligned(words * INT32_BYTES)
    return tuple(reversed(made))


def step_bytes(parts: GraphParts, size: int) -> int:
    """Bytes of static buffer that steps of one size take."""
    words = [aligned(count * INT32_BYTES) for count in _words(parts, size)]
    return (COLUMNS + len(words)) * aligned(size * INT64_BYTES) + sum(words)


def _words(parts: GraphParts, size: int) -> list[int]:
    """How many words each group's attention reads."""
    found = []
    for backend, tables in zip(parts.backends, parts.state.tables, strict=True):
        words = backend.graph_words(size, tables.max_pages)
        assert words is not None, backend.name
        found.append(words)
    return found


class GraphRecorder:
    """Makes graphs that share one pool of memory, because they never run together."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

    def __call__(self, compute: Callable[[], None]) -> Callable[[], None]:
        """Return a function that repeats the launches of `compute`, on the caller's stream."""
        # A capture may not run on the default stream, so both streams wait for each other.
        here = torch.cuda.current_stream(self._stream.device)
        self._stream.wait_stream(here)
        with torch.cuda.stream(self._stream):
            for _ in range(WARM_UPS):
                compute()
        here.wait_stream(self._stream)
        graph = torch.cuda.CUDAGraph()
        # Other threads may call CUDA meanwhile: a capture's rules bind only this one.
        with torch.cuda.graph(
            graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
        ):
            compute()
        return graph.replay


class DecodeGraphs:
    """All captured steps of one runner, by size, for base rows alone and with adapters."""

    def __init__(
        self, parts: GraphParts, sizes: Sequence[int], device: torch.device, record: Record
    ) -> None:
        """sizes: of rows. `record_next` records one after the other."""
        self.sizes = tuple(sorted(sizes))
        largest = self.sizes[-1]
        self._parts = parts
        self._fused = fused_ops(device)
        self._staging = TransferBuffer(max(step_bytes(parts, size) for size in self.sizes), device)
        # All graphs write here: outputs of their own could not share memory with other graphs.
        self._logits = torch.empty(largest, parts.vocab_size, dtype=parts.dtype, device=device)
        self._tokens = torch.zeros(largest, dtype=torch.int64, device=device)
        self._record = record
        self._steps: dict[int, PaddedStep] = {}
        self._replays: dict[tuple[int, bool], Callable[[], None]] = {}
        # The largest first, so that the others fit into its memory.
        self.unrecorded = list(self.sizes)
        self._recorded: list[int] = []

    def record_next(self) -> None:
        """Record the largest size that is left, for base rows alone and with adapters."""
        size, parts = self.unrecorded.pop(), self._parts
        step = PaddedStep(parts, size, self._staging.device_bytes)
        for with_adapters in (False,) if parts.adapters is None else (False, True):
            self._copy_inputs(step, StepLayout.empty(len(parts.backends)), with_adapters)
            # Without tiles there are the base products of few rows alone.
            tiles = None if with_adapters else 0
            adapters = parts.adapters.batch(size, tiles) if parts.adapters else None
            compute = partial(self._compute, step, adapters)
            self._replays[size, with_adapters] = self._record(compute)
        self._steps[size] = step
        self._recorded.insert(0, size)

    def run(self, layout: StepLayout) -> GraphOutput | None:
        """Replay a step; None when no graph serves it."""
        rows = layout.num_rows
        # Padding rows cost little: until its own size is recorded, a step takes a larger one.
        size = size_for(self._recorded, rows)
        with_adapters = max(layout.adapter_slots) >= 0
        if size is None or not layout.decodes or (size, with_adapters) not in self._replays:
            return None
        step = self._steps[size]
        self._copy_inputs(step, layout, with_adapters)
        self._replays[size, with_adapters]()
        return GraphOutput(self._tokens[:rows], self._logits[:rows], step.targets[:rows])

    def _copy_inputs(self, step: PaddedStep, layout: StepLayout, with_adapters: bool) -> None:
        """Queue all that the step's graph reads, on the current stream."""
        # The device bytes exist once: the stream's order puts this copy behind the last replay.
        # The host bytes exist twice: the last step's copy may not have read its own yet.
        buffer, host = self._staging.begin()
        self._staging.send(step.fill(host, layout))
        for group in step.groups:
            group.attention.plan(buffer)
        self._staging.sent()
        if with_adapters and self._parts.adapters is not None:
            padding = [-1] * (step.size - layout.num_rows)
            self._parts.adapters.update(layout.adapter_slots + padding, [1] * step.size)

    def _compute(self, step: PaddedStep, adapters: AdapterData | None) -> None:
        """Compute what a graph captures: from the token buffer back to the token buffer."""
        state = self._parts.state
        logits = self._parts.forward(step.tensors(state.tokens), step.plans(), adapters)
        tokens = self._fused.best(logits) if self._fused else logits.argmax(dim=-1)
        self._logits[: step.size].copy_(logits)
        self._tokens[: step.size].copy_(tokens)
        state.write(step.targets, tokens)
