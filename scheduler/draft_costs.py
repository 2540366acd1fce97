"""DraftCosts: what steps with drafts take beside those without, learned while they run."""

from collections import Counter

from scheduler.step import StepBuilder

LEAST_RATIO = 1.3
"""Of a step with drafts to one without, until it was measured: it is checked before the next."""

FREE_TOKENS = 160
"""A step of more tokens takes longer in proportion, until it was measured."""

COMPARED = 8
"""After so many steps with drafts, steps without are measured too; as many are tried at most."""

WEIGHT = 0.3
"""Of the newest step in an average."""

LONGEST = 2.0
"""Times the average: a step that took longer was disturbed, and counts as this."""

FORGOTTEN = 1 / 64
"""What a cost that keeps drafts off loses of its distance to the unmeasured one in each step."""


class DraftCosts:
    """Seconds between steps that only generate, by rows and tokens of a draft (0: no drafts).

    The time that the host takes between two steps counts where no step is in flight meanwhile.
    """

    def __init__(self) -> None:
        self._seconds: dict[tuple[int, int], float] = {}
        self._drafted: Counter[int] = Counter()
        self._tried: Counter[int] = Counter()
        self._applied_at = 0.0
        self._ran: frozenset[int] = frozenset()

    def applied(self, step: StepBuilder, now: float) -> None:
        """Learn from a step that was applied at `now`, in seconds."""
        ran, before = frozenset(request.serial for request in step.requests), self._applied_at
        goes_on, self._ran, self._applied_at = not ran.isdisjoint(self._ran), ran, now
        # A step without drafts that begins behind the host's work is none of a series, nor is one
        # that has heads guess.
        is_plain = step.planned < before and not step.waits and not step.guesses
        is_typical = step.draft_length > 0 or is_plain
        if not goes_on or not is_typical or step.tokens != step.generating or now <= before:
            return
        key = _key(len(step.rows), step.draft_length)
        self._drafted[key[0]] += step.draft_length > 0
        known, seconds = self._seconds.get(key), now - before
        if known is not None:
            seconds = known + WEIGHT * (min(seconds, LONGEST * known) - known)
        self._seconds[key] = seconds

    def of(self, rows: int, length: int) -> float:
        """Seconds of a step of so many rows with drafts of such a length; relative if unknown."""
        found = self._seconds.get(_key(rows, length))
        return self._unmeasured(rows, length) if found is None else found

    def lacks_plain(self, rows: int) -> bool:
        """Whether the next step should have no drafts, to learn what it takes without."""
        size, plain = _key(rows, 0)
        if (size, plain) in self._seconds or self._drafted[size] < COMPARED:
            return False
        self._tried[size] += 1
        return self._tried[size] <= COMPARED

    def forget(self, rows: int, length: int) -> None:
        """Believe a little less that drafts of this length cost as much as they did."""
        key = _key(rows, length)
        if (known := self._seconds.get(key)) is not None:
            self._seconds[key] = known + FORGOTTEN * min(0, self._unmeasured(rows, length) - known)

    def _unmeasured(self, rows: int, length: int) -> float:
        """What would be expected of the shortest drafts that were measured for so many rows."""
        own = [key for key in self._seconds if key[0] == rows.bit_length()]
        if not own:
            return _ratio(rows, length)
        nearest = min(own)
        return self._seconds[nearest] * _ratio(rows, length) / _ratio(rows, nearest[1])


def _key(rows: int, length: int) -> tuple[int, int]:
    """Steps of the same key are alike."""
    return rows.bit_length(), length


def _ratio(rows: int, length: int) -> float:
    """How much longer than a step without drafts one with them takes, if nothing is known."""
    return max(LEAST_RATIO, rows * (1 + length) / FREE_TOKENS) if length else 1.0
