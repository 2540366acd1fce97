"""Limits, and the refusals that follow from them."""

from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass

from configs.engine import EngineConfig
from configs.wire.plan import Capacity
from configs.wire.sampling import Pooling
from scheduler.events import RanksFailure
from scheduler.request import Request

SHORTEST_RETRY_S = 1.0
LONGEST_RETRY_S = 60.0

KEPT = 0.998
"""What an ended request counts for when the next one has ended."""


class InvalidRequest(ValueError):
    """A request that these limits can never serve; the message says which and what to do."""


class Overloaded(Exception):
    """As many requests wait as may wait; try again after `retry_after_s` seconds."""

    def __init__(self, num_waiting: int, retry_after_s: float) -> None:
        super().__init__(f"{num_waiting} requests are waiting, try again in {retry_after_s:.0f} s")
        self.retry_after_s = retry_after_s


@dataclass(frozen=True)
class Limits:
    """What the scheduler admits; `configs.engine.LimitsConfig` explains the first six.

    steps_ahead: plans that may be in flight at once.
    quantum_tokens: tokens that each adapter's queue earns in a round.
    patience_steps: how long an adapter waits for room on the device before loaded ones stop
    admitting to make room for it.
    slice_steps: for how many steps, at most, a loaded adapter keeps its slot before its requests
    are preempted; AdmissionQueue.slice_steps says when it is less.
    max_matchers: matchers of constraints that the ranks hold at once (matchers.py).
    max_draft_tokens: tokens of one draft, at most; 0: nothing is drafted.
    max_drafting: no request gets a draft while more of them run.
    """

    max_step_tokens: int = 2048
    max_mixed_prompt_tokens: int | None = None
    token_gap_s: float | None = None
    max_running: int = 256
    max_queued: int = 1024
    max_total_tokens: int | None = None
    prefix_caching: bool = True
    steps_ahead: int = 2
    quantum_tokens: int = 2048
    patience_steps: int = 16
    slice_steps: int = 384
    max_matchers: int = 64
    max_draft_tokens: int = 0
    max_drafting: int = 8

    def __post_init__(self) -> None:
        """Refuse limits under which nothing could run."""
        mixed = 1 if self.max_mixed_prompt_tokens is None else self.max_mixed_prompt_tokens
        tokens = self.max_step_tokens, mixed, self.quantum_tokens
        if min(*tokens, self.max_running, self.steps_ahead, self.max_matchers) < 1:
            raise ValueError(f"limits must be at least 1: {self}")
        if self.steps_ahead > 2 and self.max_draft_tokens:
            raise ValueError(f"with drafts steps_ahead must be at most 2: {self}")
        if self.slice_steps < 1:
            raise ValueError(f"slice_steps must be at least 1: {self}")
        if self.max_queued < 0 or self.patience_steps < 0:
            raise ValueError(f"max_queued and patience_steps must not be negative: {self}")

    @property
    def tokens_ahead(self) -> int:
        """The most tokens that plans in flight name."""
        return self.steps_ahead * self.max_step_tokens

    @classmethod
    def from_config(cls, config: EngineConfig, steps_ahead: int = 2) -> "Limits":
        """The limits of one engine; steps_ahead is 1 for models that cannot run ahead."""
        gap_ms = config.limits.token_gap_ms
        return cls(
            max_step_tokens=config.limits.max_step_tokens,
            max_mixed_prompt_tokens=config.limits.max_mixed_prompt_tokens,
            token_gap_s=gap_ms / 1e3 if gap_ms else None,
            max_running=config.limits.max_running,
            max_queued=config.limits.max_queued,
            max_total_tokens=config.limits.max_total_tokens,
            prefix_caching=config.cache.prefix_caching,
            steps_ahead=steps_ahead,
            quantum_tokens=config.limits.max_step_tokens,
            max_draft_tokens=config.speculation.most_tokens,
            max_drafting=config.speculation.max_running,
        )


def refuse_impossible(request: Request, limits: Limits, capacity: Capacity) -> None:
    """Raise InvalidRequest for a request that could not run even if it were alone."""
    if not request.prompt:
        raise InvalidRequest("the prompt has no tokens; send at least one")
    longest = min(limits.max_total_tokens or capacity.max_total_tokens, capacity.max_total_tokens)
    prompt, new = len(request.prompt), request.stopping.max_new_tokens
    if prompt + new > longest:
        raise InvalidRequest(
            f"{prompt} prompt tokens and max_new_tokens {new} make {prompt + new} tokens, "
            f"but at most {longest} are served; shorten one of them"
        )
    if new and request.sampling.pooling is not Pooling.NONE:
        raise InvalidRequest(
            "an embedding or a score is made of a prompt alone; set max_new_tokens to 0"
        )
    refuse_oversized(request, capacity)


def refuse_oversized(request: Request, capacity: Capacity) -> None:
    """Raise InvalidRequest for a request that the cache could not hold even if it were alone."""
    prompt, new = len(request.prompt), request.stopping.max_new_tokens
    # No step computes keys and values for the last token.
    tokens = prompt + max(new, 1) - 1
    if capacity.least_blocks(tokens) > capacity.num_blocks:
        held = bisect_right(range(tokens), capacity.num_blocks, key=capacity.least_blocks) - 1
        raise InvalidRequest(
            f"{prompt} prompt tokens and max_new_tokens {new} do not fit into the cache, "
            f"which holds {held} tokens; shorten one of them"
        )


def too_large_now(requests: Iterable[Request], capacity: Capacity) -> dict[Request, RanksFailure]:
    """The requests that new ranks with less memory cannot hold, and why each of them ends."""
    failures = {}
    for request in requests:
        try:
            refuse_oversized(request, capacity)
        except InvalidRequest as refusal:
            message = f"the ranks came back with less memory than they had: {refusal}"
            failures[request] = RanksFailure(message)
    return failures


class DrainRate:
    """How fast requests end while there are any, so that clients learn when to try again."""

    def __init__(self) -> None:
        self._seconds = self._ended = self._last = 0.0

    def begin(self, now: float) -> None:
        """The first request came at `now`, in seconds; the time without any counts for nothing."""
        self._last = now

    def record(self, count: int, now: float) -> None:
        """`count` requests ended at `now`, in seconds."""
        # By requests, not by records: those of equal length end in waves.
        kept = KEPT**count
        self._seconds = self._seconds * kept + max(now - self._last, 0.0)
        self._ended = self._ended * kept + count
        self._last = now

    def overload(self, num_waiting: int) -> Overloaded:
        """Return the refusal of one more; half of the others have ended by its time, 1 to 60 s."""
        estimate = self._seconds / max(self._ended, 1.0) * num_waiting / 2
        return Overloaded(num_waiting, min(max(estimate, SHORTEST_RETRY_S), LONGEST_RETRY_S))
