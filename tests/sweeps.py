"""Which cases of a large product the suite has time for: the others are marked `sweep`."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def swept(values: Iterable[Any], suite: Callable[[Any], bool]) -> list[Any]:
    """One parameter's values; those that are not in the suite are left to the sweep."""
    return [
        value if suite(value) else pytest.param(value, marks=pytest.mark.sweep) for value in values
    ]


def swept_rows(rows: Iterable[tuple[Any, ...]], suite: Callable[..., bool]) -> list[Any]:
    """As `swept`, for rows of several parameters."""
    return [row if suite(*row) else pytest.param(*row, marks=pytest.mark.sweep) for row in rows]
