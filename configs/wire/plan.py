"""StepPlan and StepResult: the messages between the scheduler and the ranks about a step.

A plan carries differences. A request's tokens go to the ranks once, when it joins or joins again;
from then on each rank keeps them in its token buffer at the request's batch slot, and a row says
only which positions to compute. The token that step n samples is written to that buffer, so the
plan of step n + 1 can name it by position before its value is known on the host.
"""

from bisect import bisect_right
from collections.abc import Sequence

import msgspec

from configs.kv_groups import KvGroup
from configs.rope_sets import RopeSets
from configs.wire.adapters import AdapterKey
from configs.wire.sampling import Sampling


class RequestJoin(msgspec.Struct, frozen=True, array_like=True):
    """A request that joins the ranks' batch: new, or back after a preemption.

    batch_slot: index into the ranks' token buffer and block table, in [0, max_running).
    tokens: every known token id, prompt first; written to the slot's positions 0 .. len - 1.
    prompt_length: how many of `tokens` are the prompt's.
    adapter_slot: the adapter's device slot; -1 for the base model.
    matcher: the number of the matcher that all ranks compiled for its constraint; -1 without one.
    active_from: the first position that the adapter changes; those before are the base model's.
    state: the number of the kept states that it goes on from; -1: of none.
    """

    batch_slot: int
    tokens: list[int]
    prompt_length: int
    adapter_slot: int
    sampling: Sampling
    matcher: int = -1
    active_from: int = 0
    state: int = -1


class StepRow(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One request's part of a step: compute positions start .. start + length - 1.

    blocks: block indices to append to the batch slot's block tables before computing: for each KV
    group as many as it lacks for the row's end; -1 for a block that the row does not need.
    samples: whether the logits of the last position give the token at start + length.
    rope_set: the table of rotary frequencies for these positions; see configs/rope_sets.py.
    drafts: guessed tokens of the row's last positions. The row samples at each of them too, and
    at the position before them; the samples are right up to the first that is not the draft's.
    follows: -1; or the row continues what its batch slot samples in the step before, before the
    scheduler knows that. Then start .. start + length - 1 are the positions that it may reach, and
    its draft is up to so many of that step's guesses; see `settled`.
    keeps: (position, number) of states of recurrent layers to be kept by that number, as they are
    before that position; ascending.
    """

    batch_slot: int
    start: int
    length: int
    blocks: list[int]
    samples: bool
    rope_set: int = 0
    drafts: tuple[int, ...] = ()
    follows: int = -1
    keeps: tuple[tuple[int, int], ...] = ()

    @property
    def num_samples(self) -> int:
        """How many tokens the row samples; of a row that follows only once it is settled."""
        return self.samples + len(self.drafts)


def num_right(drafts: Sequence[int], sampled: Sequence[int], first: int = 0) -> int:
    """How many tokens of a draft are right: those before the first that was not sampled.

    first: the index in `sampled` of the row's first sample.
    """
    count = 0
    for draft in drafts:
        if draft != sampled[first + count]:
            break
        count += 1
    return count


def settled(
    rows: Sequence[StepRow],
    before: Sequence[StepRow],
    tokens: Sequence[int],
    guesses: Sequence[Sequence[int]] | None,
) -> list[StepRow]:
    """A step's rows once the step before it is known: those that follow get start and draft.

    before, tokens, guesses: the settled rows of the step before, and its result.
    """
    found: dict[int, tuple[int, Sequence[int]]] = {}
    first = 0
    for index, row in enumerate(before):
        num_drafts = len(row.drafts)
        right = num_right(row.drafts, tokens, first)
        start = row.start + row.length - num_drafts + right
        found[row.batch_slot] = (start, guesses[index] if guesses else ())
        first += num_drafts + row.samples
    return [_settled(row, *found[row.batch_slot]) if row.follows >= 0 else row for row in rows]


def _settled(row: StepRow, start: int, guesses: Sequence[int]) -> StepRow:
    """Begin with the last right sample of the batch slot, at `start`.

    The draft ends one position before the last one: there a row begins that follows a draft up to
    its answer's end, in vain.
    """
    room = row.start + row.length - start - 2
    drafts = tuple(guesses[: max(0, min(row.follows, room))])
    return StepRow(row.batch_slot, start, 1 + len(drafts), [], True, row.rope_set, drafts)


class AdapterLoad(msgspec.Struct, frozen=True, array_like=True):
    """Copy a staged adapter from host memory to the device, on a stream beside the steps.

    The ranks report the copy's end; only later plans have rows that use the adapter.
    slot: index into the ranks' adapter table.
    pages: for each projection, its page indices.
    """

    key: AdapterKey
    slot: int
    pages: list[list[int]]


class StepPlan(msgspec.Struct, frozen=True, array_like=True):
    """What every rank does in one step; the same bytes go to all of them.

    drops: adapters to delete from host memory (never one that a row uses).
    guesses: tokens that heads guess behind each row's last right sample; 0: heads do nothing.
    """

    epoch: int
    step: int
    joins: list[RequestJoin]
    rows: list[StepRow]
    loads: list[AdapterLoad]
    drops: list[AdapterKey]
    guesses: int = 0

    @property
    def empty(self) -> bool:
        """Whether the plan has nothing to do; it is not sent then."""
        return not (self.rows or self.loads or self.drops)


class TokenLogprobs(msgspec.Struct, frozen=True, array_like=True):
    """Natural logprobs of one sampled token and of the most likely alternatives, best first."""

    logprob: float
    top_ids: list[int]
    top_logprobs: list[float]


class PromptReport(msgspec.Struct, frozen=True, array_like=True):
    """Results about a request's prompt, for requests that need them.

    row: the row's index in the plan.
    first: the position of the first of `logprobs`; position 0 has no logprobs.
    logprobs: of the prompt's own tokens.
    embedding: or scores, float32, little-endian, in the report with the prompt's last position;
    else empty.
    """

    row: int
    first: int = 1
    logprobs: list[TokenLogprobs] = []
    embedding: bytes = b""


class StepResult(msgspec.Struct, frozen=True, array_like=True):
    """Rank 0's reply: each row's `num_samples` tokens, in the plan's order.

    logprobs: None when no row needs them, else one entry (or None) for each token.
    compute_seconds: from the step's start to its tokens on the host.
    reports: of rows with requests that need a report about their prompts; None without any.
    idle_seconds: how long the device was idle before the step; None where it cannot be measured.
    captured: whether the step replayed a CUDA graph.
    faults: (row, reason) for rows that cannot follow their constraints any further; their
    tokens have no meaning.
    guesses: for each row, what heads guess behind its last right sample; [] for rows without heads
    or samples. None where the plan wants none.
    """

    epoch: int
    step: int
    tokens: list[int]
    logprobs: list[TokenLogprobs | None] | None = None
    compute_seconds: float = 0.0
    reports: list[PromptReport] | None = None
    idle_seconds: float | None = None
    captured: bool = False
    faults: list[tuple[int, str]] | None = None
    guesses: list[list[int]] | None = None


class Capacity(msgspec.Struct, frozen=True):
    """The ranks' memory, measured at start; the group's is the minimum over its ranks.

    num_blocks, block_size: of the KV cache; block_size in tokens, the smallest of all groups.
    projections: names of the linear maps that adapters may change; lists with an entry for each
    projection have this order.
    adapter_pages: pages in each projection's pool.
    adapter_slots: adapters that may be on the device at once.
    host_bytes: the host tier of each rank.
    max_total_tokens: the longest sequence that the ranks' buffers take.
    chunked: whether a sequence may be computed in several rows.
    prefix_caching: whether requests can share blocks.
    pool_pages: pages of each projection's pool where they differ; empty: adapter_pages each.
    rope_sets: set where rotary frequencies depend on a sequence's length; else None.
    kv_groups: all groups' blocks; empty: one group that needs its blocks to the end.
    drafts: whether rows may have drafts.
    draft_heads: how many tokens heads of the ranks guess; None: drafts are looked up in the text.
    kept_states: how many copies of a sequence's states the ranks keep; None: the model has none, so
    that its sequences can share blocks without.
    kept_after: tokens behind kept states, at least, after which a request's own are worth a copy.
    It cuts a prompt's row in two, one call more of each recurrent layer; a guess, not measured.
    """

    num_blocks: int
    block_size: int
    projections: tuple[str, ...]
    adapter_pages: int
    adapter_slots: int
    host_bytes: int
    max_total_tokens: int
    chunked: bool = True
    prefix_caching: bool = True
    pool_pages: tuple[int, ...] = ()
    rope_sets: RopeSets | None = None
    kv_groups: tuple[KvGroup, ...] = ()
    drafts: bool = True
    draft_heads: int | None = None
    kept_states: int | None = None
    kept_after: int = 256

    @property
    def groups(self) -> tuple[KvGroup, ...]:
        """The KV groups, one at least."""
        return self.kv_groups or (KvGroup(self.block_size),)

    def least_blocks(self, tokens: int) -> int:
        """The blocks without which a sequence of so many tokens cannot be computed."""
        return sum(group.most_held(tokens) for group in self.groups)

    @property
    def longest_sequence(self) -> int:
        """The most tokens of a sequence that the model takes, and the cache holds alone."""
        lengths = range(self.max_total_tokens + 1)
        return bisect_right(lengths, self.num_blocks, key=self.least_blocks) - 1

    @property
    def pages(self) -> tuple[int, ...]:
        """Pages of each projection's pool."""
        return self.pool_pages or (self.adapter_pages,) * len(self.projections)
