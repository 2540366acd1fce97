"""Hand-made batches for a runner: what a scheduler would send, with no scheduler in between."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.kv_groups import KvGroup
from configs.wire.plan import PromptReport, RequestJoin, StepRow, TokenLogprobs
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch, SampledTokens, StepOutput
from modeling.runner.paged import ModelRunner


@dataclass(frozen=True)
class Asked:
    """One request: `chunk` tokens of its prompt a step, joining at step `joins_at`.

    rejoins_at: after how many tokens of its answer it is preempted: it gives its blocks back and
    joins once more, with all its tokens; None for never. active_from: as in `RequestJoin`.
    """

    prompt: Sequence[int]
    num_tokens: int
    slot: int = -1
    sampling: Sampling = field(default_factory=Sampling)
    chunk: int = 10**6
    joins_at: int = 0
    rejoins_at: int | None = None
    active_from: int = 0


@dataclass
class Answer:
    """What came back for one request; prompts: what each of its rows told about its prompt."""

    tokens: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    prompts: list[PromptReport] = field(default_factory=list)


class BlockPile:
    """Blocks in a shuffled order, so that no table is a run of neighbours."""

    def __init__(self, num_blocks: int, block_size: int, groups: tuple[KvGroup, ...] = ()) -> None:
        self._free = list(range(num_blocks))
        random.Random(num_blocks).shuffle(self._free)
        self._groups = groups or (KvGroup(block_size),)
        self._tables: dict[int, list[list[int]]] = {}
        self._gone: dict[int, list[int]] = {}

    def reach(self, place: int, end: int, start: int = 0) -> list[int]:
        """The blocks that a place lacks to hold positions 0 .. end - 1, group by group.

        start: of the next row, which gives back what it does not need, to be given out next.
        """
        tables = self._tables.setdefault(place, [[] for _ in self._groups])
        gone = self._gone.setdefault(place, [0] * len(self._groups))
        taken: list[int] = []
        for index, (group, table) in enumerate(zip(self._groups, tables, strict=True)):
            first = min(group.first_block(start), len(table))
            self._free += table[gone[index] : first]
            gone[index] = max(gone[index], first)
            new = [self._free.pop() for _ in range(group.blocks(end) - len(table))]
            table += new
            taken += new
        return taken

    def release(self, place: int) -> None:
        """Take a place's blocks back, to be given out last."""
        pairs = zip(self._tables.pop(place), self._gone.pop(place), strict=True)
        self._free[:0] = [block for table, first in pairs for block in table[first:]]


@dataclass
class _Run:
    """How far one request is. known: the tokens that it brought when it last joined."""

    place: int
    asked: Asked
    answer: Answer
    known: list[int]
    matcher: int = -1
    computed: int = 0
    rejoined: bool = False

    @property
    def done(self) -> bool:
        """Whether all is computed: the last token is sampled and never computed."""
        return self.computed >= len(self.asked.prompt) + max(self.asked.num_tokens, 1) - 1

    def take_part(self, batch: ForwardBatch, pile: BlockPile) -> None:
        """Add this request's row, if it has one in this step, and its join before the first."""
        if self.done or self._pauses(pile):
            return
        asked, start, known = self.asked, self.computed, len(self.known)
        if start == 0:
            tokens, length = list(self.known), len(asked.prompt)
            how = (asked.slot, asked.sampling, self.matcher, asked.active_from)
            batch.joins.append(RequestJoin(self.place, tokens, length, *how))
        length = min(asked.chunk, known - start) if start < known else 1
        self.computed = end = start + length
        blocks = pile.reach(self.place, end, start)
        samples = end >= known and asked.num_tokens > 0
        batch.rows.append(StepRow(self.place, start, length, blocks, samples))

    def _pauses(self, pile: BlockPile) -> bool:
        """Whether a preempted request waits for its tokens; with all of them it starts anew."""
        prompt, after = list(self.asked.prompt), self.asked.rejoins_at
        if after is None or self.rejoined or self.computed < len(prompt) + after - 1:
            return False
        if len(self.answer.tokens) < after:
            return True
        pile.release(self.place)
        self.known = prompt + self.answer.tokens
        self.computed, self.rejoined = 0, True
        return False


def generate(
    runner: ModelRunner, requests: Sequence[Asked], num_blocks: int, block_size: int
) -> list[Answer]:
    """Run all requests together, one step ahead: step n + 1 goes out before n is waited for."""
    pile = BlockPile(num_blocks, block_size, runner.report.kv_groups)
    answers = [Answer() for _ in requests]
    prepared = {"": -1}
    for constraint in {asked.sampling.constraint: None for asked in requests}:
        if constraint:
            prepared[constraint] = len(prepared)
            assert runner.prepare(prepared[constraint], constraint, []) == ""
    runs = [
        _Run(place, asked, answer, list(asked.prompt), prepared[asked.sampling.constraint])
        for place, (asked, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    flying: list[tuple[list[StepRow], StepOutput]] = []
    step = 0
    while not all(run.done for run in runs):
        batch = ForwardBatch([], [])
        for run in runs:
            if step >= run.asked.joins_at:
                run.take_part(batch, pile)
        if batch.rows:
            flying.append((batch.rows, runner.step(batch)))
        if len(flying) > (1 if batch.rows else 0):
            _note(answers, *_landed(flying))
        step += 1
    while flying:
        _note(answers, *_landed(flying))
    return answers


def _landed(
    flying: list[tuple[list[StepRow], StepOutput]],
) -> tuple[list[StepRow], SampledTokens]:
    rows, output = flying.pop(0)
    return rows, output.wait()


def _note(answers: list[Answer], rows: list[StepRow], sampled: SampledTokens) -> None:
    for told in sampled.reports or ():
        answers[rows[told.row].batch_slot].prompts.append(told)
    places = [row.batch_slot for row in rows if row.samples]
    logprobs = sampled.logprobs or [None] * len(places)
    for place, token, own in zip(places, sampled.tokens, logprobs, strict=True):
        answers[place].tokens.append(token)
        answers[place].logprobs.append(own)
