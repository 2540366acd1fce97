"""Python's interpreter in processes that serve: how long threads wait, what collections visit."""

import gc
import sys

SWITCH_INTERVAL_S = 0.0005
"""Seconds that a thread may run while others wait; Python's default, 0.005, is a whole step."""


def shorten_switch_interval() -> None:
    """For processes in which one thread computes steps, or sends them, and others can wait."""
    sys.setswitchinterval(SWITCH_INTERVAL_S)


def freeze_objects() -> None:
    """Collect garbage, then leave out of all later collections what there is now.

    A full collection visits every object while no thread may run: 0.2 s for those that a start
    leaves, hundreds of thousands. Call it where those stay as long as the process.
    """
    gc.collect()
    gc.freeze()
