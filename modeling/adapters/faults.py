"""What is wrong with an adapter's files, gathered, so that a refusal names all of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from configs.wire.adapters import AdapterError, AdapterRefusal

MAX_REASONS = 12
MAX_REASON_CHARS = 600
"""What of a refusal is told, whatever a file holds."""


def refuse(message: str, refusal: AdapterRefusal = AdapterRefusal.UNSUPPORTED) -> NoReturn:
    """Raise AdapterError."""
    raise AdapterError(refusal, message)


class Faults:
    """Reasons for a refusal. What only differs by a number, a layer's above all, is told once."""

    def __init__(self) -> None:
        """Nothing is wrong yet."""
        self._reasons: dict[str, str] = {}
        self._refusals: list[AdapterRefusal] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Keep the AdapterError that ends the block, if one does."""
        try:
            yield
        except AdapterError as error:
            self._refusals.append(error.refusal)
            for reason in error.reasons:
                self._reasons.setdefault(re.sub(r"\d+", "#", reason), reason)

    def __bool__(self) -> bool:
        """Whether anything is wrong."""
        return bool(self._refusals)

    def check(self) -> None:
        """Raise one AdapterError for all; its kind is the first's."""
        if not self._refusals:
            return
        told = [_short(reason) for reason in list(self._reasons.values())[:MAX_REASONS]]
        if len(self._reasons) > MAX_REASONS:
            told.append(f"and {len(self._reasons) - MAX_REASONS} more kinds of faults")
        raise AdapterError(self._refusals[0], "; ALSO: ".join(told), tuple(told))


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 3]}..."
