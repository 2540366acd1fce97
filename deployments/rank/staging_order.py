"""The order of one adapter's stagings and drops on a rank. Knows neither sockets nor Ray."""

import threading
from collections import Counter
from dataclasses import dataclass

from configs.wire.adapters import AdapterKey


@dataclass
class StagingTicket:
    """One staging's position among its adapter's drops.

    drops_ahead: drops that were read before it and have not been carried out.
    void: whether a drop that was read after it has been carried out.
    """

    drops_ahead: int
    void: bool = False


class StageOrder:
    """Keeps stagings and drops of an adapter in the order in which they were read.

    The thread that launches steps carries out drops; other threads carry out stagings. The driver
    acts on rank 0's results, and this rank may be behind rank 0. So a staging may be read while an
    older drop of the same adapter still waits: that drop must not remove the new copy. And if the
    adapter is dropped before a staging has read its files, the staging must not read them.
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
        """Note that a staging was read; pass its ticket to `wait_for_drops` once."""
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

    def wait_for_drops(self, key: AdapterKey, ticket: StagingTicket) -> bool:
        """Wait for the drops before a staging; False if one came after it, or the rank ended."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or not ticket.drops_ahead)
            tickets = self._tickets[key]
            tickets.remove(ticket)
            if not tickets:
                del self._tickets[key]
            return not (self._ended or ticket.void)

    def end(self) -> None:
        """Note that no more drops will be carried out, and end all waits."""
        with self._changed:
            self._ended = True
            self._changed.notify_all()
