"""Captured mixed steps: what is between two attentions is a CUDA graph, attention is launched.

Rows of a mixed step are of any lengths, so its attention is planned and launched as in a step
that is not captured. All the rest sees tokens alone: it is recorded once for each of some twenty
numbers of tokens, split where a layer calls attention, and a step takes the next larger number.
Padding tokens write into the dummy block, which no request owns, and their results are not read.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.runner.cuda_graphs import Forward, StepAdapters, size_for
from modeling.runner.forward import StepPlans
from modeling.runner.input_batch import GroupTensors, StepInputs, StepTensors

TOKENS = (
    64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
    2560, 3072, 3584, 4096,
)  # fmt: skip
"""Tokens of captured mixed steps: at most 128 or a quarter of a step is padding. Not 448: on an
H200 the products of 448 tokens take longer than those of 512."""

Replay = Callable[[], None]

OnAttention = Callable[[Tensor, Tensor, LayerCache, int | None, Tensor | None], None]
"""Called with an attention's q, the memory for its output, and the layer's cache, window, sinks."""


def piecewise_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to record, ascending; the last holds every step, up to 4096."""
    most = min(max_step_tokens, TOKENS[-1])
    return (*(size for size in TOKENS if size < most), most)


class Recorder(Protocol):
    """Makes replays of what is computed between `begin` and `end`, on fixed addresses."""

    def recording(self) -> AbstractContextManager[None]:
        """A context in which pieces are recorded one after the other."""
        ...

    def begin(self) -> None:
        """Start a piece."""
        ...

    def end(self) -> Replay:
        """End the piece, and return a function that replays it."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a view of the same memory that lets later pieces reuse it for something else."""
        ...


@dataclass(frozen=True)
class PiecewiseParts:
    """What captured mixed steps are made of.

    forward: from a step's tensors to hidden states [tokens, ...].
    backends: the attention of each KV group.
    dummy_slots: for each group a cache slot of a block that no request owns.
    adapters: None where steps with adapters are not captured.
    has_experts: whether those are that have adapters of experts.
    """

    forward: Forward
    backends: Sequence[AttentionBackend]
    dummy_slots: Sequence[int]
    adapters: AdapterStepPlan | None
    has_experts: bool = False


@dataclass(frozen=True)
class GraphPiece:
    """A replay, and the attention behind it; there is none behind the last piece.

    q: [size, heads, head_dim], where the replay writes its queries.
    out: the same shape, where the next piece reads the attention's output.
    cache, window, sinks: the layer's.
    """

    replay: Replay
    q: Tensor | None = None
    out: Tensor | None = None
    cache: LayerCache | None = None
    window: int | None = None
    sinks: Tensor | None = None


class SplitPoint(AttentionBackend):
    """Replaces attention while a step is recorded: each call ends a piece."""

    name = "split"

    def __init__(self, spec: AttentionSpec, attended: Tensor) -> None:
        """attended: [most tokens, heads, head_dim], where all layers read attention's output."""
        super().__init__(spec)
        self._attended = attended
        self._on_attention: OnAttention | None = None

    @classmethod
    def of(cls, spec: AttentionSpec, tokens: int) -> "SplitPoint":
        """One for steps of up to `tokens` tokens."""
        shape = (tokens, spec.num_heads, spec.head_dim)
        return cls(spec, torch.zeros(shape, dtype=spec.dtype, device=spec.device))

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Return None: it serves every spec, for it computes nothing."""
        return None

    @contextmanager
    def splitting(self, on_attention: OnAttention) -> Iterator[None]:
        """Call `on_attention` at each attention."""
        self._on_attention = on_attention
        try:
            yield
        finally:
            self._on_attention = None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> AttentionStep:
        """Return a step of these lengths, without a plan."""
        return AttentionStep(self, tuple(query_lengths), tuple(key_lengths))

    def forward(
        self,
        q: Tensor,
        cache: LayerCache,
        cu_seqlen: Tensor,
        block_tables: Tensor,
        step: AttentionStep,
        window: int | None = None,
        sinks: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Return the memory that attention will write its output to."""
        out = self._attended[: len(q)]
        if self._on_attention is not None:
            self._on_attention(q, out, cache, window, sinks)
        return out


class PiecewiseGraphs:
    """All captured mixed steps of one runner, by tokens and what adapters change."""

    def __init__(
        self, parts: PiecewiseParts, sizes: Sequence[int], device: torch.device, recorder: Recorder
    ) -> None:
        """sizes: of tokens. `record_next` records one after the other."""
        self.sizes = tuple(sorted(sizes))
        largest = self.sizes[-1]
        self.has_experts = parts.has_experts
        self._parts = parts
        self._recorder = recorder
        self._split_points = [SplitPoint.of(each.spec, largest) for each in parts.backends]
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = [torch.full_like(self._ids, slot) for slot in parts.dummy_slots]
        self._empty = torch.zeros(1, 0, dtype=torch.int32, device=device)
        self._hidden = torch.empty(0, device=device)
        self._pieces: dict[tuple[int, StepAdapters], list[GraphPiece]] = {}
        # The largest first, so that the others fit into its memory.
        self.unrecorded = list(self.sizes)

    def record_next(self) -> None:
        """Record the largest size that is left, for each kind of adapters."""
        size = self.unrecorded.pop()
        for kind in StepAdapters.captured(self._parts.adapters, self.has_experts):
            self._pieces[size, kind] = self._record(size, kind)

    def run(
        self, inputs: StepInputs, attention: StepPlans, with_experts: bool = False
    ) -> Tensor | None:
        """Hidden states [tokens, ...] of a step, until the next one; None when no size holds it.

        with_experts: whether adapters change any. It must be false where `has_experts` is.
        """
        tokens = len(inputs.input_ids)
        size = size_for(self.sizes, tokens)
        layout = inputs.layout
        kind = StepAdapters.of(layout.adapter_slots, with_experts)
        if size is None or (size, kind) not in self._pieces:
            return None
        self._copy_inputs(inputs, size)
        if kind:
            self._update(layout.adapter_slots, layout.adapter_lengths, size)
        for piece in self._pieces[size, kind]:
            piece.replay()
            self._attend(piece, inputs, attention, tokens)
        return self._hidden[:tokens]

    def _copy_inputs(self, inputs: StepInputs, size: int) -> None:
        """Copy the step's tokens to where the pieces read, and give padding tokens dummy values."""
        tokens = len(inputs.input_ids)
        self._ids[:tokens].copy_(inputs.input_ids)
        self._positions[:tokens].copy_(inputs.positions)
        if tokens < size:
            self._positions[tokens:size].zero_()
        dummies = self._parts.dummy_slots
        for slots, group, dummy in zip(self._slots, inputs.groups, dummies, strict=True):
            slots[:tokens].copy_(group.slots)
            if tokens < size:
                slots[tokens:size].fill_(dummy)

    def _update(self, slots: Sequence[int], lengths: Sequence[int], size: int) -> None:
        """Describe the step's adapters; the padding tokens are one row of the base model."""
        padding = size - sum(lengths)
        assert self._parts.adapters is not None
        if padding:
            slots, lengths = [*slots, -1], [*lengths, padding]
        self._parts.adapters.update(slots, lengths)

    def _attend(
        self, piece: GraphPiece, inputs: StepInputs, attention: StepPlans, tokens: int
    ) -> None:
        """Launch the attention behind a piece."""
        if piece.q is None or piece.out is None or piece.cache is None:
            return
        number = piece.cache.group
        group = inputs.groups[number]
        self._parts.backends[number].forward(
            piece.q[:tokens],
            piece.cache,
            group.cu_seqlens,
            group.block_tables,
            attention[number],
            piece.window,
            piece.sinks,
            piece.out[:tokens],
        )

    def _record(self, size: int, kind: StepAdapters) -> list[GraphPiece]:
        """Run the step once to load its kernels, then once more to record it."""
        for slots, dummy in zip(self._slots, self._parts.dummy_slots, strict=True):
            slots[:size].fill_(dummy)
        adapters = None
        if kind and self._parts.adapters is not None:
            self._update([], [], size)
            has_experts = kind is StepAdapters.EXPERTS
            adapters = self._parts.adapters.batch(size, None, has_experts)
        tensors = StepTensors(
            input_ids=self._ids[:size],
            positions=self._positions[:size],
            groups=tuple(
                GroupTensors(slots[:size], self._empty, self._empty) for slots in self._slots
            ),
            last_tokens=self._ids[:0],
        )
        points = self._split_points
        step = tuple(point.prepare((size,), (size,), self._empty) for point in points)
        pieces: list[GraphPiece] = []

        def split(
            q: Tensor, out: Tensor, cache: LayerCache, window: int | None, sinks: Tensor | None
        ) -> None:
            replay = self._recorder.end()
            # An alias, or the piece would own q's memory and no later piece could reuse it.
            pieces.append(GraphPiece(replay, self._recorder.alias(q), out, cache, window, sinks))
            self._recorder.begin()

        with self._recorder.recording():
            self._make_room(self._parts.forward(tensors, step, adapters))
            self._recorder.begin()
            with ExitStack() as stack:
                for point in points:
                    stack.enter_context(point.splitting(split))
                hidden = self._parts.forward(tensors, step, adapters)
            self._hidden[:size].copy_(hidden)
            pieces.append(GraphPiece(self._recorder.end()))
        return pieces

    def _make_room(self, hidden: Tensor) -> None:
        """Allocate what the last pieces write to; the first size recorded is the largest."""
        if self._hidden.numel() == 0:
            self._hidden = torch.zeros_like(hidden)


class PieceRecorder:
    """Records pieces as CUDA graphs that share one pool of memory, for they run in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Switch to the captures' stream, and put garbage collection off.

        A collection may free device memory or graphs, which a capture does not allow.
        """
        here = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        collected = gc.isenabled()
        gc.disable()
        self._stream.wait_stream(here)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            if collected:
                gc.enable()
        here.wait_stream(self._stream)

    def begin(self) -> None:
        """Start a capture; other threads may call CUDA meanwhile."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End the capture, and return its replay."""
        graph, self._graph = self._graph, None
        assert graph is not None, "a piece begins before it ends"
        graph.capture_end()
        return graph.replay

    def alias(self, tensor: Tensor) -> Tensor:
        """Return a tensor over the same memory that does not own it."""
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class _Memory:
    """A tensor's address, by the protocol with which libraries exchange device arrays.

    The protocol knows no bfloat16, so elements are described as integers of the same size.
    """

    def __init__(self, tensor: Tensor) -> None:
        size = tensor.element_size()
        self.__cuda_array_interface__ = {
            "shape": tuple(tensor.shape),
            "typestr": f"<i{size}",
            "strides": tuple(stride * size for stride in tensor.stride()),
            "data": (tensor.data_ptr(), False),
            "version": 2,
        }
