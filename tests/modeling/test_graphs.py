"""Captured steps: how they are padded (on any machine), and that replays change nothing (GPU)."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from configs.engine import AdaptersConfig, AttentionBackend, CacheConfig, Device, LimitsConfig
from configs.model import DType, ModelConfig
from configs.sampling import Sampling
from modeling.attention.base import AttentionSpec, AttentionStep, CapturedAttention, Words
from modeling.attention.sdpa import SdpaAttention
from modeling.batch import BatchJoin, BatchRow, ForwardBatch
from modeling.graphs import (
    SIZES,
    CapturedSteps,
    CaptureParts,
    PaddedStep,
    captured_sizes,
    size_for,
    step_bytes,
)
from modeling.loading import pick_device
from modeling.runner import ModelRunner
from modeling.state import PlaceState, StateSize, StepLayout
from sharding.group import SingleRank
from tests.checkpoints import write_adapter, write_llama
from tests.modeling.parity import engine_config, place_all
from tests.modeling.stepping import Answer, Asked, BlockPile, generate

CPU = torch.device("cpu")


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
    assert captured_sizes(max_running) == expected
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


class PlainWords(CapturedAttention):
    """Key lengths, then whole tables."""

    def __init__(self, backend: SdpaAttention, rows: int, words: Tensor) -> None:
        self.step = AttentionStep(backend, (1,) * rows, (1,) * rows)
        self.words = words
        self.rows = rows

    def write(self, words: Words, key_lengths: Words, tables: Words) -> int:
        words[: self.rows] = key_lengths
        words[self.rows : self.rows + tables.size] = tables.reshape(-1)
        return self.rows + tables.size

    def plan(self, turn: int) -> None:
        pass


class CapturedSdpa(SdpaAttention):
    def captured_words(self, rows: int, max_blocks: int) -> int | None:
        return rows * (1 + max_blocks)

    def captured(self, rows: int, words: Tensor) -> PlainWords:
        return PlainWords(self, rows, words)


def make_parts() -> CaptureParts:
    state = PlaceState(StateSize(4, 40, 8), CPU)
    backend = CapturedSdpa(AttentionSpec(4, 2, 8, 1.0, 8, torch.float32, CPU))

    def forward(*_: Any) -> Tensor:
        raise AssertionError

    return CaptureParts(forward, backend, state, 77, 96, torch.float32, None)


def fill(step: PaddedStep, static: Tensor, layout: StepLayout) -> int:
    host = np.full(len(static), 99, dtype=np.uint8)
    used = step.fill(host, layout)
    static[:used] = torch.from_numpy(host[:used])
    return used


def test_rows_beyond_the_step_use_what_nobody_owns() -> None:
    parts = make_parts()
    state = parts.state
    for place in (3, 1):
        state.join([BatchJoin(place, [9] * 17, 17, -1, Sampling())])
    state.layout([BatchRow(3, 0, 16, [2, 5], False), BatchRow(1, 0, 7, [4], False)])
    layout = state.layout([BatchRow(3, 16, 1, [6], True), BatchRow(1, 7, 1, [], True)])
    static = torch.zeros(step_bytes(parts, 4), dtype=torch.uint8)
    step = PaddedStep(parts, 4, static)
    used = fill(step, static, layout)
    width = 41
    assert step.ids_at.tolist() == [3 * width + 16, width + 7, 4 * width, 4 * width]
    assert step.positions.tolist() == [16, 7, 0, 0]
    assert step.slots.tolist() == [48, 39, 77 * 8, 77 * 8]
    assert step.targets.tolist() == [3 * width + 17, width + 8, 4 * width, 4 * width]
    assert isinstance(step.attention, PlainWords)
    words = step.attention.words[:16].tolist()
    assert words[:4] == [17, 8, 1, 1]
    assert words[4:] == [2, 5, 6, 4, 0, 0, 77, 77, 77, 77, 77, 77]
    assert used <= len(static)
    assert step.cu_seqlens.tolist() == [0, 1, 2, 3, 4]
    # A later step with fewer rows leaves nothing of this one behind.
    fill(step, static, StepLayout.empty())
    assert step.ids_at.tolist() == step.targets.tolist() == [4 * width] * 4
    assert step.slots.tolist() == [77 * 8] * 4
    assert step.attention.words[:8].tolist() == [1, 1, 1, 1, 77, 77, 77, 77]


def test_samples_of_padding_rows_reach_no_place() -> None:
    parts = make_parts()
    static = torch.zeros(step_bytes(parts, 4), dtype=torch.uint8)
    step = PaddedStep(parts, 4, static)
    fill(step, static, StepLayout.empty())
    before = parts.state.tokens[: parts.state.scratch_token].clone()
    parts.state.write(step.targets, torch.arange(1, 5))
    assert torch.equal(parts.state.tokens[: parts.state.scratch_token], before)


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "num_hidden_layers": 2}
NUM_BLOCKS, BLOCK_SIZE = 96, 16


def make_runner(folder: Any, **changes: Any) -> ModelRunner:
    fields: dict[str, Any] = {
        "model": ModelConfig(id=str(folder), dtype=DType.BFLOAT16),
        "device": Device.CUDA,
        "attention": AttentionBackend.FLASHINFER,
        "cache": CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE),
        "limits": LimitsConfig(max_running=12, max_step_tokens=256),
        "adapters": AdaptersConfig(device_pages=40, max_device_adapters=10, max_rank=64),
        **changes,
    }
    runner = ModelRunner(engine_config(folder, **fields), SingleRank(), pick_device(Device.CUDA))
    runner.load()
    return runner


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A model whose heads FlashInfer serves, and an adapter for it."""
    pytest.importorskip("flashinfer")
    root = tmp_path_factory.mktemp("wide")
    write_llama(root / "model", "gqa", **WIDE)
    write_adapter(root / "adapter", root / "model")
    yield root


def eager(runner: ModelRunner) -> ModelRunner:
    """The same runner, launch by launch."""
    runner._captured = None
    return runner


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


def tokens(runner: ModelRunner, asked: list[Asked]) -> list[list[int]]:
    answers: list[Answer] = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    return [answer.tokens for answer in answers]


@gpu
@pytest.mark.gpu
@pytest.mark.parametrize("slots", [(-1,), (-1, 0), (0,)], ids=["base", "mixed", "adapter"])
def test_captured_is_eager(wide: Any, slots: tuple[int, ...]) -> None:
    asked = requests(slots)
    runner = make_runner(wide / "model")
    place_all(runner, [wide / "adapter"])
    found = tokens(runner, asked)
    assert runner.num_captured > runner.num_steps // 4
    expected = tokens(eager(runner), asked)
    same = sum(a == b for a, b in zip(found, expected, strict=True))
    # Batch shapes differ by padding, so bfloat16 may tip a near tie; a fault tips them all.
    assert same >= len(asked) - 1, (found, expected)


@gpu
@pytest.mark.gpu
def test_captured_sampling_and_logprobs_are_eager(wide: Any) -> None:
    asked = requests([-1], sampling=Sampling(temperature=0.7, top_p=0.9, seed=3, logprobs=2))
    runner = make_runner(wide / "model")
    found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_captured > 0
    expected = generate(eager(runner), asked, NUM_BLOCKS, BLOCK_SIZE)
    equal = [a.tokens == b.tokens for a, b in zip(found, expected, strict=True)]
    assert sum(equal) >= len(asked) - 1
    for one, other in zip(found, expected, strict=True):
        assert one.logprobs[0] is not None
        assert other.logprobs[0] is not None
        assert one.logprobs[0].logprob == pytest.approx(other.logprobs[0].logprob, abs=0.15)


@gpu
@pytest.mark.gpu
def test_logits_of_a_replay_are_those_of_launches(wide: Any) -> None:
    runner = make_runner(wide / "model")
    captured = runner._captured
    assert captured is not None
    pile = BlockPile(NUM_BLOCKS, BLOCK_SIZE)
    for count in (3, 1, 7):  # 7 rows replay as 8: the last one is padding
        joins = [BatchJoin(p, [5 + p, 9, 33 + p], 3, -1, Sampling()) for p in range(count)]
        blocks = [pile.reach(count * 20 + p, 4) for p in range(count)]
        first = [BatchRow(p, 0, 3, blocks[p], True) for p in range(count)]
        runner.step(ForwardBatch(joins, first)).wait()
        rows = [BatchRow(p, 3, 1, [], True) for p in range(count)]
        layout = runner._state.layout(rows)
        with torch.inference_mode():
            output = captured.run(layout)
            assert output is not None
            found = output.logits.float().clone()
            inputs = runner._state.inputs(layout)
            backend = runner._attention.backend
            step = backend.prepare(inputs.query_lengths, inputs.key_lengths, inputs.block_tables)
            expected = runner._forward(inputs, step, None).float()
        error = (found - expected).norm() / expected.norm()
        assert error < 2e-2, (count, float(error))


@gpu
@pytest.mark.gpu
def test_padding_rows_touch_no_place_and_no_page(wide: Any) -> None:
    runner = make_runner(wide / "model")
    join = BatchJoin(0, [5, 9, 33], 3, -1, Sampling())
    joins = [join, *(BatchJoin(p, [8, 8, 8], 3, -1, Sampling()) for p in (1, 2))]
    rows = [BatchRow(p, 0, 3, [p], True) for p in range(3)]
    runner.step(ForwardBatch(joins, rows)).wait()
    state, cache = runner._state, runner._cache
    before = state.tokens[: state.scratch_token].clone()
    pages = [layer.keys[:NUM_BLOCKS].clone() for layer in cache]
    runner.step(ForwardBatch([], [BatchRow(p, 3, 1, [], True) for p in range(3)])).wait()
    changed = (state.tokens[: state.scratch_token] != before).nonzero().flatten().tolist()
    width = state.size.max_total_tokens + 1
    assert set(changed) <= {p * width + 4 for p in range(3)}
    for layer, was in zip(cache, pages, strict=True):
        touched = (layer.keys[:NUM_BLOCKS] != was).flatten(2).any(-1).nonzero().tolist()
        assert touched == [[0, 3], [1, 3], [2, 3]]


@gpu
@pytest.mark.gpu
def test_one_step_ahead_is_step_by_step(wide: Any) -> None:
    runner = make_runner(wide / "model")
    join = BatchJoin(2, [5, 9, 33], 3, -1, Sampling())

    def batches() -> list[ForwardBatch]:
        first = ForwardBatch([join], [BatchRow(2, 0, 3, [9, 3], True)])
        return [first, *(ForwardBatch([], [BatchRow(2, 3 + i, 1, [], True)]) for i in range(20))]

    slow = [runner.step(batch).wait().tokens for batch in batches()]
    flying = [runner.step(batch) for batch in batches()]
    assert [output.wait().tokens for output in flying] == slow


@gpu
@pytest.mark.gpu
def test_a_step_never_waits_for_the_device(wide: Any) -> None:
    """Torch warns at each synchronising call; none may come from a step once it is warm."""
    runner = make_runner(wide / "model")
    place_all(runner, [wide / "adapter"])
    sampled = Sampling(temperature=0.7, top_p=0.9, top_k=7, seed=3, logprobs=1)
    for params in (Sampling(), sampled):
        asked = requests([-1, 0], sampling=params)
        generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        torch.cuda.set_sync_debug_mode("error")
        try:
            generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        finally:
            torch.cuda.set_sync_debug_mode("default")


@gpu
@pytest.mark.gpu
def test_the_measured_memory_is_enough(wide: Any) -> None:
    runner = make_runner(wide / "model", cache=CacheConfig(device_memory_fraction=0.5))
    free, total = torch.cuda.mem_get_info()
    assert total - free < 0.55 * total
    assert isinstance(runner._captured, CapturedSteps)
    assert tokens(runner, requests([-1]))[0]
