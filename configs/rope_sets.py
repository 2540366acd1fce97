"""Rope sets: which of a model's tables of rotary frequencies each position uses.

LongRoPE (arXiv:2402.13753) has two tables: one for sequences up to the trained length, one for
longer ones.
"""

import msgspec

SHORT, LONG = 0, 1
"""The sets: rows in the table of frequencies."""


class RopeSets(msgspec.Struct, frozen=True):
    """Which set a sequence uses, as in transformers' `generate` for that family.

    border: tokens; a longer sequence uses LONG.
    recompute: what happens when a sequence grows beyond the border. True: all of it is computed
    again with LONG (Phi-3 drops its cache there). False: its keys stay as they are, and positions
    from `border` on use LONG.
    """

    border: int
    recompute: bool

    def first(self, prompt: int, known: int) -> int:
        """The set of position 0 when a request of `known` tokens joins the ranks.

        prompt: how many of them are its prompt's, which transformers computes in one forward.
        """
        return LONG if (known if self.recompute else prompt) > self.border else SHORT

    def at(self, first: int, position: int) -> int:
        """The set of a position, in a sequence with set `first` at position 0."""
        assert not self.outgrown(first, position), (first, position)
        return LONG if position >= self.border else first

    def outgrown(self, first: int, position: int) -> bool:
        """Whether the whole sequence must be computed again before this position."""
        return self.recompute and first == SHORT and position >= self.border

    def room(self, first: int, position: int, length: int) -> int:
        """How many of `length` positions, from this one on, use the same set."""
        return min(length, self.border - position) if self.at(first, position) == SHORT else length
