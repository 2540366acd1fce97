"""Drafts by prompt lookup: what followed the last tokens where they occurred before.

A text that was copied so far is believed to go on where it was copied from. Where a token was
changed, left out or added, its last ones occur nowhere: then the draft is what follows at the same
distance, and if that is wrong, what follows the last token near there.

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

NEAR = 4
"""Tokens by which a copied text may have moved against its source at once."""

MOST_LOOKS = 8
"""Occurrences that one search looks at, of which some may begin within a token's bytes."""

FIRST, AGAIN = (0.75, 0.5), (0.5, 0.75)
"""Right and wrong tokens that count as seen before a request's first draft, and after a rest."""

MOST_CHANCE = 0.999
"""No text is certain."""

FADING = 0.8
"""What earlier drafts count for at each new one."""

LEAST = 0.25
"""Expected tokens of a short draft that are few."""

SHORT = 2
"""Tokens of a short draft."""

SHORTEST_REST, LONGEST_REST = 32, 256
"""Tokens of an answer for which few are expected, before more are; twice as many each time."""

_BYTES = array("i").itemsize
_MOVES = sorted(range(-NEAR, NEAR + 1), key=abs)


class Drafter:
    """Finds the drafts of one request, and learns how long they should be.

    num_drafted: tokens that were drafted so far.
    """

    def __init__(self) -> None:
        self.num_drafted = 0
        self._known = bytearray()
        self._right, self._wrong = FIRST
        self._rest = SHORTEST_REST
        self._resume_at: int | None = None
        self._distance = 0
        self._is_lost = False
        self._expected: dict[int, float] = {}

    @property
    def chance(self) -> float:
        """The chance that a draft's next token is right."""
        return min(MOST_CHANCE, self._right / (self._right + self._wrong))

    def expected(self, length: int) -> float:
        """Tokens of a draft that will probably be accepted."""
        if (known := self._expected.get(length)) is not None:
            return known
        chance = self.chance
        self._expected[length] = found = chance * (1 - chance**length) / (1 - chance)
        return found

    def expect_again(self, num_tokens: int) -> None:
        """Expect more again, if little was expected for a while; the request has so many tokens."""
        if self.expected(SHORT) >= LEAST:
            self._resume_at = None
        elif self._resume_at is None:
            self._resume_at = num_tokens + self._rest
        elif num_tokens >= self._resume_at:
            self._resume_at = None
            self._rest = min(2 * self._rest, LONGEST_REST)
            self._right, self._wrong = AGAIN
            self._expected.clear()

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
        if not (self._goes_on(known) or self._occurs(known) or self._is_near(known)):
            return ()
        first = len(known) - self._distance
        # A text that repeats itself goes on so behind its end too.
        found = known[first : first + length * _BYTES]
        while len(found) < length * _BYTES:
            found += found[: length * _BYTES - len(found)]
        return tuple(array("i", bytes(found)))

    def _goes_on(self, known: bytearray) -> bool:
        """Whether the last tokens are those at the known distance before them, too."""
        last = len(known) - MATCH * _BYTES
        before = last - self._distance
        is_known = self._distance > 0 and before >= 0
        return is_known and known[before : before + MATCH * _BYTES] == known[last:]

    def _occurs(self, known: bytearray) -> bool:
        """Whether the last tokens occurred before; the newest occurrence gives the distance."""
        last = len(known) - MATCH * _BYTES
        start = self._occurrence(known, last)
        if start >= 0:
            self._distance, self._is_lost = last - start, False
        return start >= 0

    def _is_near(self, known: bytearray) -> bool:
        """Whether a text that was copied goes on: at its distance, or, if lost, near there."""
        last = len(known) - _BYTES
        source = last - self._distance
        if not self._distance or source < 0:
            return False
        if not self._is_lost:
            return True
        for moved in _MOVES:
            at = source + moved * _BYTES
            if 0 <= at < last and known[at : at + _BYTES] == known[last:]:
                self._distance = last - at
                return True
        return False

    def verified(self, num_drafted: int, num_accepted: int) -> None:
        """Learn from a draft that was checked."""
        self.num_drafted += num_drafted
        self._right = FADING * self._right + num_accepted
        self._wrong = FADING * self._wrong + (num_accepted < num_drafted)
        self._expected.clear()
        if num_accepted >= SHORT:
            self._rest = SHORTEST_REST
        if num_drafted:
            self._is_lost = not num_accepted

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
