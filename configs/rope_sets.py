"""Rope sets: which of a model's tables of rotary frequencies a sequence is computed with.

LongRoPE (arXiv:2402.13753) has two tables, for sequences up to the trained length and beyond it.
"""

import msgspec

SHORT, LONG = 0, 1
"""The sets, by their rows in the table of frequencies."""


class RopeSets(msgspec.Struct, frozen=True):
    """When a sequence takes which set, as transformers' `generate` has it for that family.

    border: tokens; a sequence that is longer takes LONG. recompute: what becomes of one that
    grows beyond it. True: all of it is computed anew by LONG (Phi-3 drops its cache there).
    False: keys stay as they were written, and positions from `border` on take LONG.
    """

    border: int
    recompute: bool

    def first(self, prompt: int, known: int) -> int:
        """The set of position 0 when a request of `known` tokens joins the ranks.

        prompt: how many of them are its prompt's, which one forward of transformers reads.
        """
        return LONG if (known if self.recompute else prompt) > self.border else SHORT

    def at(self, first: int, position: int) -> int:
        """The set of a position of a sequence whose position 0 took `first`."""
        assert not self.outgrown(first, position), (first, position)
        return LONG if position >= self.border else first

    def outgrown(self, first: int, position: int) -> bool:
        """Whether a position cannot be computed before the sequence is computed anew."""
        return self.recompute and first == SHORT and position >= self.border

    def room(self, first: int, position: int, length: int) -> int:
        """How many of `length` positions from this one on take the set that it takes."""
        return min(length, self.border - position) if self.at(first, position) == SHORT else length
