"""Captured decode steps of recurrent layers: replays are steps, and padding disturbs no state.

A tape stands in for a CUDA graph: it repeats operations on the tensors that they were recorded
with, so a number that the host read while it was recorded would stay as it was.
"""

import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from transformers.models.qwen3_5 import modeling_qwen3_5

from configs.architectures.generic import RECURRENT_TYPES
from configs.engine import CacheConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch, StepOutput
from modeling.models.generic import mixer_functions, recurrent, waits
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.modeling.models.tiny_causal import kinds
from tests.modeling.parity.comparison import World, engine_config, place_all, poison
from tests.modeling.runner.test_cuda_graphs import (
    BLOCK_SIZE,
    CPU,
    NUM_BLOCKS,
    CapturedSdpa,
    capture_on_cpu,
)
from tests.modeling.runner.test_piecewise import GatheredAdapters, Operation, Tape
from tests.modeling.stepping import Answer, Asked, generate
from tests.ranks import run_in_memory
from tests.sweeps import swept

TYPES = sorted(RECURRENT_TYPES & {*kinds()})

ON_HOST = {
    "_local_scalar_dense", "allclose", "equal", "is_nonzero", "item", "lift_fresh", "masked_select",
    "nonzero", "unique",
}  # fmt: skip
"""Operations that read values on the host, or bring them from there."""


class TapedSdpa(CapturedSdpa):
    """Attention as one operation of the tape that is recorded."""

    tape: Tape | None = None

    def forward(self, *arguments: Any, **options: Any) -> Tensor:
        tape, compute = type(self).tape, super().forward
        if tape is None:
            return compute(*arguments, **options)
        tape.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        made = compute(*arguments, **options)
        tape.operations.append((compute, arguments, options, made))
        tape.__enter__()  # type: ignore[no-untyped-call]
        return made


def reads_on_host(operation: Operation) -> bool:
    """Whether a capture of it would fail, as far as a CPU shows: sizes that values decide, too."""
    name = str(operation[0]).removeprefix("aten.").partition(".")[0]
    indices = operation[1][1] if name in ("index", "index_put_") else ()
    return name in ON_HOST or any(each is not None and each.dtype is torch.bool for each in indices)


def taped(compute: Callable[[], None]) -> Callable[[], None]:
    """Record a computation of rows that pad, as a graph does, and return its replay."""
    TapedSdpa.tape = tape = Tape()
    with tape:
        compute()
    TapedSdpa.tape = None
    assert not (read := [*filter(reads_on_host, tape.operations)]), read
    return tape.replay


def asked_of_recurrent_layers() -> list[Asked]:
    """Prompts of one token, chunks of one and that leave one, requests that are preempted."""
    lengths = (1, 9, 10, 1, 17, 5, 12, 2, 8)
    return [
        Asked(
            prompt=[(7 * i + 3 * j) % 90 + 3 for j in range(length)],
            num_tokens=8 + 5 * (i % 4),
            slot=i % 2 - 1,
            chunk=1 if i == 5 else 8,
            joins_at=2 * i,
            rejoins_at=5 if i % 3 == 1 else None,
        )
        for i, length in enumerate(lengths)
    ]


def loaded(world: World, variant: str, group: TensorParallel | None = None) -> ModelRunner:
    """A runner with an adapter, and NaN in all states."""
    cache = CacheConfig(num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    config = engine_config(world.model("mixers", variant), cache=cache)
    runner = load_paged(config, group or SingleRank(), CPU).allocate()
    ready(world, variant, runner, group)
    return runner


def ready(
    world: World, variant: str, runner: ModelRunner, group: TensorParallel | None = None
) -> None:
    """Place the adapter of the requests, over NaN."""
    poison(runner)
    folder = world.adapter("mixers", variant, "r8")
    assert folder is not None
    place_all(runner, [folder], group)


@contextmanager
def counted_replays(runner: ModelRunner, most: int) -> Iterator[None]:
    """Steps of up to `most` rows that all go on and sample must be replays, and no others."""
    real, seen = runner.step, []

    def step(batch: ForwardBatch) -> StepOutput:
        rows = batch.rows
        decodes = all(row.start and row.length == 1 and row.samples for row in rows)
        seen.append(bool(rows) and decodes and len(rows) <= most)
        before = runner.num_captured
        output = real(batch)
        assert runner.num_captured - before == seen[-1], rows
        return output

    runner.step = step  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner.step
    assert sum(seen) > 10
    assert not all(seen)


def states(runner: ModelRunner) -> list[Tensor]:
    """Copies of the batch slots' states."""
    own, count = runner._parts.weights.model.states, runner._input_batch.size.max_running
    assert own is not None
    return [state.clone() for state in own.tensors() if len(state) == count]


def replay(world: World, variant: str, count: bool = True) -> tuple[list[list[int]], ...]:
    """Tokens of launched steps, and of steps that are replayed from tapes over NaN."""
    runner, asked = loaded(world, variant), asked_of_recurrent_layers()
    launched = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    expected = states(runner)
    assert runner.num_captured == 0
    adapters = GatheredAdapters(runner._bank, 8)
    runner._decode_graphs = capture_on_cpu(
        runner, adapters=adapters, attention=TapedSdpa, record=taped
    )
    ready(world, variant, runner)
    if count:
        with counted_replays(runner, 8):
            found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        for own, other in zip(states(runner), expected, strict=True):
            torch.testing.assert_close(own, other, equal_nan=True, rtol=1e-3, atol=1e-4)
    else:
        found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    return [answer.tokens for answer in launched], [answer.tokens for answer in found]


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x.sum()),
        lambda x: x[x > 0],
        lambda x: x.nonzero(),
        lambda _: torch.tensor([1.0]),
    ],
)
@torch.inference_mode()
def test_the_tape_refuses_what_a_graph_would(read: Callable[[Tensor], Any]) -> None:
    with pytest.raises(AssertionError):
        taped(partial(read, torch.ones(3)))


FEW = ("bamba", "kimi_linear", "lfm2", "mamba", "minimax", "qwen3_5_text")
"""A type of each kind of layers."""


@pytest.mark.parametrize("variant", swept(TYPES, lambda variant: variant in FEW))
def test_replays_are_steps(world: World, variant: str) -> None:
    launched, replayed = replay(world, variant)
    assert replayed == launched


@pytest.mark.parametrize(
    "variant", swept(["falcon_h1", "kimi_linear"], lambda variant: variant == "falcon_h1")
)
def test_replays_on_two_ranks_are_steps(world: World, variant: str) -> None:
    world.adapter("mixers", variant, "r8")  # Written before both ranks look for it.

    def answers(group: TensorParallel) -> list[list[Answer]]:
        runner, asked = loaded(world, variant, group), asked_of_recurrent_layers()
        launched = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        runner._decode_graphs = capture_on_cpu(runner)
        with counted_replays(runner, 8):
            return [launched, generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)]

    for own in run_in_memory(2, answers):
        launched, replayed = [[answer.tokens for answer in each] for each in own]
        assert replayed == launched


@pytest.mark.parametrize(
    "variant",
    swept(
        ["lara_mini", "olmo_hybrid", "qwen3_5_text", "qwen3_next"], lambda variant: variant in FEW
    ),
)
def test_states_that_change_in_place(
    world: World, variant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a GPU's kernel changes them, launched and replayed."""
    expected = generate(loaded(world, variant), asked_of_recurrent_layers(), NUM_BLOCKS, BLOCK_SIZE)
    rule = inspect.unwrap(modeling_qwen3_5.torch_recurrent_gated_delta_rule)
    count = 0

    def step(
        q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor, states: Tensor, slots: Tensor,
        norm: bool,
    ) -> Tensor:  # fmt: skip
        nonlocal count
        count += 1
        q, k = (each.repeat_interleave(v.shape[2] // k.shape[2], 2) for each in (q, k))
        out, states[slots] = rule(q, k, v, g, beta, states[slots], True, norm)
        return cast(Tensor, out)

    monkeypatch.setattr(mixer_functions, "_kernel", lambda _device_type: step)
    launched, replayed = replay(world, variant)
    assert launched == replayed == [answer.tokens for answer in expected]
    assert count > 20


def test_padding_rows_disturb_no_state(world: World) -> None:
    """Three rows in a step of four: the other batch slots' states stay as they are."""
    runner = loaded(world, "qwen3_5_text")
    runner._decode_graphs = capture_on_cpu(runner)
    slots = (2, 0, 5)
    joins = [RequestJoin(slot, [5, 9, 33], 3, -1, Sampling()) for slot in slots]
    first = [StepRow(slot, 0, 3, [slot], True) for slot in slots]
    runner.step(ForwardBatch(joins, first)).wait()
    before = states(runner)
    runner.step(ForwardBatch([], [StepRow(slot, 3, 1, [], True) for slot in slots])).wait()
    assert runner.num_captured == 1
    for state, was in zip(states(runner), before, strict=True):
        same = (state == was) | (state.isnan() & was.isnan())
        changed = [slot for slot, each in enumerate(same.flatten(1).all(1).tolist()) if not each]
        assert changed == sorted(slots)


def test_the_dummys_states_are_numbers(world: World) -> None:
    """What padding rows read first must not be what was left in memory."""
    runner = loaded(world, "lfm2")
    own, dummy = runner._parts.weights.model.states, runner._input_batch.size.max_running
    assert isinstance(own, recurrent.RecurrentLayers)
    found = [each.of_slots[dummy] for layer in own._states.values() for each in layer]
    assert found
    assert not any(state.any() for state in found)


def test_layers_that_wait_for_the_device_are_launched(
    world: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    @contextmanager
    def waiting() -> Iterator[None]:
        yield
        raise RuntimeError("called a synchronizing CUDA operation")

    monkeypatch.setattr(waits, "no_waits", waiting)
    with caplog.at_level(logging.INFO, logger="loray.modeling"):
        runner = loaded(world, "qwen3_5_text")
    assert not runner._forward.model.capturable
    assert (
        "transformers' Qwen3_5GatedDeltaNet cannot be captured: the host waits in it" in caplog.text
    )
    asked = [Asked(prompt=[5, 17, 2], num_tokens=3)]
    assert len(generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)[0].tokens) == 3


@pytest.mark.parametrize("variant", ["bamba", "falcon_h1", "lfm2", "olmo_hybrid", "qwen3_5_text"])
def test_convolutions_keep_no_model_from_captures(world: World, variant: str) -> None:
    """Their weights have three dimensions, as experts' have, whose sizes the host may read."""
    assert loaded(world, variant)._forward.model.capturable
