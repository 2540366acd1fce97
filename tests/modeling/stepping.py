"""Hand-made batches for a runner: what a scheduler would send, with no scheduler in between."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.sampling import Sampling
from modeling.batch import BatchJoin, BatchRow, ForwardBatch, RowLogprobs, SampledTokens, StepOutput
from modeling.runner import ModelRunner


@dataclass(frozen=True)
class Asked:
    """One request: `chunk` tokens of its prompt a step, joining at step `joins_at`."""

    prompt: Sequence[int]
    num_tokens: int
    slot: int = -1
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int = 10**6
    joins_at: int = 0


@dataclass
class Answer:
    """What came back for one request."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[RowLogprobs | None] = field(default_factory=list)


class BlockPile:
    """Blocks in a shuffled order, so that no table is a run of neighbours."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self._free)
        self._block_size = block_size
        self._held: dict[int, int] = {}

    def reach(self, place: int, end: int) -> list[int]:
        """The blocks that a place lacks to hold positions 0 .. end - 1."""
        lacking = -(-end // self._block_size) - self._held.get(place, 0)
        self._held[place] = self._held.get(place, 0) + lacking
        return [self._free.pop() for _ in range(lacking)]


def generate(
    runner: ModelRunner, requests: Sequence[Asked], num_blocks: int, block_size: int
) -> list[Answer]:
    """Run all requests together, one step ahead: step n + 1 goes out before n is waited for."""
    pile = BlockPile(num_blocks, block_size)
    answers = [Answer() for _ in requests]
    computed = [0] * len(requests)
    flying: list[tuple[list[int], StepOutput]] = []
    step = 0
    while any(done < _length(asked) for done, asked in zip(computed, requests, strict=True)):
        batch = _batch(requests, computed, pile, step)
        flying.append(([r.place for r in batch.rows if r.samples], runner.step(batch)))
        for row in batch.rows:
            computed[row.place] = row.start + row.length
        if len(flying) > 1:
            _note(answers, *_landed(flying))
        step += 1
    while flying:
        _note(answers, *_landed(flying))
    return answers


def _length(asked: Asked) -> int:
    """Positions to compute: the last token is sampled and never computed."""
    return len(asked.prompt) + asked.num_tokens - 1


def _batch(
    requests: Sequence[Asked], computed: list[int], pile: BlockPile, step: int
) -> ForwardBatch:
    joins, rows = [], []
    for place, asked in enumerate(requests):
        start, prompt = computed[place], len(asked.prompt)
        if step < asked.joins_at or start >= _length(asked):
            continue
        if start == 0:
            joins.append(BatchJoin(place, list(asked.prompt), prompt, asked.slot, asked.sampling))
        length = min(asked.chunk, prompt - start) if start < prompt else 1
        end = start + length
        rows.append(BatchRow(place, start, length, pile.reach(place, end), end >= prompt))
    return ForwardBatch(joins, rows)


def _landed(flying: list[tuple[list[int], StepOutput]]) -> tuple[list[int], SampledTokens]:
    places, output = flying.pop(0)
    return places, output.wait()


def _note(answers: list[Answer], places: list[int], sampled: SampledTokens) -> None:
    logprobs = sampled.logprobs or [None] * len(places)
    for place, token, own in zip(places, sampled.tokens, logprobs, strict=True):
        answers[place].tokens.append(token)
        answers[place].logprobs.append(own)
