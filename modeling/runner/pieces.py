"""A computation over a step's tokens as captured pieces, with attention launched between them.

It is recorded for some numbers of tokens and cut where a layer calls attention, which is planned
for the step's own rows. Padding tokens write into the dummy block, which no request owns,
and their results are not read.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.product import AdapterData
from modeling.attention.base import AttentionBackend, AttentionSpec, AttentionStep
from modeling.attention.kv_cache import LayerCache
from modeling.runner.cuda_graphs import StepAdapters, size_for
from modeling.runner.forward import StepPlans
from modeling.runner.graph_recorder import Recorder, Replay
from modeling.runner.input_batch import GroupTensors, StepInputs, StepTensors

OnAttention = Callable[[Tensor, Tensor, LayerCache, int | None, Tensor | None], None]
"""Called with an attention's q, the memory for its output, and the layer's cache, window, sinks."""

Compute = Callable[[StepTensors, StepPlans, AdapterData | None], tuple[Tensor, ...]]
"""From a step's tensors, planned attention and adapters to what it leaves, [tokens, ...] each."""


@dataclass(frozen=True)
class CapturedParts:
    """What captured pieces are made of.

    compute: what they compute.
    backends: the attention of each KV group.
    dummy_slots: for each group a cache slot of a block that no request owns.
    adapters: None where steps with adapters are not captured.
    has_experts: whether those are that have adapters of experts.
    """

    compute: Compute
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


class CapturedPieces:
    """All pieces of one computation, by the number of tokens and what adapters change."""

    def __init__(
        self,
        parts: CapturedParts,
        sizes: Sequence[int],
        points: Sequence[SplitPoint],
        recorder: Recorder,
    ) -> None:
        """sizes: of tokens. points: of the KV groups, with room for the largest size.

        `record_next` records one after the other.
        """
        self.sizes = tuple(sorted(sizes))
        largest, device = self.sizes[-1], points[0].spec.device
        self._parts = parts
        self._recorder = recorder
        self._points = points
        self._ids = torch.zeros(largest, dtype=torch.int64, device=device)
        self._positions = torch.zeros(largest, dtype=torch.int64, device=device)
        self._slots = [torch.full_like(self._ids, slot) for slot in parts.dummy_slots]
        self._empty = torch.zeros(1, 0, dtype=torch.int32, device=device)
        # What the last pieces leave; made with the first size recorded, which is the largest.
        self.left: list[Tensor] = []
        self._pieces: dict[tuple[int, StepAdapters], list[GraphPiece]] = {}
        # The largest first, so that the others fit into its memory.
        self.unrecorded = list(self.sizes)

    def record_next(self) -> None:
        """Record the largest size that is left, for each kind of adapters."""
        size, parts = self.unrecorded.pop(), self._parts
        for kind in StepAdapters.captured(parts.adapters, parts.has_experts):
            self._pieces[size, kind] = self._record(size, kind)

    def has(self, tokens: int, kind: StepAdapters) -> bool:
        """Whether a size holds so many tokens."""
        return (size_for(self.sizes, tokens), kind) in self._pieces

    def run(self, inputs: StepInputs, attention: StepPlans, kind: StepAdapters) -> list[Tensor]:
        """What a step leaves, until the next one; a size must hold it."""
        tokens, layout = len(inputs.input_ids), inputs.layout
        size = size_for(self.sizes, tokens)
        assert size is not None, tokens
        self._copy_inputs(inputs, size)
        if kind:
            self._update(layout.adapter_slots, layout.adapter_lengths, size)
        for piece in self._pieces[size, kind]:
            piece.replay()
            self._attend(piece, inputs, attention, tokens)
        return [each[:tokens] for each in self.left]

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
        points = self._points
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
            made = self._parts.compute(tensors, step, adapters)
            if not self.left:
                self.left = [torch.zeros_like(each) for each in made]
            self._recorder.begin()
            with ExitStack() as stack:
                for point in points:
                    stack.enter_context(point.splitting(split))
                made = self._parts.compute(tensors, step, adapters)
            for left, each in zip(self.left, made, strict=True):
                left[:size].copy_(each)
            pieces.append(GraphPiece(self._recorder.end()))
        return pieces
