"""Exports counters before their first event."""

import sys
from collections.abc import Mapping

from ray.serve.metrics import Counter

_NOTHING = sys.float_info.min
"""Ray's counters refuse zero; added to a count, this changes nothing."""


def begin(counter: Counter, tags: Mapping[str, str] | None = None) -> None:
    """Export the counter at 0: a scraper counts no increase of one that appears at 1."""
    counter.inc(_NOTHING, tags=None if tags is None else dict(tags))
