"""How the threads of a process share Python's interpreter."""

import sys

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may keep it while others wait; Python's own 0.005 are a whole step."""


def shorten_switch_interval() -> None:
    """For processes in which one thread makes steps and others do what can wait."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
