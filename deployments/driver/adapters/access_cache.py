"""What the sources said lately about an adapter, for each caller: versions, rights, refusals.

A right belongs to a caller: it is found again only by the token that it was given for, unless
the source said that everybody may read. Tokens themselves are never kept. What there is to read
is the same for all: the last that anybody was told.
"""

import hashlib
import secrets
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from configs.fetching import FetchConfig
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal
from sources.base import FoundAdapter, Token

_MAX_ANSWERS = 1 << 16
_EVERYBODY = ""

Caller = str
"""A keyed hash of a token, or a word for the callers that have none."""


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
    """The last answer about each (reference, caller), for as long as the config trusts it."""

    def __init__(self, fetch: FetchConfig, clock: Callable[[], float] = time.monotonic) -> None:
        """`clock` counts seconds."""
        self._fetch = fetch
        self._clock = clock
        self._secret = secrets.token_bytes(32)
        self._accesses: OrderedDict[tuple[AdapterReference, Caller], _Access] = OrderedDict()
        self._found: OrderedDict[AdapterReference, FoundAdapter] = OrderedDict()
        self._refused: OrderedDict[tuple[AdapterReference, Caller], _Refused] = OrderedDict()

    def caller(self, token: Token) -> Caller:
        """Who asks, without what proves it."""
        if isinstance(token, bool):
            return "server" if token else "nobody"
        text = token.encode("utf-8", "surrogatepass")
        return hashlib.blake2b(text, key=self._secret, digest_size=16).hexdigest()

    def fresh(self, reference: AdapterReference, caller: Caller) -> FoundAdapter | None:
        """What may be used without asking; a refusal that is still good is raised again."""
        now = self._clock()
        refused = self._refused.get((reference, caller))
        if refused is not None and now < refused.good_until:
            raise AdapterError(refused.refusal, refused.message)
        right = self._access(reference, caller)
        if right is None or now >= right.good_until:
            return None
        return self._found.get(reference)

    def confirmed(self, reference: AdapterReference, caller: Caller) -> FoundAdapter | None:
        """What may be used while the source is out of reach; it is asked again in a while."""
        now = self._clock()
        for key in ((reference, caller), (reference, _EVERYBODY)):
            right = self._accesses.get(key)
            if right is not None and now < right.confirmed + self._fetch.grace_s:
                self._accesses[key] = _Access(right.confirmed, now + self._fetch.refusal_s)
                return self._found.get(reference)
        return None

    def record(self, reference: AdapterReference, caller: Caller, found: FoundAdapter) -> None:
        """The source said yes: this caller may, and for all who may this is what there is now."""
        now = self._clock()
        self._forget(reference, caller)
        key = (reference, _EVERYBODY if found.open_to_all else caller)
        self._accesses[key] = _Access(now, now + self._fetch.recheck_s)
        self._found[reference] = found
        self._found.move_to_end(reference)
        _bound(self._accesses)
        _bound(self._found)

    def refuse(self, reference: AdapterReference, caller: Caller, error: AdapterError) -> None:
        """The adapter cannot be had; a source's no takes a right that it gave before."""
        if error.refusal is not AdapterRefusal.UNAVAILABLE:
            self._forget(reference, caller)
        good_until = self._clock() + self._fetch.refusal_s
        self._refused[reference, caller] = _Refused(error.refusal, error.message, good_until)
        _bound(self._refused)

    def _access(self, reference: AdapterReference, caller: Caller) -> _Access | None:
        own = self._accesses.get((reference, caller))
        return own or self._accesses.get((reference, _EVERYBODY))

    def _forget(self, reference: AdapterReference, caller: Caller) -> None:
        """What was public may be private now, and the other way round."""
        for key in ((reference, caller), (reference, _EVERYBODY)):
            self._accesses.pop(key, None)
        self._refused.pop((reference, caller), None)


def _bound(answers: OrderedDict[Any, Any]) -> None:
    while len(answers) > _MAX_ANSWERS:
        answers.popitem(last=False)
