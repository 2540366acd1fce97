"""Drafts by prompt lookup: what followed the last tokens where they occurred before.

The ranks check a draft: they choose the token of each of its positions as always, with that
position's noise, and the draft counts as far as it is equal. So a draft changes when tokens come,
never which.
"""

from array import array
from collections.abc import Sequence

MATCH = 3
"""Tokens that must have occurred before, in this order."""

WINDOW = 16384
"""Newest tokens that are searched: a bound of the time that one search takes."""

MOST_LOOKS = 8
"""Occurrences that one search looks at, of which some may begin within a token's bytes."""

FIRST_MEAN = 2.0
"""Accepted tokens that are expected of a request's first draft."""

SHORTEST = 2
"""Tokens of a draft where little is expected."""

WEIGHT = 0.3
"""Of the newest draft in the average of accepted tokens."""

LEAST_ALONE, LEAST_BESIDE = 0.5, 3.0
"""Accepted tokens a draft that are worth it. A request may wait for the check of its draft, and
beside others, which do not, it gets a row in every second step then. And a step with one draft is
no captured decode step, for all its rows."""

SURE_ALONE, SURE_BESIDE = 0.9, 0.4
"""The share of drafts that were wholly right, from which the next row does not wait for the check.
A wrong one costs a request that runs alone a whole step, and waiting only what lies between two."""

SHORTEST_REST, LONGEST_REST = 32, 256
"""Tokens without a draft after drafts that were not worth it; twice as many each time."""

_BYTES = array("i").itemsize


class Drafter:
    """Finds the drafts of one request, and learns how long they should be.

    num_drafted: tokens that were drafted so far.
    """

    def __init__(self) -> None:
        self.num_drafted = 0
        self._known = bytearray()
        self._mean = FIRST_MEAN
        self._whole = 0.5
        self._rest = SHORTEST_REST
        self._resume_at = 0

    def length(self, num_tokens: int, alone: bool) -> int:
        """How many tokens to draft for a request of so many; 0: drafts are not worth it now.

        alone: no other request runs.
        """
        if num_tokens < self._resume_at:
            return 0
        least = LEAST_ALONE if alone else LEAST_BESIDE
        if self._mean >= 2 * least:
            self._rest = SHORTEST_REST
        if self._mean < least:
            self._resume_at = num_tokens + self._rest
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._mean = least
            return 0
        return max(SHORTEST, round(2 * self._mean))

    def is_sure(self, alone: bool) -> bool:
        """Whether its next draft will probably be right to its end."""
        return self._whole >= (SURE_ALONE if alone else SURE_BESIDE)

    def find(
        self, tokens: Sequence[int], length: int, guessed: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """The `length` tokens that followed the newest earlier occurrence of the last ones.

        () without one. tokens: all known ones; they never change, more come behind them.
        guessed: what is believed to follow them.
        """
        known = self._known
        known += array("i", tokens[len(known) // _BYTES :]).tobytes()
        if len(tokens) <= MATCH or length < 1:
            return ()
        known += array("i", guessed).tobytes()
        found = self._after(known, length)
        del known[len(tokens) * _BYTES :]
        return found

    def _after(self, known: bytearray, length: int) -> tuple[int, ...]:
        start = self._occurrence(known, len(known) - MATCH * _BYTES)
        if start < 0:
            return ()
        first = start + MATCH * _BYTES
        # A text that repeats itself goes on so behind its end too.
        found = known[first : first + length * _BYTES]
        while len(found) < length * _BYTES:
            found += found[: length * _BYTES - len(found)]
        return tuple(array("i", bytes(found)))

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft that was checked."""
        self.num_drafted += num_drafted
        # A draft that was right to its end would have been right further.
        seen = num_accepted if num_accepted < num_drafted else num_drafted + 1
        self._mean += WEIGHT * (seen - self._mean)
        self._whole += WEIGHT * ((num_accepted == num_drafted) - self._whole)

    @staticmethod
    def _occurrence(known: bytearray, last: int) -> int:
        """Where the bytes from `last` on occur for the last time before it; -1: nowhere."""
        lowest, end = max(0, last - WINDOW * _BYTES), len(known) - _BYTES
        for _ in range(MOST_LOOKS):
            found = known.rfind(known[last:], lowest, end)
            if found < 0 or found % _BYTES == 0:
                return found
            end = found + MATCH * _BYTES - 1
        return -1
