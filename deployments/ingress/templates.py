"""Which chat template a request's adapter brings, as the driver says, remembered for a while."""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import Any

from configs.adapters import AdapterReference
from configs.templates import TemplateSource
from deployments.contract import Driver, Failed
from deployments.ingress.errors import RequestError
from deployments.ingress.quotas import Clock
from deployments.ingress.renderer import Renderer, Task

_GOOD_SECONDS = 5.0
_MAX_TEMPLATES = 1024

_Asked = tuple[AdapterReference, tuple[str, ...] | None]


class AdapterTemplate:
    """An adapter's own chat template: a stranger's, rendered beside this process."""

    def __init__(self, source: TemplateSource, renderer: Renderer) -> None:
        """Nothing is compiled here."""
        self.source = source.text
        self.knows_tools = "tools" in source.text
        self._source = source
        self._renderer = renderer

    async def render(
        self, messages: Sequence[Mapping[str, Any]], variables: Mapping[str, Any]
    ) -> str:
        """The prompt for these messages; RequestError when the template refuses them."""
        plain = [dict(message) for message in messages]
        return await self._renderer.render(Task(self._source, plain, dict(variables)))


class AdapterTemplates:
    """Adapters' templates by reference; the rights of who asks are checked by `generate`."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        """Nothing is known yet."""
        self._driver = driver
        self._clock = clock
        self._renderer = Renderer()
        self._known: OrderedDict[_Asked, tuple[float, AdapterTemplate | None]] = OrderedDict()

    async def of(
        self,
        reference: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
    ) -> AdapterTemplate | None:
        """The adapter's own template, None if it has none; RequestError if it cannot be had.

        allowed: as in `GenerateRequest`.
        """
        now, asked = self._clock(), (reference, allowed)
        known = self._known.get(asked)
        if known is not None and now - known[0] < _GOOD_SECONDS:
            return known[1]
        answer = await self._driver.chat_template(reference, api_token, allowed)
        if isinstance(answer, Failed):
            raise RequestError.of(answer)
        template = AdapterTemplate(answer, self._renderer) if answer.text else None
        self._known[asked] = (now, template)
        self._known.move_to_end(asked)
        if len(self._known) > _MAX_TEMPLATES:
            self._known.popitem(last=False)
        return template

    async def close(self) -> None:
        """End what renders."""
        await self._renderer.close()
