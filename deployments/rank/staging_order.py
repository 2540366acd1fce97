"""The order of one adapter's stagings and drops on a rank. Knows neither sockets nor Ray."""

import threading
from collections import Counter
from dataclasses import dataclass

from configs.wire.adapters import AdapterKey


@dataclass
class StagingTicket:
    """One staging's position among its adapter's drops.

    drops_ahead: drops that were read before it and are still to be carried out.
    void: whether a drop that was read after it was carried out.
    """

    drops_ahead: int
    void: bool = False


class StageOrder:
    """Keeps stagings and drops of an adapter in the order in which they were read.

    Drops are carried out by the thread that launches steps, stagings by other threads. The driver
    goes by rank 0's results, and this rank may be behind rank 0. So a staging may be read while an
    older drop of the same adapter still waits: that drop must not remove the new copy. And a
    staging whose adapter was dropped before its files were read must not read them.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._drops: Counter[AdapterKey] = Counter()
        self._tickets: dict[AdapterKey, list[StagingTicket]] = {}
        self._ended = False

    def read_drop(self, key: AdapterKey) -> None:
        """Note that a drop was read; `dropped` follows when it is carried out."""
        with self._changed:
            self._drops[key] += 1

    def read_stage(self, key: AdapterKey) -> StagingTicket:
        """Note that a staging was read; its ticket is for `wait_for_turn`, once."""
        with self._changed:
            ticket = StagingTicket(self._drops[key])
            self._tickets.setdefault(key, []).append(ticket)
            return ticket

    def dropped(self, key: AdapterKey) -> None:
        """Note that the oldest drop of the adapter was carried out."""
        with self._changed:
            self._drops[key] -= 1
            if not self._drops[key]:
                del self._drops[key]
            for ticket in self._tickets.get(key, ()):
                if ticket.drops_ahead:
                    ticket.drops_ahead -= 1
                else:
                    ticket.void = True
            self._changed.notify_all()

    def wait_for_turn(self, key: AdapterKey, ticket: StagingTicket) -> bool:
        """Wait for the drops before it; False if one came after it, or the rank has ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not ticket.drops_ahead)
            tickets = self._tickets[key]
            tickets.remove(ticket)
            if not tickets:
                del self._tickets[key]
            return not (self._ended or ticket.void)

    def end(self) -> None:
        """Note that no more drops will be carried out; stagings that wait for one end."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
