"""How requests used each adapter, for the operators' listing and for metrics."""

import time
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource
from deployments.contract import Completion, Failed, GenerateRequest
from deployments.observability.adapter_records import LoadRecord, LoadStage, SequenceRecord
from deployments.observability.lorax_metrics import BASE

_MAX_KEYS = 1 << 16
_MAX_RECORDS = 1 << 14

T = TypeVar("T")


@dataclass(frozen=True)
class UseCounts:
    """How often an adapter was requested. last: the last time, in seconds since the epoch."""

    count: int = 0
    last: float | None = None


@dataclass(frozen=True)
class LoadSum:
    """How many adapters passed a stage of loading, and the sum of their seconds."""

    count: int = 0
    seconds: float = 0.0


class AdapterUsage:
    """Uses since the start, and requests and loads since the last drain; on the event loop.

    Only the last `_MAX_RECORDS` records wait for a drain.
    """

    def __init__(self, default_source: AdapterSource) -> None:
        self._default_source = default_source
        self._uses: OrderedDict[AdapterKey, UseCounts] = OrderedDict()
        self._names: dict[AdapterKey, str] = {}
        self._requests: deque[SequenceRecord] = deque(maxlen=_MAX_RECORDS)
        self._loads: deque[LoadRecord] = deque(maxlen=_MAX_RECORDS)
        self._load_sums: dict[str, LoadSum] = {}

    def used(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Record that a request is about to run over the adapter."""
        before = self._uses.get(key, UseCounts())
        self._uses[key] = UseCounts(before.count + 1, time.time())
        self._uses.move_to_end(key)
        self._names[key] = self.label(reference)
        if len(self._uses) > _MAX_KEYS:
            oldest, _ = self._uses.popitem(last=False)
            del self._names[oldest]

    def of(self, key: AdapterKey) -> UseCounts:
        """How often an adapter was used, under any name."""
        return self._uses.get(key, UseCounts())

    def name(self, key: AdapterKey | None) -> str | None:
        """An adapter's last name, "base" for the base model; None if it was never used."""
        return BASE if key is None else self._names.get(key)

    def label(self, reference: AdapterReference | None) -> str:
        """An adapter's name in metrics, without its revision."""
        if reference is None:
            return BASE
        plain = reference.source is self._default_source
        return reference.id if plain else f"{reference.source.value}:{reference.id}"

    def finished(self, request: GenerateRequest, completion: Completion, seconds: float) -> None:
        """Record a request that ended `seconds` after its arrival."""
        name = self.label(request.adapter)
        for sequence, outcome in zip(request.sequences, completion.sequences, strict=True):
            num_tokens = len(outcome.tokens)
            after_first = max(seconds - outcome.first_token_seconds, 0.0)
            self._requests.append(
                SequenceRecord(
                    adapter=name,
                    ok=not isinstance(outcome.ending, Failed),
                    prompt_tokens=len(sequence.prompt),
                    generated_tokens=num_tokens,
                    drafted_tokens=outcome.drafted_tokens,
                    accepted_tokens=len(outcome.skipped),
                    first_token_seconds=outcome.first_token_seconds if num_tokens else None,
                    per_token_seconds=after_first / (num_tokens - 1) if num_tokens > 1 else None,
                )
            )

    def stage_timed(self, stage: LoadStage, seconds: float) -> None:
        """Record the duration of one stage of a load; from any thread."""
        self._loads.append(LoadRecord(stage, seconds))

    def drain_requests(self) -> Sequence[SequenceRecord]:
        """The requests that ended since the last call."""
        return _drained(self._requests)

    def drain_loads(self) -> Sequence[LoadRecord]:
        """The stages of loads that ended since the last call."""
        drained = _drained(self._loads)
        self._load_sums = _summed(self._load_sums, drained)
        return drained

    def load_sums(self) -> dict[str, LoadSum]:
        """Counts and sums of all loads since the start, by stage."""
        return _summed(self._load_sums, self._loads.copy())


def _summed(before: Mapping[str, LoadSum], records: Iterable[LoadRecord]) -> dict[str, LoadSum]:
    sums = dict(before)
    for record in records:
        known = sums.get(record.stage, LoadSum())
        sums[record.stage] = LoadSum(known.count + 1, known.seconds + record.seconds)
    return sums


def _drained(records: "deque[T]") -> list[T]:
    # Other threads may append meanwhile: take only as many as there are now.
    return [records.popleft() for _ in range(len(records))]
