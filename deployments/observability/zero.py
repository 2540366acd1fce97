"""Counters that are there before their first event."""

import sys
from collections.abc import Mapping

from ray.serve.metrics import Counter

_NOTHING = sys.float_info.min
"""Ray's counters refuse zero; added to any count this changes no bit of it."""


def begin(counter: Counter, tags: Mapping[str, str] | None = None) -> None:
    """Show the counter at 0: a scraper takes one that appears at 1 for one that never rose."""
    counter.inc(_NOTHING, tags=None if tags is None else dict(tags))
