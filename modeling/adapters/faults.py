"""Faults: gathers what is wrong with an adapter's files, so that a refusal names all of it."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from configs.wire.adapters import AdapterError, AdapterRefusal

MAX_REASONS = 12
MAX_REASON_CHARS = 600
"""Limits of a refusal's text, whatever a file holds."""


def refuse(message: str, refusal: AdapterRefusal = AdapterRefusal.UNSUPPORTED) -> NoReturn:
    """Raise AdapterError."""
    raise AdapterError(refusal, message)


class Faults:
    """Reasons for a refusal; of those that differ only in numbers (layers) one is kept."""

    def __init__(self) -> None:
        self._reasons: dict[str, str] = {}
        self._refusals: list[AdapterRefusal] = []

    @contextmanager
    def gather(self) -> Iterator[None]:
        """Keep the AdapterError that ends the block, if any."""
        try:
            yield
        except AdapterError as error:
            self._refusals.append(error.refusal)
            for reason in error.reasons:
                # One reason for each kind: numbers in it are mostly layers.
                self._reasons.setdefault(re.sub(r"\d+", "#", reason), reason)

    def __bool__(self) -> bool:
        """Return whether there are reasons."""
        return bool(self._refusals)

    def check(self) -> None:
        """Raise one AdapterError with all reasons, of the first one's kind."""
        if not self._refusals:
            return
        shown = [_short(reason) for reason in list(self._reasons.values())[:MAX_REASONS]]
        if len(self._reasons) > MAX_REASONS:
            shown.append(f"and {len(self._reasons) - MAX_REASONS} more kinds of faults")
        raise AdapterError(self._refusals[0], "; ALSO: ".join(shown), tuple(shown))


def _short(reason: str) -> str:
    return reason if len(reason) <= MAX_REASON_CHARS else f"{reason[: MAX_REASON_CHARS - 3]}..."
