"""How the ranks of a group sum, as they have measured it."""

import msgspec


class MeasuredSums(msgspec.Struct, frozen=True):
    """The fastest way to sum, the same on all ranks of a group.

    methods: (most bytes, method), ascending. norm_rows: up to how many rows norms sum; None where
    that was not measured.
    """

    methods: list[tuple[int, str]]
    norm_rows: int | None = None
