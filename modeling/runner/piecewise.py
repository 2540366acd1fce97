"""Captured mixed steps: what lies between two attentions is a CUDA graph, attention is launched.

Rows of a mixed step are of any lengths, so its attention is planned and launched as in a step
that is not captured. All the rest sees tokens alone: it is recorded once for a dozen and some
numbers of tokens, cut where a layer asks for attention, and a step takes the next larger number.
Tokens that fill it up write into a page that nobody owns, and nobody reads what they come to.
"""

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.runner.cuda_graphs import Forward, size_for
from modeling.runner.input_batch import StepInputs, StepTensors

TOKENS = (
    64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
    2560, 3072, 3584, 4096,
)  # fmt: skip
"""Tokens of captured mixed steps: at most 128 or a quarter of a step is filling. Not 448: on an
H200 the products of 448 tokens take longer than those of 512."""

Replay = Callable[[], None]


def piecewise_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to record, ascending; the last holds every step, up to 4096."""
    most = min(max_step_tokens, TOKENS[-1])
    return (*(size for size in TOKENS if size < most), most)


class Recorder(Protocol):
    """Makes replays of what is computed between `begin` and `end`, on fixed addresses."""

    def recording(self) -> AbstractContextManager[None]:
        """Where segments are recorded one after the other."""
        ...

    def begin(self) -> None:
        """Start a segment."""
        ...

    def end(self) -> Replay:
        """Close it, and return what repeats it."""
        ...

    def alias(self, tensor: Tensor) -> Tensor:
        """The same memory, without keeping later segments from using it for something else."""
        ...


@dataclass(frozen=True)
class PiecewiseParts:
    """What captured mixed steps are made of.

    forward: from a step's tensors to hidden states [tokens, ...]. backend: of the attention.
    dummy_slot: of a cache page that nobody owns. adapters: None where steps with adapters are
    not captured.
    """

    forward: Forward
    backend: AttentionBackend
    dummy_slot: int
    adapters: AdapterStepPlan | None


@dataclass(frozen=True)
class GraphPiece:
    """A replay, and the attention behind it; no attention behind the last one.

    q, out: [size, heads, head_dim], where the replay leaves its queries and the next one reads.
    """

    replay: Replay
    q: Tensor | None = None
    out: Tensor | None = None
    cache: LayerCache | None = None
    window: int | None = None


class SplitPoint(AttentionBackend):
    """Stands in a recorded step where attention will be: each call ends a segment."""

    name = "seam"

    def __init__(self, spec: AttentionSpec, attended: Tensor) -> None:
        """attended: [most tokens, heads, head_dim], where all layers find what attention said."""
        super().__init__(spec)
        self._on_attention = attended
        self._cut: Callable[[Tensor, Tensor, LayerCache, int | None], None] | None = None

    @classmethod
    def lacks(cls, spec: AttentionSpec) -> str | None:
        """Nothing: it computes nothing."""
        return None

    @contextmanager
    def cutting(
        self, cut: Callable[[Tensor, Tensor, LayerCache, int | None], None]
    ) -> Iterator[None]:
        """Call `cut` with (q, out, cache, window) at each attention."""
        self._cut = cut
        try:
            yield
        finally:
            self._cut = None

    def prepare(
        self, query_lengths: Sequence[int], key_lengths: Sequence[int], block_tables: Tensor
    ) -> AttentionStep:
        """Name the lengths alone."""
        return AttentionStep(self, tuple(query_lengths), tuple(key_lengths))

    def forward(
        self,
        q: Tensor,
        cache: LayerCache,
        cu_seqlen: Tensor,
        block_tables: Tensor,
        step: AttentionStep,
        window: int | None = None,
    ) -> Tensor:
        """Return where the answer will lie."""
        out = self._on_attention[: len(q)]
        if self._cut is not None:
            self._cut(q, out, cache, window)
        return out


class PiecewiseGraphs:
    """All captured mixed steps of one runner, by tokens, for base rows alone and with adapters."""

    def __init__(
        self, parts: PiecewiseParts, sizes: Sequence[int], device: torch.device, recorder: Recorder
    ) -> None:
        """Record every size, the largest first, so that the others fit into its memory."""
        self.sizes = tuple(sorted(sizes))
        largest = self.sizes[-1]
        spec = parts.backend.spec
        self._parts = parts
        self._recorder = recorder
        shape = (largest, spec.num_heads, spec.head_dim)
        self._split_point = SplitPoint(spec, torch.zeros(shape, dtype=spec.dtype, device=device))
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = torch.full_like(self._ids, parts.dummy_slot)
        self._empty = torch.zeros(1, 0, dtype=torch.int32, device=device)
        self._hidden = torch.empty(0, device=device)
        self._pieces: dict[tuple[int, bool], list[GraphPiece]] = {}
        kinds = (False,) if parts.adapters is None else (False, True)
        for size in reversed(self.sizes):
            for with_adapters in kinds:
                self._pieces[size, with_adapters] = self._record(size, with_adapters)

    def run(self, inputs: StepInputs, attention: AttentionStep) -> Tensor | None:
        """Hidden states [tokens, ...] of a step, until the next one; None when no size holds it."""
        tokens = len(inputs.input_ids)
        size = size_for(self.sizes, tokens)
        with_adapters = max(inputs.adapter_slots) >= 0
        if size is None or (size, with_adapters) not in self._pieces:
            return None
        self._copy_inputs(inputs, size)
        if with_adapters:
            self._update(inputs.adapter_slots, inputs.query_lengths, size)
        for segment in self._pieces[size, with_adapters]:
            segment.replay()
            self._attend(segment, inputs, attention, tokens)
        return self._hidden[:tokens]

    def _copy_inputs(self, inputs: StepInputs, size: int) -> None:
        """Copy the step's tokens to where the segments read, and make the others harmless."""
        tokens = len(inputs.input_ids)
        self._ids[:tokens].copy_(inputs.input_ids)
        self._positions[:tokens].copy_(inputs.positions)
        self._slots[:tokens].copy_(inputs.slots)
        if tokens < size:
            self._positions[tokens:size].zero_()
            self._slots[tokens:size].fill_(self._parts.dummy_slot)

    def _update(self, slots: Sequence[int], lengths: Sequence[int], size: int) -> None:
        """Describe the step's adapters, with a base row of tokens that fill the size up."""
        filling = size - sum(lengths)
        assert self._parts.adapters is not None
        if filling:
            slots, lengths = [*slots, -1], [*lengths, filling]
        self._parts.adapters.update(slots, lengths)

    def _attend(
        self, segment: GraphPiece, inputs: StepInputs, attention: AttentionStep, tokens: int
    ) -> None:
        """Launch the attention behind a segment."""
        if segment.q is None or segment.out is None or segment.cache is None:
            return
        found = self._parts.backend.forward(
            segment.q[:tokens],
            segment.cache,
            inputs.cu_seqlens,
            inputs.block_tables,
            attention,
            segment.window,
        )
        segment.out[:tokens].copy_(found)

    def _record(self, size: int, with_adapters: bool) -> list[GraphPiece]:
        """Run the step once to load its kernels, then once more to record it."""
        self._slots[:size].fill_(self._parts.dummy_slot)
        adapters = None
        if with_adapters and self._parts.adapters is not None:
            self._update([], [], size)
            adapters = self._parts.adapters.batch(size)
        tensors = StepTensors(
            input_ids=self._ids[:size],
            positions=self._positions[:size],
            slots=self._slots[:size],
            cu_seqlens=self._empty,
            block_tables=self._empty,
            last_tokens=self._ids[:0],
        )
        step = self._split_point.prepare((size,), (size,), self._empty)
        segments: list[GraphPiece] = []

        def cut(q: Tensor, out: Tensor, cache: LayerCache, window: int | None) -> None:
            replay = self._recorder.end()
            segments.append(GraphPiece(replay, self._recorder.alias(q), out, cache, window))
            self._recorder.begin()

        with self._recorder.recording():
            self._make_room(self._parts.forward(tensors, step, adapters))
            self._recorder.begin()
            with self._split_point.cutting(cut):
                hidden = self._parts.forward(tensors, step, adapters)
            self._hidden[:size].copy_(hidden)
            segments.append(GraphPiece(self._recorder.end()))
        return segments

    def _make_room(self, hidden: Tensor) -> None:
        """Segments write here at last; the first size that is recorded is the largest."""
        if self._hidden.numel() == 0:
            self._hidden = torch.zeros_like(hidden)


class PieceRecorder:
    """Records segments as CUDA graphs that share one pool of memory, for they run in order."""

    def __init__(self, device: torch.device) -> None:
        """Captures run on a stream of their own."""
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graph: torch.cuda.CUDAGraph | None = None

    @contextmanager
    def recording(self) -> Iterator[None]:
        """On the captures' stream, without a garbage collection that would touch the device."""
        here = torch.cuda.current_stream(self._device)
        torch.cuda.synchronize(self._device)
        gc.collect()
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
        """Start a capture; other threads go on meanwhile."""
        self._graph = torch.cuda.CUDAGraph()
        self._graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")

    def end(self) -> Replay:
        """End it."""
        graph, self._graph = self._graph, None
        assert graph is not None, "a segment begins before it ends"
        graph.capture_end()
        return graph.replay

    def alias(self, tensor: Tensor) -> Tensor:
        """A tensor over the same memory that does not own it."""
        return torch.as_tensor(_Memory(tensor), device=tensor.device).view(tensor.dtype)


class _Memory:
    """Where a tensor lies, by the protocol with which libraries hand each other device arrays.

    It knows no bfloat16, so elements are told as integers of the same size.
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
