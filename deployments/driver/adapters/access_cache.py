"""The sources' last replies about adapters: versions, granted accesses and refusals.

An access is valid only for the token that it was granted for, unless the source said that all may
read. Tokens themselves are not stored. The version is the same for all callers: the last that the
source reported to any of them. Otherwise a name would have two versions at once.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.adapters import FetchConfig
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal
from sources.base import FoundAdapter, Token

_MAX_ENTRIES = 1 << 16
_ALL_CALLERS = ""

Caller = str
"""A keyed hash of a token, or a fixed name for callers without one."""


@dataclass(frozen=True)
class _Access:
    confirmed: float
    good_until: float


@dataclass(frozen=True)
class _Refused:
    refusal: AdapterRefusal
    message: str
    good_until: float


class AccessCache:
    """The last reply about each (reference, caller), for as long as the config trusts it."""

    def __init__(self, fetch: FetchConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """clock: seconds, never backwards."""
        self._fetch = fetch
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._accesses: OrderedDict[tuple[AdapterReference, Caller], _Access] = OrderedDict()
        self._found: OrderedDict[AdapterReference, FoundAdapter] = OrderedDict()
        self._refused: OrderedDict[tuple[AdapterReference, Caller], _Refused] = OrderedDict()

    def caller(self, token: Token) -> Caller:
        """The caller's identity, without its token."""
        if isinstance(token, bool):
            return "server" if token else "anonymous"
        text = token.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=16).hexdigest()

    def fresh(self, reference: AdapterReference, caller: Caller) -> FoundAdapter | None:
        """What the caller may use without a new request; raises a refusal that is still valid."""
        now = self._clock()
        refused = self._refused.get((reference, caller))
        if refused is not None and now < refused.good_until:
            raise AdapterError(refused.refusal, refused.message)
        access = self._access(reference, caller)
        if access is None or now >= access.good_until:
            return None
        return self._found.get(reference)

    def knows(self, reference: AdapterReference, caller: Caller) -> bool:
        """Whether the source has granted this caller the adapter, however long ago."""
        return self._access(reference, caller) is not None

    def confirmed(self, reference: AdapterReference, caller: Caller) -> FoundAdapter | None:
        """What the caller may use while the source is unreachable; valid until the next try."""
        now = self._clock()
        for key in ((reference, caller), (reference, _ALL_CALLERS)):
            access = self._accesses.get(key)
            if access is not None and now < access.confirmed + self._fetch.grace_s:
                # The next requests use it too, instead of waiting for the source one by one.
                self._accesses[key] = _Access(access.confirmed, now + self._fetch.refusal_s)
                return self._found.get(reference)
        return None

    def record(self, reference: AdapterReference, caller: Caller, found: FoundAdapter) -> None:
        """Store an access that the source granted to this caller, and the version for all."""
        now = self._clock()
        self._forget(reference, caller)
        key = (reference, _ALL_CALLERS if found.open_to_all else caller)
        self._accesses[key] = _Access(now, now + self._fetch.recheck_s)
        self._found[reference] = found
        self._found.move_to_end(reference)
        _bound(self._accesses)
        _bound(self._found)

    def refuse(self, reference: AdapterReference, caller: Caller, error: AdapterError) -> None:
        """Store a refusal. It ends an earlier access, unless the source was unavailable."""
        if error.refusal is not AdapterRefusal.UNAVAILABLE:
            self._forget(reference, caller)
        good_until = self._clock() + self._fetch.refusal_s
        self._refused[reference, caller] = _Refused(error.refusal, error.message, good_until)
        _bound(self._refused)

    def forget(self, reference: AdapterReference) -> None:
        """Forget every reply about an adapter: its source has changed it."""
        for replies in (self._accesses, self._refused):
            for key in [key for key in replies if key[0] == reference]:
                replies.pop(key)

    def _access(self, reference: AdapterReference, caller: Caller) -> _Access | None:
        own = self._accesses.get((reference, caller))
        return own or self._accesses.get((reference, _ALL_CALLERS))

    def _forget(self, reference: AdapterReference, caller: Caller) -> None:
        """Forget both accesses: a public adapter may be private now, and the reverse."""
        for key in ((reference, caller), (reference, _ALL_CALLERS)):
            self._accesses.pop(key, None)
        self._refused.pop((reference, caller), None)


def _bound(entries: OrderedDict[Any, Any]) -> None:
    while len(entries) > _MAX_ENTRIES:
        entries.popitem(last=False)
