"""KeptStates: behind which prefixes the ranks keep the states of recurrent layers.

Such a layer has no keys and values to go on from: its state behind a position is all that it has of
what came before, and the next token changes it. So a prefix can be shared where a copy was kept.
The ranks have room for some; a new one takes that of the one that was used least recently.
"""

from collections import OrderedDict


class KeptStates:
    """Numbers of kept states by the name of the last block before them (see `PrefixCache`).

    Ranks read kept states before a plan's rows and write them in it, so a number that the plan in
    hand gives out is found from the next plan on, and one that it reads may be given out by it.
    """

    def __init__(self, count: int, least_tokens: int) -> None:
        """count: how many the ranks have room for. least_tokens: between two of a sequence."""
        self.count = count
        self.least_tokens = max(1, least_tokens)
        self._free = list(range(count - 1, -1, -1))
        self._number_of: OrderedDict[bytes, int] = OrderedDict()
        self._fresh: dict[bytes, int] = {}

    def __contains__(self, name: bytes) -> bool:
        """Whether the ranks have it before the plan in hand."""
        return name in self._number_of

    def next_plan(self) -> None:
        """Another plan begins: what the one before it keeps can be found."""
        self._number_of.update(self._fresh)
        self._fresh.clear()

    def use(self, name: bytes) -> int:
        """The number of a state that is there."""
        self._number_of.move_to_end(name)
        return self._number_of[name]

    def keep(self, name: bytes) -> int | None:
        """The number by which the plan in hand keeps a state; None: it is kept, or has no room."""
        if name in self._fresh:
            return None
        if name in self._number_of:
            self._number_of.move_to_end(name)
            return None
        if self._free:
            number = self._free.pop()
        elif self._number_of:
            _, number = self._number_of.popitem(last=False)
        else:
            return None
        self._fresh[name] = number
        return number

    def check(self) -> None:
        """Assert that no number is lost or given out twice."""
        given = [*self._number_of.values(), *self._fresh.values()]
        assert sorted([*self._free, *given]) == list(range(self.count)), "numbers of states"
