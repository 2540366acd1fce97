"""Request: one prompt and its completion, described by lengths instead of phases.

Prefill, a chunk of it and decode are one mechanism: a row computes positions
scheduled .. scheduled + length - 1, and samples when it reaches the end of all tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from configs.rope_sets import SHORT
from configs.wire.adapters import AdapterKey
from configs.wire.plan import PromptReport, TokenLogprobs
from configs.wire.sampling import FinishReason, Pooling, Sampling, Stopping
from scheduler.drafts import Drafter
from scheduler.events import Ended, Ending, RequestId

STEP_TOKENS = 192
"""A GPU computes about so many tokens in the time in which it reads the weights once, whatever the
model."""

PROOF_TOKENS = 8
"""New tokens after which the losses of the ranks are not counted against a request any more."""

FIRST_BACKGROUND = 2**62
"""The least serial of background requests: each counts as younger than every other request."""


class Status(Enum):
    """Where a request is.

    WAITING: it holds nothing on the ranks. RUNNING: it holds a batch slot.
    LEAVING: it was preempted, but plans in flight still name it.
    """

    WAITING = "waiting"
    RUNNING = "running"
    LEAVING = "leaving"
    ENDED = "ended"


_ENDED = Status.ENDED  # Looked up once, not for every row.


@dataclass(slots=True, eq=False)
class Request:
    """A sequence, its tokens and what it holds on the ranks.

    arrival: seconds on the caller's clock, as are first_scheduled and first_token.
    parts: the adapters that its adapter is a merge of, each once; () for others.
    cache_salt: what separates its prefix cache keys from those of other callers.
    active_from: the first position that its adapter changes (`configs.wire.adapters.active_from`).
    background: it is served only where no other request wants to be.
    resumed: another driver had admitted it and is gone: it is never refused for too many others.
    given: the first tokens of its answer, which that driver generated; given_logprobs: theirs.
    serial: its number in the order of arrival; a background request's follow all others.
    tokens: all known ids, prompt first, then those that were given.
    computed: positions of applied steps. scheduled: positions that plans name.
    pending: tokens that plans in flight will sample. in_flight: plans in flight with its row.
    batch_slot, tables: what it holds on the ranks; -1 and empty while it waits. tables: its blocks,
    for each KV group in the order of their positions; -1 where they were freed.
    freed: how many leading blocks of each table were freed before its end.
    covered: positions that its tables hold.
    digests: names of its full blocks in the prefix cache, as far as they were computed.
    joined_at: positions that it found computed when it last joined; -1 before.
    had_computed: positions that were computed when it last left the ranks.
    joined_with: how many tokens it had when it last joined.
    lost: how many positions it did not find computed then that it had computed; 0: few.
    rope_set: that of position 0 (configs/rope_sets.py).
    registered: leading blocks, of the smallest size, that can be found in the prefix cache.
    keeps: positions still to be computed before which its states are to be kept, ascending.
    cached_tokens: prompt tokens that came from the prefix cache.
    prompt_logprobs, embedding: what the ranks reported about its prompt so far.
    losses: losses of the ranks, in a row, in which it was involved.
    losses_alone: those of them in which no other request was involved.
    lost_with: tokens that it had at the last loss.
    isolation_rounds: how often it was isolated (admission/crash_isolation.py).
    matcher: the number of its constraint's matcher on the ranks; -1 without one.
    own_matcher: no other request shares that matcher.
    waiting_for_matcher: it waits outside its queue until the ranks have prepared the matcher.
    discards_samples: what plans in flight still sample for it is dropped (matchers.py).
    drafter: finds its drafts. drafts: that of its last row, while a plan in flight checks it.
    has_heads: whether the ranks have heads that guess its tokens, as far as is known.
    num_guessed: how many guesses of heads its last row that samples brings.
    guesses: what heads guessed behind its last token; () while that is in flight.
    skipped: the indices of generated tokens that came as a draft's, behind another of their step.
    """

    id: RequestId
    prompt: list[int]
    sampling: Sampling
    stopping: Stopping
    adapter: AdapterKey | None = None
    arrival: float = 0.0
    parts: tuple[AdapterKey, ...] = ()
    cache_salt: bytes = b""
    background: bool = False
    active_from: int = 0
    resumed: bool = False
    given: Sequence[int] = ()
    given_logprobs: Sequence[TokenLogprobs] = ()

    status: Status = field(default=Status.WAITING, init=False)
    serial: int = field(default=-1, init=False)
    tokens: list[int] = field(init=False)
    logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    computed: int = field(default=0, init=False)
    scheduled: int = field(default=0, init=False)
    pending: int = field(default=0, init=False)
    in_flight: int = field(default=0, init=False)
    batch_slot: int = field(default=-1, init=False)
    tables: list[list[int]] = field(default_factory=list, init=False)
    freed: list[int] = field(default_factory=list, init=False)
    covered: int = field(default=0, init=False)
    digests: list[bytes] = field(default_factory=list, init=False)
    joined_at: int = field(default=-1, init=False)
    had_computed: int = field(default=0, init=False)
    joined_with: int = field(default=0, init=False)
    lost: int = field(default=0, init=False)
    rope_set: int = field(default=SHORT, init=False)
    registered: int = field(default=0, init=False)
    keeps: list[int] = field(default_factory=list, init=False)
    cached_tokens: int = field(default=0, init=False)
    first_scheduled: float | None = field(default=None, init=False)
    first_token: float | None = field(default=None, init=False)
    losses: int = field(default=0, init=False)
    losses_alone: int = field(default=0, init=False)
    lost_with: int = field(default=0, init=False)
    isolation_rounds: int = field(default=0, init=False)
    matcher: int = field(default=-1, init=False)
    own_matcher: bool = field(default=False, init=False)
    waiting_for_matcher: bool = field(default=False, init=False)
    discards_samples: bool = field(default=False, init=False)
    drafter: Drafter = field(default_factory=Drafter, init=False)
    drafts: tuple[int, ...] = field(default=(), init=False)
    has_heads: bool = field(default=True, init=False)
    num_guessed: int = field(default=0, init=False)
    guesses: tuple[int, ...] = field(default=(), init=False)
    skipped: list[int] = field(default_factory=list, init=False)
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list, init=False)
    embedding: bytes = field(default=b"", init=False)

    def __post_init__(self) -> None:
        """Start with the prompt, and with what was generated before, as the known tokens."""
        given = self.given
        if given and self.sampling.about_prompt and self._end_at(len(given), given[-1]) is not None:
            given = given[:-1]  # The prompt's report is only made with a token.
        self.tokens = [*self.prompt, *given]
        self.logprobs = list(self.given_logprobs[: len(given)])

    @property
    def charged_adapters(self) -> tuple[AdapterKey | None, ...]:
        """The adapters with limits that it counts against: the parts of a merge, else its own."""
        return self.parts or (self.adapter,)

    @property
    def given_end(self) -> FinishReason | None:
        """Why its answer was complete when it was given; None: it goes on."""
        count = self.num_generated
        return self._end_at(count, self.tokens[-1]) if count else None

    @property
    def num_generated(self) -> int:
        """How many generated tokens are known."""
        return len(self.tokens) - len(self.prompt)

    @property
    def total(self) -> int:
        """Known tokens plus those that plans in flight will sample."""
        return len(self.tokens) + self.pending

    @property
    def max_total(self) -> int:
        """The most tokens that the sequence may come to."""
        return len(self.prompt) + self.stopping.max_new_tokens

    @property
    def exhausted(self) -> bool:
        """Whether the plans in flight bring its last permitted token."""
        most, total = self.stopping.max_new_tokens, len(self.tokens) + self.pending
        return total >= len(self.prompt) + most if most else self.scheduled >= total

    @property
    def prompt_done(self) -> bool:
        """Whether it generates nothing and its whole prompt was computed."""
        return not self.stopping.max_new_tokens and self.computed >= len(self.prompt)

    @property
    def tokens_to_clear(self) -> int:
        """New tokens that clear it after a loss: four times as many with each further isolation."""
        return PROOF_TOKENS << 2 * max(self.isolation_rounds - 1, 0)

    @property
    def needs_whole_prompt(self) -> bool:
        """Whether the ranks must compute every position of its prompt for their report."""
        scores_tokens = self.sampling.prompt_logprobs >= 0
        return self.awaits_report and (scores_tokens or self.sampling.pooling.reads_all)

    @property
    def awaits_report(self) -> bool:
        """Whether the ranks must still report about its prompt."""
        sampling = self.sampling
        if not sampling.about_prompt:
            return False
        scored = sampling.prompt_logprobs < 0 or len(self.prompt_logprobs) >= len(self.prompt) - 1
        return not scored or (sampling.pooling is not Pooling.NONE and not self.embedding)

    def set_first_scheduled(self, now: float, cached_tokens: int) -> None:
        """It was admitted for the first time, behind so many tokens of cached blocks."""
        self.first_scheduled = now
        self.cached_tokens = min(cached_tokens, len(self.prompt))

    def add_logprobs(self, logprobs: Sequence[TokenLogprobs | None]) -> list[TokenLogprobs] | None:
        """Keep the logprobs of sampled tokens, if they were requested, and return them."""
        if self.sampling.logprobs < 0:
            return None
        found = [each for each in logprobs if each is not None]
        self.logprobs += found
        return found or None

    def add_prompt_report(self, report: PromptReport) -> None:
        """Keep what is new in a report; a prompt that is computed again is reported again."""
        if report.logprobs:
            # Chunks come in order, but after a preemption from the beginning again.
            known = len(self.prompt_logprobs) + 1 - report.first
            assert known >= 0, f"{self.id}: logprobs before position {report.first} are missing"
            self.prompt_logprobs += report.logprobs[known:]
        self.embedding = report.embedding or self.embedding

    def accept(self, token: int) -> FinishReason | None:
        """Append a sampled token; returns why the request ends, a stop token before the length."""
        self.tokens.append(token)
        # Progress since the last loss speaks against it as the cause (crash_isolation.py).
        if self.losses and len(self.tokens) - self.lost_with >= self.tokens_to_clear:
            self.losses = self.losses_alone = 0
        return self._end_at(len(self.tokens) - len(self.prompt), token)

    def _end_at(self, count: int, token: int) -> FinishReason | None:
        """Why an answer ends with this `count`-th token; None if it does not."""
        stopping = self.stopping
        if token in stopping.stop_token_ids and count >= stopping.min_new_tokens:
            return FinishReason.STOP_TOKEN
        return FinishReason.LENGTH if count >= stopping.max_new_tokens else None

    def takes(self, start: int) -> bool:
        """Whether a row from this position counts when it is applied; else it is dropped.

        Not after the request's end, nor if its samples are discarded, nor behind a wrong draft.
        """
        return start == self.computed and not self.discards_samples and self.status is not _ENDED

    def truncate(self, num_generated: int) -> None:
        """Drop the generated tokens beyond the first `num_generated`."""
        keep = max(num_generated, 0)
        del self.tokens[len(self.prompt) + keep :]
        del self.logprobs[keep:]
        self.skipped = [index for index in self.skipped if index < keep]

    def take_rope_set(self, rope_set: int) -> None:
        """Compute it with this set from position 0 on; only while it holds nothing on the ranks."""
        assert self.status is Status.WAITING, self.id
        if rope_set != self.rope_set:  # The digests' chain starts from the set.
            self.rope_set, self.digests = rope_set, []

    def found(self, computed: int) -> None:
        """It joins, and finds so many positions computed."""
        lost = max(1, self.had_computed - computed)
        # As long as it gains by its turns, a few do not matter.
        self.lost = lost if lost >= STEP_TOKENS or computed <= self.joined_at else 0
        self.joined_at, self.joined_with = computed, len(self.tokens)

    def rewind(self) -> None:
        """Start anew with the known tokens, which the next RequestJoin sends to the ranks."""
        self.status, self.had_computed = Status.WAITING, self.computed
        self.computed = self.scheduled = self.pending = self.in_flight = self.registered = 0
        self.covered, self.batch_slot, self.drafts, self.guesses = 0, -1, (), ()
        self.tables, self.freed, self.keeps = [], [], []
        self.discards_samples = False

    def count_loss(self, alone: bool) -> None:
        """The ranks were lost, and it was involved; `alone`: no other request was."""
        self.losses += 1
        self.losses_alone += alone
        self.lost_with = len(self.tokens)

    def ended(self, ending: Ending) -> Ended:
        """Mark the request as ended; returns its last event."""
        assert self.status is not Status.ENDED, f"{self.id} ended twice"
        self.status = Status.ENDED
        return Ended(
            request_id=self.id,
            ending=ending,
            tokens=self.tokens[len(self.prompt) :],
            logprobs=self.logprobs if self.sampling.logprobs >= 0 else None,
            cached_tokens=self.cached_tokens,
            arrival=self.arrival,
            first_scheduled=self.first_scheduled,
            first_token=self.first_token,
            prompt_logprobs=self.prompt_logprobs if self.sampling.prompt_logprobs >= 0 else None,
            embedding=self.embedding,
            num_drafted=self.drafter.num_drafted,
            skipped=self.skipped,
        )

    def check(self, block_size: int) -> None:
        """Assert the order of the lengths and that blocks cover what is scheduled.

        block_size: the smallest of all KV groups.
        """
        lengths = (self.id, self.computed, self.scheduled, self.total)
        assert 0 <= self.computed <= self.scheduled <= self.total <= self.max_total, lengths
        assert self.registered * block_size <= max(self.computed, self.scheduled), lengths
        assert self.covered >= self.scheduled, lengths
