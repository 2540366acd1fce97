"""Ranks that keep books instead of tensors.

They execute plans literally and look at everything that a real rank would trust: that the
positions below a row were computed, in these very blocks, from these tokens, with this adapter,
by this step or one before it; that nothing is reused while a plan in flight
names it. The next token is a hash of the adapter, of all tokens before it and of the rope set of
each, so that any mix-up shows as other tokens than the request gives alone.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from msgspec.structs import replace

from configs.kv_groups import KvGroup
from configs.rope_sets import RopeSets
from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import (
    AdapterLoad,
    Capacity,
    PromptReport,
    RequestJoin,
    StepPlan,
    StepResult,
    StepRow,
    TokenLogprobs,
    settled,
)
from configs.wire.sampling import FinishReason, Pooling, Sampling
from tests.strategies import VOCABULARY, Arrive

START = 17
"""The state of a sequence before its first token."""


def link(state: int, token: int, rope_set: int, adapter: AdapterKey | None) -> int:
    """The state after one more token: it depends on each token so far, and on its adapter."""
    return hash((state, token, rope_set, adapter or 0))


def rope_set(sets: RopeSets | None, prompt: int, known: int, position: int) -> int:
    """transformers' rule: what a forward of `known` tokens computes, by its own length.

    Where keys are kept, it is the forward that computed the position: the prompt's or its own.
    """
    if sets is None:
        return 0
    if sets.recompute:
        return int(known > sets.border)
    return int(max(prompt, position + 1) > sets.border)


def next_token(state: int) -> int:
    """What the model says after these tokens."""
    return hash((state, 99)) % VOCABULARY


def states_of(tokens: Sequence[int], arrival: Arrive, sets: RopeSets | None) -> list[int]:
    """The state after each token of a sequence that is computed when all of them are known."""
    state, states, prompt = START, [], len(arrival.prompt)
    for position, token in enumerate(tokens):
        own = rope_set(sets, prompt, len(tokens), position)
        state = link(state, token, own, arrival.adapter_at(position))
        states.append(state)
    return states


def alone(arrival: Arrive, sets: RopeSets | None) -> tuple[list[int], FinishReason]:
    """What a request generates when nothing else happens: the slower truth."""
    stopping, generated = arrival.stopping, list[int]()
    if not stopping.max_new_tokens:
        return generated, FinishReason.LENGTH
    while True:
        states = states_of([*arrival.prompt, *generated], arrival, sets)
        token = next_token(states[-1])
        generated.append(token)
        if token in stopping.stop_token_ids and len(generated) >= stopping.min_new_tokens:
            return generated, FinishReason.STOP_TOKEN
        if len(generated) == stopping.max_new_tokens:
            return generated, FinishReason.LENGTH


def about(arrival: Arrive, sets: RopeSets | None) -> tuple[list[TokenLogprobs], bytes]:
    """What the model reports about a prompt: each token's score, and an embedding."""
    states = states_of(arrival.prompt, arrival, sets)
    scores = [TokenLogprobs(score(state), [], []) for state in states[1:]]
    return scores, embedding(states)


def score(state: int) -> float:
    """The logprob of the token that led to this state."""
    return -float(state % 1000003)


def embedding(states: list[int]) -> bytes:
    """What is pooled from a prompt's states."""
    return str(sum(states)).encode()


@dataclass
class Occupant:
    """What a rank keeps in a batch slot; known: how many tokens it joined with.

    guessed_wrong: its last row had a wrong draft: one more may be in flight behind that.
    behind: what recurrent layers have of it: how many tokens, and the state after the last one.
    """

    tokens: list[int]
    slot: int
    adapter: AdapterKey | None
    sampling: Sampling
    prompt_length: int
    sets: RopeSets | None
    known: int
    active_from: int
    matcher: int = -1
    tables: list[list[int]] = field(default_factory=list)
    guessed_wrong: bool = False
    behind: tuple[int, int] = (0, 0)

    def cell(self, index: int, group: KvGroup, position: int) -> tuple[int, int]:
        """The block and offset of a position in a KV group."""
        return self.tables[index][position // group.block_size], position % group.block_size

    def rope_set(self, position: int) -> int:
        """The set that this position must take."""
        return rope_set(self.sets, self.prompt_length, self.known, position)

    def states(self, stop: int) -> list[int]:
        """The state after each of the first `stop` tokens."""
        state, states = START, []
        for position, token in enumerate(self.tokens[:stop]):
            adapter = self.adapter if position >= self.active_from else None
            state = link(state, token, self.rope_set(position), adapter)
            states.append(state)
        return states


@dataclass(frozen=True)
class Cell:
    """What one position of a block holds: the state there, by which step, of which KV group."""

    state: int
    step: int
    group: int


@dataclass(frozen=True)
class Named:
    """What a plan in flight names."""

    batch_slots: frozenset[int]
    blocks: frozenset[int]
    slots: frozenset[int]


class FakeRanks:
    """A group of ranks as a set of books."""

    def __init__(self, capacity: Capacity, num_places: int, epoch: int) -> None:
        self.capacity = capacity
        self.num_places = num_places
        self.epoch = epoch
        self.occupants: dict[int, Occupant] = {}
        self.cache: dict[tuple[int, int], Cell] = {}  # by block and offset
        self.host: dict[AdapterKey, AdapterShape] = {}
        self.slots: dict[int, tuple[AdapterKey, list[list[int]]]] = {}
        self.slot_of_page: dict[tuple[int, int], int] = {}  # (projection, page): slot
        self.loading: dict[AdapterKey, int] = {}  # slot
        self.refused: set[AdapterKey] = set()  # keys that some rank had no room for
        # number: the texts that its lexer has continued; the same text adds no state.
        self.matchers: dict[int, set[tuple[int, ...]]] = {}
        self.wear = 1000
        self.in_flight: deque[Named] = deque()
        self.last_step = 0
        self.last: tuple[list[StepRow], StepResult] | None = None
        self.kept_now: dict[int, tuple[int, int]] = {}  # by the number of kept states

    def stage(self, key: AdapterKey, shape: AdapterShape) -> bool:
        """Keep an adapter if there is room for its bytes, and more than that there never is."""
        assert key not in self.host, f"adapter {key} staged twice"
        taken = sum(each.host_bytes for each in self.host.values())
        room = self.capacity.host_bytes - taken
        if room < shape.host_bytes <= self.capacity.host_bytes:
            assert key not in self.refused, f"adapter {key} is tried again without room for it"
            self.refused.add(key)
            return False
        if shape.host_bytes <= self.capacity.host_bytes:
            self.host[key] = shape
        return True

    def loaded(self, key: AdapterKey) -> None:
        """The load is done on all ranks; the scheduler gets the report next."""
        del self.loading[key]

    def execute(self, plan: StepPlan) -> StepResult:
        assert plan.epoch == self.epoch
        assert not plan.empty
        assert plan.step == self.last_step + 1 or self.last_step == 0
        self.last_step = plan.step
        for load in plan.loads:
            self._load(load)
        self._drop(plan)
        for join in plan.joins:
            self._join(join)
        self._append_blocks(plan.rows)
        plan = self._settled(plan)
        void = [row for row in plan.rows if self._is_void(row)]
        for row in plan.rows:
            if row not in void:
                self.occupants[row.batch_slot].tokens += row.drafts
        # As in a layer: all keys and values of the step are stored before any are read.
        for row in plan.rows:
            self._store(row, plan.step, row in void)
        for row in plan.rows:
            if row not in void:
                self._verify(row)
                self._recur(row)
        faults = self._follow(plan, void)
        tokens, logprobs = self._compute(plan, dict(faults), void)
        occupants = [self.occupants[row.batch_slot] for row in plan.rows]
        self.in_flight.append(
            Named(
                batch_slots=frozenset(row.batch_slot for row in plan.rows),
                blocks=frozenset(block for row in plan.rows for block in self._used(row)),
                slots=frozenset(occupant.slot for occupant in occupants) - {-1},
            )
        )
        reports = [self._report(i, row) for i, row in enumerate(plan.rows) if self._tells(row)]
        result = StepResult(plan.epoch, plan.step, tokens, logprobs, reports=reports or None)
        guesses = [self._guess(row, plan.guesses) for row in plan.rows] if plan.guesses else None
        self.last = plan.rows, replace(result, faults=faults or None, guesses=guesses)
        return self.last[1]

    def _settled(self, plan: StepPlan) -> StepPlan:
        """Find where rows begin that follow those of the step before; they may reach no further."""
        if all(row.follows < 0 for row in plan.rows):
            return plan
        assert self.last is not None
        before, result = self.last
        assert result.step == plan.step - 1
        rows = settled(plan.rows, before, result.tokens, result.guesses)
        for row, wide in zip(rows, plan.rows, strict=True):
            assert wide.start <= row.start, "before what it may reach"
            assert row.start + row.length <= wide.start + wide.length, "behind what it may reach"
        return replace(plan, rows=rows)

    def applied(self, plan: StepPlan) -> None:
        self.in_flight.popleft()

    def _guess(self, row: StepRow, count: int) -> list[int]:
        """What heads guess, which is right at times; some adapters have none."""
        has_heads = (self.occupants[row.batch_slot].adapter or 0) % 3 != 1
        return [4] * count if row.samples and has_heads else []

    def _load(self, load: AdapterLoad) -> None:
        assert load.key in self.host, f"adapter {load.key} is not staged"
        assert 0 <= load.slot < self.capacity.adapter_slots
        assert [len(pages) for pages in load.pages] == list(self.host[load.key].num_pages)
        assert load.key not in self.loading, f"adapter {load.key} is loaded twice at once"
        named = {slot for plan in self.in_flight for slot in plan.slots}
        named |= set(self.loading.values())
        assert load.slot not in named, (
            f"slot {load.slot} is named by a plan in flight or being loaded"
        )
        self.loading[load.key] = load.slot
        self.slot_of_page = {
            page: slot for page, slot in self.slot_of_page.items() if slot != load.slot
        }
        for index, pages in enumerate(load.pages):
            assert len(set(pages)) == len(pages)
            for page in pages:
                assert 0 <= page < self.capacity.adapter_pages
                owner = self.slot_of_page.get((index, page))
                assert owner is None or owner not in named, f"page {page} is in use"
                self.slot_of_page[index, page] = load.slot
        self.slots[load.slot] = (load.key, load.pages)

    def _drop(self, plan: StepPlan) -> None:
        for key in plan.drops:
            assert key in self.host or key in self.refused, f"{key} is dropped but not staged"
            assert key not in self.loading, f"adapter {key} is dropped while it is loaded"
            self.host.pop(key, None)
            self.refused.discard(key)

    def _join(self, join: RequestJoin) -> None:
        assert 0 <= join.batch_slot < self.num_places
        for named in self.in_flight:
            assert join.batch_slot not in named.batch_slots, (
                f"batch slot {join.batch_slot} is in use"
            )
        assert join.adapter_slot not in self.loading.values(), (
            "a row would wait for its adapter's bytes"
        )
        adapter = None if join.adapter_slot < 0 else self.slots[join.adapter_slot][0]
        self.occupants[join.batch_slot] = Occupant(
            list(join.tokens),
            join.adapter_slot,
            adapter,
            join.sampling,
            join.prompt_length,
            self.capacity.rope_sets,
            len(join.tokens),
            join.active_from,
            join.matcher,
            [[] for _ in self.capacity.groups],
        )
        if join.state >= 0:
            self.occupants[join.batch_slot].behind = self.kept_now[join.state]
        if join.matcher >= 0:
            assert join.matcher in self.matchers, "a row would wait for its matcher"
            generated = tuple(join.tokens[join.prompt_length :])
            self.matchers[join.matcher].update(generated[:i] for i in range(len(generated)))
        assert (join.matcher >= 0) == bool(join.sampling.constraint)
        assert 0 < join.prompt_length <= len(join.tokens)

    def _append_blocks(self, rows: list[StepRow]) -> None:
        fresh: set[int] = set()
        for row in rows:
            occupant, left = self.occupants[row.batch_slot], list(row.blocks)
            for group, table in zip(self.capacity.groups, occupant.tables, strict=True):
                while len(table) < group.blocks(row.start + row.length):
                    block = left.pop(0)
                    if (len(table) + 1) * group.block_size > row.start:
                        assert block not in fresh, f"block {block} is given to two requests"
                        fresh.add(block)
                    table.append(block)
            assert not left, "more blocks than the row needs"
        for named in self.in_flight:
            assert fresh.isdisjoint(named.blocks), "a block is given away under a plan in flight"

    def _used(self, row: StepRow) -> list[int]:
        """The blocks that a row reads or writes."""
        groups = zip(self.capacity.groups, self.occupants[row.batch_slot].tables, strict=True)
        found = [
            block for group, table in groups for block in table[group.first_block(row.start) :]
        ]
        assert all(0 <= block < self.capacity.num_blocks for block in found), "a block is missing"
        return found

    def _verify(self, row: StepRow) -> None:
        """Everything that attention over this row would read is there."""
        occupant, used = self.occupants[row.batch_slot], self._used(row)
        assert row.length > 0
        wanted = {occupant.rope_set(row.start + i) for i in range(row.length)}
        assert wanted == {row.rope_set}, f"rope set {row.rope_set} instead of {wanted}"
        assert row.start + row.length <= len(occupant.tokens), "a token is not known"
        assert len(set(used)) == len(used), "a block twice in a request's tables"
        states = occupant.states(row.start)
        for number, group in enumerate(self.capacity.groups):
            for position in range(group.first_seen(row.start), row.start):
                cell = self.cache.get(occupant.cell(number, group, position))
                assert cell is not None, f"position {position} is not cached"
                found = (cell.state, cell.group)
                assert found == (states[position], number), f"position {position} is another's"
        if occupant.slot >= 0:
            key, pages = self.slots[occupant.slot]
            assert key == occupant.adapter, "another adapter is in the slot"
            for index, each in enumerate(pages):
                assert all(self.slot_of_page[index, page] == occupant.slot for page in each), (
                    "page taken"
                )

    def _recur(self, row: StepRow) -> None:
        """Recurrent layers go on from what is before the row, and keep what is behind a position.

        Every number holds one state, which the next one replaces.
        """
        if self.capacity.kept_states is None:
            assert not row.keeps
            return
        occupant, end = self.occupants[row.batch_slot], row.start + row.length
        states = [0, *occupant.states(end)]
        if row.start:
            assert occupant.behind == (row.start, states[row.start]), "another's state"
        for position, number in row.keeps:
            assert row.start < position <= end
            assert 0 <= number < self.capacity.kept_states
            self.kept_now[number] = position, states[position]
        occupant.behind = end, states[end]

    def _is_void(self, row: StepRow) -> bool:
        """Whether a row begins behind a wrong draft; then nothing of it may ever be used."""
        occupant = self.occupants[row.batch_slot]
        void = row.start >= len(occupant.tokens)
        assert occupant.guessed_wrong or not void, "a token is not known"
        occupant.guessed_wrong = False
        return void

    def _store(self, row: StepRow, step: int, void: bool) -> None:
        """Write keys and values; a position of a block is written once in a step."""
        occupant, end = self.occupants[row.batch_slot], row.start + row.length
        assert end <= len(occupant.tokens) or void, "a token is not known"
        states = [-1] * end if void else occupant.states(end)
        for number, group in enumerate(self.capacity.groups):
            for position in range(row.start, end):
                at = occupant.cell(number, group, position)
                old = self.cache.get(at)
                assert old is None or old.step < step, "written twice in a step"
                self.cache[at] = Cell(states[position], step, number)

    def _tells(self, row: StepRow) -> bool:
        occupant = self.occupants[row.batch_slot]
        if occupant.sampling.pooling is not Pooling.NONE:
            return True
        return occupant.sampling.prompt_logprobs >= 0 and row.start < occupant.prompt_length - 1

    def _report(self, index: int, row: StepRow) -> PromptReport:
        """Each token's score at the position before it; the embedding with the last position."""
        occupant, end = self.occupants[row.batch_slot], row.start + row.length
        scores = []
        if occupant.sampling.prompt_logprobs >= 0:
            states = occupant.states(min(end + 1, occupant.prompt_length))[row.start + 1 :]
            scores = [TokenLogprobs(score(state), [], []) for state in states]
        pools = occupant.sampling.pooling is not Pooling.NONE and end == occupant.prompt_length
        pooled = embedding(occupant.states(end)) if pools else b""
        return PromptReport(index, row.start + 1, scores, pooled)

    def _follow(self, plan: StepPlan, void: list[StepRow]) -> list[tuple[int, str]]:
        """The rows with a matcher at its limits; all that share a lexer are.

        A draft's tokens wear it out too, be they wrong.
        """
        faults = []
        for index, row in enumerate(plan.rows):
            occupant = self.occupants[row.batch_slot]
            number, end = occupant.matcher, row.start + row.length
            if row.samples and number in self.matchers and row not in void:
                text = occupant.tokens[occupant.prompt_length : end]
                cuts = range(len(text) - len(row.drafts), len(text) + 1)
                self.matchers[number].update(tuple(text[:cut]) for cut in cuts)
                if len(self.matchers[number]) > self.wear:
                    faults.append((index, "worn"))
        return faults

    def _compute(
        self, plan: StepPlan, faults: dict[int, str], void: list[StepRow]
    ) -> tuple[list[int], list[TokenLogprobs | None] | None]:
        """Sample, and keep the sampled tokens."""
        tokens: list[int] = []
        logprobs: list[TokenLogprobs | None] = []
        for index, row in enumerate(plan.rows):
            occupant, end = self.occupants[row.batch_slot], row.start + row.length
            if row in void:
                tokens += [-1] * row.num_samples
                logprobs += [None] * row.num_samples
            elif row.samples:
                states = occupant.states(end)
                assert len(occupant.tokens) == end, "sampling would overwrite a token"
                sampled = [next_token(state) for state in states[-row.num_samples :]]
                if index in faults:
                    sampled = [VOCABULARY] * row.num_samples
                tokens += sampled
                # What follows the first wrong token of a draft is not known.
                del occupant.tokens[end - len(row.drafts) :]
                for draft, token in zip((*row.drafts, None), sampled, strict=True):
                    occupant.tokens.append(token)
                    if draft != token:
                        occupant.guessed_wrong = draft is not None
                        break
                wants_logprobs = occupant.sampling.logprobs >= 0
                logprobs += [
                    TokenLogprobs(-float(token), [], []) if wants_logprobs else None
                    for token in sampled
                ]
        return tokens, logprobs if any(each is not None for each in logprobs) else None
