"""How the requests of a server that goes to sleep end."""

from enum import StrEnum


class SleepMode(StrEnum):
    """What becomes of accepted requests before the ranks sleep.

    ABORT: they end with an error that says so. WAIT: the sleep begins when all have ended.
    KEEP: they go on after the sleep, with the tokens that they have.
    """

    ABORT = "abort"
    WAIT = "wait"
    KEEP = "keep"
