"""The order of one adapter's stagings and drops on a rank. Knows neither sockets nor Ray."""

import threading
from collections import Counter
from dataclasses import dataclass

from configs.wire.adapters import AdapterKey


@dataclass
class StagingTicket:
    """One staging's place: how many drops of its adapter come before it, whether one came since."""

    drops_ahead: int
    void: bool = False


class StageOrder:
    """Keeps stagings and drops of an adapter in the order in which they were read.

    Drops are carried out by the thread that launches steps, stagings by others beside it. A rank
    may be behind rank 0, whose answers the driver goes by: what is staged anew must not fall to
    a drop of what was there before, and what was dropped before it was read must not be read.
    """

    def __init__(self) -> None:
        """Start with nothing asked."""
        self._changed = threading.Condition()
        self._drops: Counter[AdapterKey] = Counter()
        self._tickets: dict[AdapterKey, list[StagingTicket]] = {}
        self._ended = False

    def read_drop(self, key: AdapterKey) -> None:
        """A drop was read; it is to be carried out later."""
        with self._changed:
            self._drops[key] += 1

    def read_stage(self, key: AdapterKey) -> StagingTicket:
        """A staging was read; its turn is for `await_turn`, once."""
        with self._changed:
            turn = StagingTicket(self._drops[key])
            self._tickets.setdefault(key, []).append(turn)
            return turn

    def dropped(self, key: AdapterKey) -> None:
        """The oldest drop of the adapter was carried out."""
        with self._changed:
            self._drops[key] -= 1
            if not self._drops[key]:
                del self._drops[key]
            for turn in self._tickets.get(key, ()):
                if turn.drops_ahead:
                    turn.drops_ahead -= 1
                else:
                    turn.void = True
            self._changed.notify_all()

    def wait_for_turn(self, key: AdapterKey, turn: StagingTicket) -> bool:
        """Wait for the drops that came before; False if one came after, or the rank has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not turn.drops_ahead)
            turns = self._tickets[key]
            turns.remove(turn)
            if not turns:
                del self._tickets[key]
            return not (self._ended or turn.void)

    def end(self) -> None:
        """No drop will be carried out any more: nobody waits for one."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
