"""How the router, deep in Serve, tells a caller which replica takes its call.

A module of its own, for Serve pickles the router's by value, and its globals would be copies.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_told: ContextVar[Callable[[str], None] | None] = ContextVar("loray_replica_chosen", default=None)


@contextmanager
def replica_listener(chosen: Callable[[str], None]) -> Iterator[None]:
    """Calls begun meanwhile tell the unique id of their replica, and of each that follows it.

    `chosen` is called on the router's event loop, just before the call is sent; what it raises ends
    the call.
    """
    token = _told.set(chosen)
    try:
        yield
    finally:
        _told.reset(token)


def replica_chosen(replica: str) -> None:
    """Tell who began this task's call; nothing where nobody asked."""
    chosen = _told.get()
    if chosen is not None:
        chosen(replica)
