"""Operators' rate limits and weights by adapter name, sent to the scheduler by adapter key."""

from collections.abc import Iterable, Sequence

from configs.runtime import AdapterShare, RuntimeConfig
from configs.wire.adapters import AdapterKey, AdapterReference, AdapterSource, parse_reference
from deployments.driver.loop_handle import LoopHandle


class NamedRateLimits:
    """The configured share of each name; lives on the replica's event loop.

    A share is a weight and limits. Names of the same content have one queue: the share that comes
    first in the config is used. A merge has none of its own: its requests count against its parts.
    """

    def __init__(self, default_source: AdapterSource, handle: LoopHandle) -> None:
        self._default_source = default_source
        self._handle = handle
        self._shares: dict[AdapterReference, tuple[int, AdapterShare]] = {}
        self._applied: dict[AdapterKey, int] = {}

    def configure(
        self, runtime: RuntimeConfig, known: Iterable[tuple[AdapterReference, AdapterKey]]
    ) -> None:
        """Replace all shares; ValueError, and no change, for a name that cannot be parsed.

        known: the names that were requested, and their keys.
        """
        self._shares = {
            parse_reference(text, self._default_source): (order, share)
            for order, (text, share) in enumerate(runtime.adapters.items())
        }
        self._applied = {}
        own: dict[AdapterKey, AdapterShare] = {}
        for reference, key in known:
            if (share := self._share_for(reference, key)) is not None:
                own[key] = share
        base, default = runtime.base_model, runtime.adapter_default
        self._handle.post(lambda scheduler, now: scheduler.set_shares(base, default, own))

    def adapter_seen(
        self, reference: AdapterReference, key: AdapterKey, parts: Sequence[AdapterKey] = ()
    ) -> None:
        """A request by this name resolved to this key; parts: the keys of a merge's parts."""
        for name, content in zip(reference.members, parts or (key,), strict=True):
            share = self._share_for(name, content)
            if share is not None:
                self._set(content, share)

    def _set(self, key: AdapterKey, share: AdapterShare) -> None:
        self._handle.post(lambda scheduler, now: scheduler.set_share(key, share))

    def _share_for(self, reference: AdapterReference, key: AdapterKey) -> AdapterShare | None:
        """The name's share, if it comes before the key's present one; else None."""
        found = self._shares.get(reference)
        if found is None and reference.revision is not None:
            found = self._shares.get(AdapterReference(reference.source, reference.id))
        if found is None or self._applied.get(key, len(self._shares)) <= found[0]:
            return None
        self._applied[key] = found[0]
        return found[1]
