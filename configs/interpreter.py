"""The interval at which Python's threads switch."""

import sys

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may run while others wait; Python's default, 0.005, is a whole step."""


def shorten_switch_interval() -> None:
    """For processes in which one thread computes steps and others do what can wait."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)
