"""Captured mixed steps: what is between two attentions is a CUDA graph, attention is launched.

Rows of a mixed step are of any lengths, so its attention is planned and launched as in a step
that is not captured. All the rest sees tokens alone: it is recorded once for each of some twenty
numbers of tokens, split where a layer calls attention, and a step takes the next larger number.
Padding tokens write into the dummy block, which no request owns, and their results are not read.
Where the model can, tails compute what follows the last attention (tails.py).
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
from modeling.runner.forward import PagedForward, StepPlans
from modeling.runner.graph_recorder import Recorder, Replay
from modeling.runner.input_batch import GroupTensors, StepInputs, StepTensors
from modeling.runner.tails import TailParts, Tails, describe

TOKENS = (
    64, 128, 192, 256, 320, 384, 512, 576, 640, 768, 896, 1024, 1152, 1280, 1536, 1792, 2048,
    2560, 3072, 3584, 4096,
)  # fmt: skip
"""Tokens of captured mixed steps: at most 128 or a quarter of a step is padding. Not 448: on an
H200 the products of 448 tokens take longer than those of 512."""

OnAttention = Callable[[Tensor, Tensor, LayerCache, int | None, Tensor | None], None]
"""Called with an attention's q, the memory for its output, and the layer's cache, window, sinks."""


def piecewise_sizes(max_step_tokens: int) -> tuple[int, ...]:
    """The numbers of tokens to record, ascending; the last holds every step, up to 4096."""
    most = min(max_step_tokens, TOKENS[-1])
    return (*(size for size in TOKENS if size < most), most)


@dataclass(frozen=True)
class PiecewiseParts:
    """What captured mixed steps are made of.

    forward: the model; where it splits, pieces end at the last attention, and tails follow.
    backends: the attention of each KV group.
    dummy_slots: for each group a cache slot of a block that no request owns.
    adapters: None where steps with adapters are not captured.
    has_experts: whether those are that have adapters of experts.
    """

    forward: PagedForward
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
        # What the last pieces leave; made with the first size recorded, which is the largest.
        self._left: list[Tensor] = []
        self._tails: Tails | None = None
        self._pieces: dict[tuple[int, StepAdapters], list[GraphPiece]] = {}
        # The largest first, so that the others fit into its memory.
        self.unrecorded = list(self.sizes)

    def record_next(self) -> None:
        """Record the largest size that is left, for each kind of adapters."""
        size, parts = self.unrecorded.pop(), self._parts
        kinds = StepAdapters.captured(parts.adapters, self.has_experts)
        for kind in kinds:
            self._pieces[size, kind] = self._record(size, kind)
        if parts.forward.split is not None and self._tails is None:
            tails = TailParts(parts.forward.tail, self._left, parts.adapters, kinds)
            self._tails = Tails(tails, self.sizes, self._recorder)

    def run(
        self, inputs: StepInputs, attention: StepPlans, with_experts: bool = False
    ) -> Tensor | None:
        """Hidden states of a step's tokens that are read, until the next step.

        None when no size holds it. with_experts: whether adapters change any. It must be false
        where `has_experts` is.
        """
        tokens = len(inputs.input_ids)
        size = size_for(self.sizes, tokens)
        layout = inputs.layout
        kind = StepAdapters.of(layout.adapter_slots, with_experts)
        if size is None or (size, kind) not in self._pieces:
            return None
        self._copy_inputs(inputs, size)
        adapters = self._parts.adapters if kind else None
        describe(adapters, layout.adapter_slots, layout.adapter_lengths, size)
        for piece in self._pieces[size, kind]:
            piece.replay()
            self._attend(piece, inputs, attention, tokens)
        if self._tails is not None:
            return self._tails.run(inputs, kind)
        return self._left[0][inputs.tokens_read]

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
            describe(self._parts.adapters, [], [], size)
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
            made = self._compute(tensors, step, adapters)
            if not self._left:
                self._left = [torch.zeros_like(each) for each in made]
            self._recorder.begin()
            with ExitStack() as stack:
                for point in points:
                    stack.enter_context(point.splitting(split))
                made = self._compute(tensors, step, adapters)
            for left, each in zip(self._left, made, strict=True):
                left[:size].copy_(each)
            pieces.append(GraphPiece(self._recorder.end()))
        return pieces

    def _compute(
        self, tensors: StepTensors, step: StepPlans, adapters: AdapterData | None
    ) -> tuple[Tensor, ...]:
        """What a step leaves: hidden states, or what tails read, [tokens, ...] each."""
        forward = self._parts.forward
        if forward.split is None:
            return (forward.hidden(tensors, step, adapters),)
        return forward.trunk(tensors, step, adapters)
