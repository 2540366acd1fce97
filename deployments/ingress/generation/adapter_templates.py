"""Adapters' own chat templates, from the driver, cached for a few seconds."""

from collections import OrderedDict
from functools import partial

from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.contract import Failed
from deployments.driver_interface import Driver
from deployments.ingress.access.quotas import Clock
from deployments.ingress.generation.resubmissions import persistent
from deployments.ingress.http.errors import RequestError

_VALID_SECONDS = 5.0
_MAX_TEMPLATES = 256

_CacheKey = tuple[AdapterReference, str | None, tuple[str, ...] | None, str]


class AdapterTemplates:
    """A cache of the driver's replies. The driver checks the caller's permissions."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        self._driver = driver
        self._clock = clock
        self._cache: OrderedDict[_CacheKey, tuple[float, TemplateSource]] = OrderedDict()

    async def get(
        self,
        reference: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource:
        """The adapter's templates, which may be none; RequestError if they cannot be read.

        allowed, payer: as in `GenerateRequest`.
        """
        # The token is part of the key: another caller may not be allowed to read this adapter.
        now, key = self._clock(), (reference, api_token, allowed, payer)
        cached = self._cache.get(key)
        if cached is not None and now - cached[0] < _VALID_SECONDS:
            return cached[1]
        fetch = partial(self._driver.chat_template, reference, api_token, allowed, payer)
        reply = await persistent(fetch)
        if isinstance(reply, Failed):
            raise RequestError.of(reply)
        self._cache[key] = (now, reply)
        self._cache.move_to_end(key)
        if len(self._cache) > _MAX_TEMPLATES:
            self._cache.popitem(last=False)
        return reply
