"""Records of adapters for metrics, and the adapters that have a label of their own."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

from deployments.observability.lorax_metrics import OTHER

_FORGET_EVERY = 4096
_LEAD = 2


@dataclass(frozen=True)
class SequenceRecord:
    """A sequence that ended.

    adapter: its name. ok: it ended without an error.
    first_token_seconds: None without a token. per_token_seconds: None without a second one.
    drafted_tokens, accepted_tokens: tokens that were guessed, and those of them that came.
    """

    adapter: str
    ok: bool
    prompt_tokens: int
    generated_tokens: int
    first_token_seconds: float | None
    per_token_seconds: float | None
    drafted_tokens: int = 0
    accepted_tokens: int = 0


class LoadStage(StrEnum):
    """A stage of an adapter's load; the values are the metric's labels."""

    FETCH = "fetch"  # to this node's disk
    STAGE = "stage"  # from disk to the ranks' host memory
    LOAD = "place"  # from host memory to the device


@dataclass(frozen=True)
class LoadRecord:
    """One stage of an adapter's load."""

    stage: LoadStage
    seconds: float


class TopLabels:
    """Gives the most requested adapters labels of their own, at most `size` at once.

    A scraper stores every series that it has seen. So an adapter replaces another only with twice
    its recent requests, and at most 4 * size adapters ever get a label.
    """

    def __init__(self, size: int, always: frozenset[str] = frozenset()) -> None:
        """always: adapters that have labels besides the `size` others."""
        self._size = size
        self._always = always
        self._labelled: set[str] = set()
        self._num_given = 0
        self._counts: OrderedDict[str, int] = OrderedDict()
        self._num_counted = 0

    def count(self, adapter: str) -> str:
        """Count a request; returns the adapter's label."""
        if adapter in self._always:
            return adapter
        self._counts[adapter] = self._counts.get(adapter, 0) + 1
        self._counts.move_to_end(adapter)
        if adapter not in self._labelled and self._num_given < 4 * self._size:
            self._consider(adapter)
        self._num_counted += 1
        if self._num_counted % _FORGET_EVERY == 0:
            self._fade()
        return self.of(adapter)

    def of(self, adapter: str | None) -> str:
        """The adapter's label; None: an adapter without a name."""
        known = adapter is not None and (adapter in self._labelled or adapter in self._always)
        return adapter if known and adapter is not None else OTHER

    def _consider(self, adapter: str) -> None:
        """Give the adapter a free label, or replace one that is requested far less."""
        if len(self._labelled) >= self._size:
            least = min(self._labelled, key=lambda name: self._counts.get(name, 0))
            if self._counts[adapter] <= _LEAD * self._counts.get(least, 0):
                return
            self._labelled.remove(least)
        self._labelled.add(adapter)
        self._num_given += 1

    def _fade(self) -> None:
        """Halve all counts, so that old requests weigh less, and forget those at 0."""
        self._counts = OrderedDict(
            (name, count // 2) for name, count in self._counts.items() if count > 1
        )
