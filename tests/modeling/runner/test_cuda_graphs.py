"""Captured steps: how they are padded, and that replays change nothing, on any machine."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.engine import CacheConfig, LimitsConfig, SpeculationConfig, SpeculationKind
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.reference import reference_batch
from modeling.adapters.kernels.select import AdapterStepPlan
from modeling.adapters.latents import LatentMap
from modeling.adapters.product import AdapterData, ExpertAdapters, OutputSlice
from modeling.adapters.vocabulary import VocabularyAdapters
from modeling.attention.base import AttentionSpec, AttentionStep, GraphAttention, Words
from modeling.attention.kv_cache import LayerCache
from modeling.attention.kv_layout import allocate_blocks
from modeling.attention.sdpa import SdpaAttention
from modeling.batch import ForwardBatch
from modeling.runner.block_tables import BatchSize
from modeling.runner.captures import StepGraphs, checked_sizes
from modeling.runner.cuda_graphs import (
    SIZES,
    DecodeGraphs,
    GraphParts,
    PaddedStep,
    Record,
    StepOutputs,
    graph_sizes,
    size_for,
    step_bytes,
)
from modeling.runner.input_batch import InputBatch, StepLayout
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank
from tests.modeling.parity.comparison import World, engine_config, place_all
from tests.modeling.stepping import Asked, generate

CPU = torch.device("cpu")


NUM_BLOCKS, BLOCK_SIZE = 96, 16
MIXES = [
    ((), (-1,)),
    (("plain", "dora", "trained"), (-1, 0, 1, 2)),
    (("everything", "head", "embedding"), (-1, 0, 1, 2)),
]


@pytest.mark.parametrize(
    ("max_running", "expected"),
    [
        (1, (1,)),
        (2, (1, 2)),
        (5, (1, 2, 4, 5)),
        (100, (1, 2, 4, 8, 16, 32, 48, 64, 96, 100)),
        (256, SIZES),
        (1000, SIZES),
    ],
)
def test_sizes_hold_all_places_up_to_the_largest(
    max_running: int, expected: tuple[int, ...]
) -> None:
    assert graph_sizes(max_running) == expected
    assert len(expected) <= 12


def test_a_step_takes_the_next_larger_size() -> None:
    assert [size_for(SIZES, n) for n in (1, 3, 4, 33, 255, 256, 257)] == [
        1,
        4,
        4,
        48,
        256,
        256,
        None,
    ]


@pytest.mark.parametrize(
    ("most", "running", "step_tokens", "expected"),
    [
        (0, 8, 2048, ()),
        (1, 8, 2048, ((2, (1, 2, 4, 8)),)),
        (5, 8, 2048, ((2, (1, 2, 4, 8)), (4, (1, 2, 4, 8)), (6, (1, 2, 4, 8)))),
        (8, 64, 64, ((2, (1, 2, 4, 8, 16, 32)), (4, (1, 2, 4, 8, 16)), (9, (1, 2, 4, 7)))),
        (64, 2, 4, ((2, (1, 2)), (4, (1,)))),
    ],
)
def test_steps_with_drafts_have_sizes_up_to_the_limits(
    most: int, running: int, step_tokens: int, expected: Any
) -> None:
    kind = SpeculationKind.PROMPT_LOOKUP if most else SpeculationKind.NONE
    speculation = SpeculationConfig(kind=kind, max_tokens=most or 8, max_running=running)
    found = checked_sizes(LimitsConfig(max_step_tokens=step_tokens), speculation)
    assert found == expected


@dataclass(frozen=True)
class PlainStep(AttentionStep):
    words: Tensor


class PlainWords(GraphAttention):
    """Key lengths, query lengths, then whole tables."""

    def __init__(self, backend: SdpaAttention, rows: int, words: Tensor, room: int) -> None:
        self.step = PlainStep(backend, (room,) * rows, (room,) * rows, words)
        self.words = words
        self.rows = rows

    @property
    def key_lengths(self) -> Tensor:
        return self.words[: self.rows]

    def write(
        self, words: Words, key_lengths: Words, tables: Words, query_lengths: Words | None = None
    ) -> int:
        assert query_lengths is not None
        words[: self.rows] = key_lengths
        words[self.rows : 2 * self.rows] = query_lengths
        pages = words[2 * self.rows :].reshape(self.rows, -1)
        pages[:, : tables.shape[1]] = tables
        return len(words)

    def plan(self, turn: int) -> None:
        pass


class CapturedSdpa(SdpaAttention):
    """SDPA that reads a step's lengths and tables when it computes, as a graph would."""

    def graph_words(self, rows: int, max_blocks: int, queries: int = 1) -> int | None:
        return rows * (2 + max_blocks)

    def graph_form(self, rows: int, words: Tensor, queries: int = 1) -> PlainWords:
        return PlainWords(self, rows, words, queries)

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
        if not isinstance(step, PlainStep):
            return super().forward(q, cache, cu_seqlen, block_tables, step, window, sinks)
        rows, room = len(step.query_lengths), step.query_lengths[0]
        assert cu_seqlen.tolist() == [row * room for row in range(rows + 1)]
        keys, queries = step.words[: 2 * rows].view(2, rows).tolist()
        tables = step.words[2 * rows :].view(rows, -1)
        own = [row * room + at for row, count in enumerate(queries) for at in range(count)]
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        found = self.prepare(queries, keys, tables)
        out = torch.zeros_like(q)
        out[own] = super().forward(q[own], cache, starts, tables, found, window, sinks)
        return out


class LateAdapters(AdapterData):
    """The reference kernel behind a plan: rows are looked up when a step computes."""

    def __init__(self, bank: AdapterBank) -> None:
        self.bank = bank
        self.rows: tuple[Sequence[int], Sequence[int]] = ((), ())

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        self.rows = (slots, lengths)
        return 0

    def batch(
        self, num_tokens: int, num_tiles: int | None = None, has_experts: bool = False
    ) -> AdapterData:
        if num_tiles == 0:
            return BaseAlone(self.bank)
        return self if self.bank.embedding is None else LateEnds(self)

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        assert sum(self.rows[1]) == len(x)
        reference_batch(self.bank, *self.rows).add(y, x, layer, targets)

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        reference_batch(self.bank, *self.rows).latent_queries(y, x, latents)

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        reference_batch(self.bank, *self.rows).latent_values(y, x, latents)


class BaseAlone(LateAdapters):
    """A step's data without any tiles."""

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        pass

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        pass

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        pass


class LateEnds(LateAdapters):
    """With embedding and head."""

    def __init__(self, plan: LateAdapters) -> None:
        super().__init__(plan.bank)
        self._plan = plan

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        self._plan.add(y, x, layer, targets)

    def embed(self, y: Tensor, local_ids: Tensor, foreign: Tensor | None) -> None:
        self._ends().embed(y, local_ids, foreign)

    def logits(self, z: Tensor, x: Tensor) -> None:
        self._ends().logits(z, x)

    def _ends(self) -> VocabularyAdapters:
        slots = np.repeat(np.array(self._plan.rows[0]), self._plan.rows[1])
        return VocabularyAdapters(self, self.bank, slots, slots)


def make_parts() -> GraphParts:
    state = InputBatch(BatchSize(4, 40, 8), CPU)
    backend = CapturedSdpa(AttentionSpec(4, 2, 8, 1.0, 8, torch.float32, CPU))

    def forward(*_: Any) -> tuple[Tensor, None]:
        raise AssertionError

    return GraphParts(forward, [backend], state, 77, 96, torch.float32, None)


def fill(step: PaddedStep, static: Tensor, layout: StepLayout) -> int:
    host = np.full(len(static), 99, dtype=np.uint8)
    used = step.fill(host, layout)
    static[:used] = torch.from_numpy(host[:used])
    return used


def test_rows_beyond_the_step_use_what_nobody_owns() -> None:
    parts = make_parts()
    state = parts.state
    for place in (3, 1):
        state.join([RequestJoin(place, [9] * 17, 17, -1, Sampling())])
    state.layout([StepRow(3, 0, 16, [2, 5], False), StepRow(1, 0, 7, [4], False)])
    layout = state.layout([StepRow(3, 16, 1, [6], True), StepRow(1, 7, 1, [], True)])
    static = torch.zeros(step_bytes(parts, 4), dtype=torch.uint8)
    step = PaddedStep(parts, 4, static)
    used = fill(step, static, layout)
    width = 41
    attention = step.groups[0].attention
    assert step.ids_at.tolist() == [3 * width + 16, width + 7, 4 * width, 4 * width]
    assert step.positions.tolist() == [16, 7, 0, 0]
    assert step.groups[0].slots.tolist() == [48, 39, 77 * 8, 77 * 8]
    assert step.targets.tolist() == [3 * width + 17, width + 8, 4 * width, 4 * width]
    assert isinstance(attention, PlainWords)
    assert attention.words[:4].tolist() == [17, 8, 1, 1]
    tables = attention.words[8:].view(4, -1)
    assert tables[:, :3].tolist() == [[2, 5, 6], [4, 0, 0], [77] * 3, [77] * 3]
    assert used <= len(static)
    assert step.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    assert step.row_slots.tolist() == [3, 1, 4, 4]
    # A later step with fewer rows leaves nothing of this one behind.
    fill(step, static, StepLayout.empty())
    assert step.ids_at.tolist() == step.targets.tolist() == [4 * width] * 4
    assert step.groups[0].slots.tolist() == [77 * 8] * 4
    assert attention.words[:4].tolist() == [1] * 4
    assert tables[:, 0].tolist() == [77] * 4


def test_rows_with_drafts_are_padded_to_their_room() -> None:
    parts = replace(make_parts(), queries=3)
    state = parts.state
    for place in (3, 1):
        state.join([RequestJoin(place, [9] * 17, 17, -1, Sampling())])
    state.layout([StepRow(3, 0, 16, [2, 5], False), StepRow(1, 0, 7, [4], False)])
    rows = [StepRow(3, 16, 2, [6], True, drafts=(5,)), StepRow(1, 7, 1, [], True)]
    layout = state.layout(rows)
    assert layout.most_queries == 2
    static = torch.zeros(step_bytes(parts, 3), dtype=torch.uint8)
    step = PaddedStep(parts, 3, static)
    fill(step, static, layout)
    # Rows of one token come first, samples stay in the plan's order.
    width, no_id, no_slot = 41, 4 * 41, 77 * 8
    own = [width + 7, no_id, no_id, 3 * width + 16, 3 * width + 17, no_id]
    assert step.ids_at.tolist() == own + [no_id] * 3
    assert step.positions.tolist() == [7, 0, 0, 16, 17, 0, 0, 0, 0]
    assert step.groups[0].slots.tolist() == [39, no_slot, no_slot, 48, 49] + [no_slot] * 4
    assert step.last_tokens.tolist() == [3, 4, 0] + [0] * 6
    assert step.targets.tolist() == [3 * width + 17, 3 * width + 18, width + 8] + [no_id] * 6
    attention = step.groups[0].attention
    assert isinstance(attention, PlainWords)
    assert attention.words[:6].tolist() == [8, 18, 1, 1, 2, 1]
    assert step.cu_seqlens.tolist() == [0, 3, 6, 9]


def test_samples_of_padding_rows_reach_no_place() -> None:
    parts = make_parts()
    static = torch.zeros(step_bytes(parts, 4), dtype=torch.uint8)
    step = PaddedStep(parts, 4, static)
    fill(step, static, StepLayout.empty())
    before = parts.state.tokens[: parts.state.dummy_token].clone()
    parts.state.write(step.targets, torch.arange(1, 5))
    assert torch.equal(parts.state.tokens[: parts.state.dummy_token], before)


def requests(slots: Sequence[int], **fields: Any) -> list[Asked]:
    """Requests that join and leave between replays."""
    return [
        Asked(
            prompt=[(7 * i + 3 * j) % 90 + 3 for j in range(5 + 6 * i)],
            num_tokens=6 + 5 * (i % 4),
            slot=slots[i % len(slots)],
            chunk=9,
            joins_at=3 * i,
            **fields,
        )
        for i in range(9)
    ]


def capture_on_cpu(
    runner: ModelRunner,
    sizes: int | None = None,
    queries: int = 1,
    adapters: AdapterStepPlan | None = None,
    outputs: StepOutputs | None = None,
    attention: type[CapturedSdpa] = CapturedSdpa,
    record: Record = lambda compute: compute,
) -> DecodeGraphs:
    """Let a CPU runner replay its decode steps; unless `record` does more, a replay computes them.

    sizes: how many are recorded; None for all. queries: tokens that each row has room for.
    adapters: None for those of `LateAdapters`. outputs: None for its own.
    """
    page = runner.report.num_blocks
    runner._forward.cache[:] = allocate_blocks(runner._parts.cache, page + 1, CPU)
    model = runner._forward.model
    forward, width = runner._parts.graph_forward(runner._forward)
    parts = GraphParts(
        forward=forward,
        width=width,
        backends=[attention(backend.spec) for backend in runner._backends],
        state=runner._input_batch,
        dummy_block=page,
        vocab_size=model.vocab_size,
        logits_dtype=model.logits_dtype,
        adapters=adapters or LateAdapters(runner._bank),
        queries=queries,
        has_experts=isinstance(adapters, ExpertAdapters),
        is_recurrent=model.states is not None,
    )
    with torch.inference_mode():
        graphs = DecodeGraphs(parts, graph_sizes(8), CPU, record, outputs)
        for _ in graphs.sizes[:sizes]:
            graphs.record_next()
        return graphs


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=0.8, top_p=0.9, logprobs=2)])
@pytest.mark.parametrize(("names", "slots"), MIXES)
def test_replays_are_steps(
    world: World, names: tuple[str, ...], slots: tuple[int, ...], sampling: Sampling
) -> None:
    """Requests join and leave between replays; nine are too many for the largest size."""
    family = ("vocabulary", "gqa") if "head" in names else ("llama_dora", "biases")
    adapters = AdaptersConfig(
        device_pages=40,
        max_device_adapters=3,
        max_rank=16,
        host_bytes=2**26,
        vocabulary="head" in names,
    )
    config = engine_config(
        world.model(*family),
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        adapters=adapters,
    )
    runner = load_paged(config, SingleRank(), CPU).allocate()
    folders = [world.adapter(*family, name) for name in names]
    place_all(runner, [folder for folder in folders if folder is not None])
    asked = requests(slots, sampling=sampling)
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured == 0
    runner._decode_graphs = capture_on_cpu(runner)
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured > 10
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
    if sampling.logprobs >= 0:
        assert found[8].logprobs[0] is not None


@pytest.mark.parametrize("kind", ["gemma4_text", "gemma4_equal", "llama4_text", "dory"])
def test_replays_of_several_groups_are_steps(world: World, kind: str) -> None:
    """Windows, chunks, two head sizes and shared keys, from one static buffer."""
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    config = engine_config(world.model("generic", kind), cache=cache)
    runner = load_paged(config, SingleRank(), CPU).allocate()
    folder = world.adapter("generic", kind, "r8")
    place_all(runner, [folder] if folder else [])
    asked = requests((-1, 0))
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    runner._decode_graphs = capture_on_cpu(runner)
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured > 10
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]


def test_a_step_tells_whether_it_was_a_replay(world: World) -> None:
    runner = load_paged(engine_config(world.model("llama", "gqa")), SingleRank(), CPU).allocate()
    runner._decode_graphs = capture_on_cpu(runner)
    join = RequestJoin(0, [1, 2, 3], 3, -1, Sampling())
    whole, single = StepRow(0, 0, 3, [0], True), StepRow(0, 3, 1, [], True)
    assert not runner.step(ForwardBatch([join], [whole])).wait().captured
    assert runner.step(ForwardBatch([], [single])).wait().captured


def test_steps_take_a_larger_size_until_their_own_is_recorded(world: World) -> None:
    runner = load_paged(engine_config(world.model("llama", "gqa")), SingleRank(), CPU).allocate()
    asked = requests((-1, -1))
    expected = generate(runner, asked, 64, 16)
    graphs = runner._decode_graphs = capture_on_cpu(runner, 1)
    assert graphs.unrecorded == [1, 2, 4]
    runner._graphs = StepGraphs(graphs, None)
    found = generate(runner, asked, 64, 16)
    assert runner.num_captured > 10
    runner.record_next()
    assert (graphs.unrecorded, runner.num_unrecorded) == ([1, 2], 2)
    assert [answer.tokens for answer in found] == [answer.tokens for answer in expected]
