"""A replica's adapter report to the routers, by the names that clients use."""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from itertools import islice

from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource
from deployments.driver.adapters.aliases import Aliases
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.routing.policy import AdapterHash, HoldingTier, ReplicaReport, adapter_hash
from scheduler.adapters.resident import AdapterState
from scheduler.snapshot import AdapterView

MAX_NAMES = 256

_BEAT_SECONDS = 5.0
_TIERS = {
    AdapterState.DEVICE: HoldingTier.DEVICE,
    AdapterState.LOADING: HoldingTier.HOST,
    AdapterState.HOST: HoldingTier.HOST,
    AdapterState.STAGING: HoldingTier.HOST,
}


class AdapterReporter:
    """The names that were requested last, and the tiers of their adapters; on the event loop.

    A report has at most `MAX_NAMES` names: pinned ones, then the last requested. Routers find other
    names by their hash, which is how those requests came to this replica.
    """

    def __init__(self, aliases: Aliases, adapters: EngineAdapters) -> None:
        self._aliases = aliases
        self._adapters = adapters
        self._requested: OrderedDict[AdapterReference, AdapterHash] = OrderedDict()

    def requested(self, reference: AdapterReference) -> None:
        """Record that a client requested an adapter that exists."""
        if reference not in self._requested:
            self._requested[reference] = adapter_hash(reference)
        self._requested.move_to_end(reference)
        if len(self._requested) > MAX_NAMES:
            self._requested.popitem(last=False)

    def report(
        self,
        views: Sequence[AdapterView],
        pinned: Iterable[AdapterReference],
        load: int,
        ready: bool,
        now: float,
    ) -> ReplicaReport:
        """The report at `now`, in seconds of a clock that never goes back."""
        states = {view.key: view.state for view in views if not view.draining}
        held = {
            digest: tier
            for name, digest in self._names(pinned).items()
            if (tier := self._tier(name, states)) is not HoldingTier.NOWHERE
        }
        return ReplicaReport(held, load, ready, beat=int(now / _BEAT_SECONDS))

    def named(
        self, views: Sequence[AdapterView], pinned: Iterable[AdapterReference]
    ) -> dict[AdapterReference, AdapterView]:
        """The adapters of the report that are in memory or waited for, by clients' names."""
        by_key = {view.key: view for view in views}
        keys = {name: self._adapters.serving(self._aliases.resolve(name)) for name in
                self._names(pinned) if not name.parts}  # fmt: skip
        return {name: by_key[key] for name, key in keys.items() if key in by_key}

    def _names(self, pinned: Iterable[AdapterReference]) -> dict[AdapterReference, AdapterHash]:
        names = {reference: adapter_hash(reference) for reference in pinned}
        names |= {
            name: self._requested[name] for name in reversed(self._requested) if name not in names
        }
        return dict(islice(names.items(), MAX_NAMES))

    def _tier(self, name: AdapterReference, states: dict[AdapterKey, AdapterState]) -> HoldingTier:
        target = self._aliases.resolve(name)
        key = self._adapters.serving(target)
        if key is None:
            return HoldingTier.NOWHERE
        tier = _TIERS.get(states.get(key, AdapterState.DISK))
        if tier is not None:
            return tier
        # Local folders lie on every node's disk; others only where they were downloaded.
        local = all(member.source is AdapterSource.LOCAL for member in target.members)
        return HoldingTier.NOWHERE if local else HoldingTier.DISK
