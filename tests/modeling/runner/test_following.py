"""Rows that follow: a rank finds their starts and drafts itself, without a driver in between."""

import socket
import threading
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from configs.wire.plan import RequestJoin, StepPlan, StepResult, StepRow, settled
from configs.wire.sampling import Sampling
from deployments.rank.messages import RunStep, StepDone, Stop
from deployments.rank.transport import Channel
from deployments.rank.worker import Worker, step_result
from modeling.batch import ForwardBatch
from modeling.runner import paged
from modeling.runner.guesses import GuessedRows, right_samples
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.modeling.parity.comparison import BLOCK_SIZE, World
from tests.modeling.parity.test_medusa import CPU, with_heads, write_heads
from tests.ranks import run_in_memory

COUNT, NUM_STEPS = 2, 20
SAMPLING = Sampling(temperature=0.9, seed=8)
PROMPTS = [[5, 9, 33, 7, 8, 40, 41], list(range(3, 3 + BLOCK_SIZE - 1))]
"""The second one ends one position before a block does."""


def start(world: World, folder: Path, group: TensorParallel) -> ModelRunner:
    config = with_heads(world.model("llama", "gqa"), write_heads(folder / str(group.rank)))
    return load_paged(config, group, CPU).allocate()


def block(slot: int, index: int) -> int:
    return 1 + 2 * index + slot


def plans() -> list[StepPlan]:
    """Two prompts, then steps that follow each other; no plan waits for a result."""
    joins = [RequestJoin(i, tokens, len(tokens), -1, SAMPLING) for i, tokens in enumerate(PROMPTS)]
    rows = [StepRow(i, 0, len(each), [block(i, 0)], True) for i, each in enumerate(PROMPTS)]
    made = [StepPlan(0, 1, joins, rows, [], [], COUNT)]
    for number in range(1, NUM_STEPS):
        rows = []
        for slot, prompt in enumerate(PROMPTS):
            # As if no guess were right in any step before, and as if all were.
            first, end = (len(prompt) + (number - 1) * each for each in (1, 1 + COUNT))
            new = range(-(-(end + 1) // BLOCK_SIZE), -(-(end + COUNT + 2) // BLOCK_SIZE))
            if number == 1:
                new = range(1, new.stop)
            blocks = [block(slot, index) for index in new]
            length = end + COUNT + 2 - first
            rows.append(StepRow(slot, first, length, blocks, True, follows=COUNT))
        made.append(StepPlan(0, number + 1, [], rows, [], [], COUNT))
    return made


def answers(results: Sequence[StepResult]) -> tuple[list[list[int]], set[int]]:
    """The texts that the results make, and how many tokens of drafts were right."""
    texts, accepted = [list(each) for each in PROMPTS], set()
    before: Sequence[StepRow] = ()
    last: StepResult | None = None
    for plan, result in zip(plans(), results, strict=True):
        rows: Sequence[StepRow] = plan.rows
        if last is not None:
            rows = settled(rows, before, last.tokens, last.guesses)
        left = list(result.tokens)
        for text, row in zip(texts, rows, strict=True):
            assert row.start + row.length - len(row.drafts) == len(text)
            own, left = left[: row.num_samples], left[row.num_samples :]
            right = [draft == token for draft, token in zip(row.drafts, own, strict=False)]
            count = (*right, False).index(False)
            text += own[: count + 1]
            if row.drafts:
                accepted.add(count)
        assert not left
        before, last = rows, result
    return texts, accepted


def plain_texts(runner: ModelRunner) -> list[list[int]]:
    """What is answered token by token, as long as all guesses could make it."""
    texts = []
    for slot, prompt in enumerate(PROMPTS):
        text, most = list(prompt), len(prompt) + NUM_STEPS * (1 + COUNT)
        joins, start = [RequestJoin(slot, text[:], len(text), -1, SAMPLING)], 0
        while len(text) < most:
            new = range(-(-start // BLOCK_SIZE), -(-len(text) // BLOCK_SIZE))
            blocks = [block(slot, index) for index in new]
            row = StepRow(slot, start, len(text) - start, blocks, True)
            start, batch = len(text), ForwardBatch(joins, [row])
            text += runner.step(batch).wait().tokens
            joins = []
        texts.append(text)
    return texts


def known_guesses(texts: list[list[int]], *given: Any) -> GuessedRows:
    """Guess what comes, some tokens wrong; instead of heads."""
    _, count, rows, _, layout, _, sampled = given
    right = right_samples(count, rows, layout, sampled)
    found = []
    for row, at in zip(rows, right.at.tolist(), strict=True):
        first = layout.sample_positions[at] + 1
        text = texts[row.batch_slot]
        wanted = range(first, first + count)
        found.append([text[at] ^ (at * at % 13 < 5) if at < len(text) else 0 for at in wanted])
    return GuessedRows(torch.tensor(found), right.rows)


def worked(runner: ModelRunner) -> list[StepResult]:
    """What a worker reports of plans that were all sent before it began."""
    ours, theirs = socket.socketpair()
    channel = Channel(ours)
    for plan in plans():
        channel.send(msgspec.msgpack.encode(RunStep(plan)))
    thread = threading.Thread(target=Worker(runner, 0, Channel(theirs)).run, daemon=True)
    thread.start()
    found = []
    for _ in range(NUM_STEPS):
        frame = channel.receive()
        assert frame is not None, "the rank hung up"
        found.append(msgspec.msgpack.decode(frame, type=StepDone).result)
    channel.send(msgspec.msgpack.encode(Stop()))
    thread.join(10.0)
    channel.close()
    return found


def stepped(world: World, folder: Path, group: TensorParallel) -> list[StepResult]:
    """The same on one of several ranks, in its thread."""
    runner = start(world, folder, group)
    batches = [(plan, ForwardBatch(plan.joins, plan.rows, plan.guesses)) for plan in plans()]
    outputs = [(plan, runner.step(batch)) for plan, batch in batches]
    return [step_result(plan, output.wait(), 0.0) for plan, output in outputs]


def test_steps_follow_each_other_without_a_driver(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens are those without drafts, over blocks' ends, on one rank and on two."""
    plain = plain_texts(start(world, tmp_path, SingleRank()))
    monkeypatch.setattr(paged, "guess", partial(known_guesses, plain))
    found = [worked(start(world, tmp_path, SingleRank()))]
    found += run_in_memory(2, partial(stepped, world, tmp_path))
    for results in found:
        texts, accepted = answers(results)
        assert accepted == {0, 1, 2}
        for text, own in zip(texts, plain, strict=True):
            assert text == own[: len(text)]
            assert len(text) > 2 * BLOCK_SIZE
