"""Which chat template makes a request's prompt: its adapter's, as the driver says, or the model's.

Adapters' templates are remembered for a while.
"""

import asyncio
from collections import OrderedDict
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from jinja2 import TemplateError

from configs.wire.adapters import AdapterReference
from configs.wire.templates import DEFAULT, TOOL_USE, TemplateSource
from deployments.contract import Driver, Failed
from deployments.ingress.access.quotas import Clock
from deployments.ingress.chat_templates.renderer import Renderer
from deployments.ingress.chat_templates.rendering import packed
from deployments.ingress.chat_templates.template import ChatTemplate, Conversation, TemplateText
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.text.tokenizer import ModelTokenizer

_GOOD_SECONDS = 5.0
_MAX_TEMPLATES = 256
# Of a conversation that the model's own template renders here; longer ones go to a process.
_SHORT_BYTES = 64 << 10
_PARAM = "chat_template"

_CacheKey = tuple[AdapterReference, str | None, tuple[str, ...] | None, str]


class Template(TemplateText, Protocol):
    """A chosen template."""

    async def render(self, conversation: Conversation) -> str:
        """The prompt for this conversation; RequestError when the template refuses it."""
        ...


class _ModelTemplate:
    """The model's own: the operator's, rendered in this process where it is short work."""

    def __init__(self, compiled: ChatTemplate, source: TemplateSource, owner: "Templates") -> None:
        self.source = compiled.source
        self._compiled = compiled
        self._source = source
        self._owner = owner

    def reads(self, variable: str) -> bool:
        return self._compiled.reads(variable)

    async def render(self, conversation: Conversation) -> str:
        written = packed(conversation)
        if len(written) > _SHORT_BYTES:
            return await self._owner.renderer.render_own(self._source, written)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._owner.pool, self._compiled.render, conversation)


class _AdapterTemplate:
    """An adapter's own: a stranger's, rendered beside this process."""

    def __init__(self, source: TemplateSource, adapter: str, renderer: Renderer) -> None:
        self.source = source.text
        self._source = source
        self._adapter = adapter
        self._renderer = renderer

    def reads(self, variable: str) -> bool:
        # To parse it would be work of a stranger's choosing.
        return variable in self.source

    async def render(self, conversation: Conversation) -> str:
        return await self._renderer.render(self._adapter, self._source, packed(conversation))


class Templates:
    """All chat templates; the rights of who asks for an adapter's are checked by `generate`."""

    def __init__(self, driver: Driver, clock: Clock) -> None:
        """Nothing is known yet."""
        self.renderer = Renderer(clock)
        self.pool = ThreadPoolExecutor(2, thread_name_prefix="templates")
        self._driver = driver
        self._clock = clock
        self._known: OrderedDict[_CacheKey, tuple[float, TemplateSource]] = OrderedDict()

    async def of(
        self,
        reference: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource:
        """The adapter's own templates, maybe none; RequestError if they cannot be had.

        allowed, payer: as in `GenerateRequest`.
        """
        # The driver checks the caller's rights; an answer is good for this caller alone.
        now, key = self._clock(), (reference, api_token, allowed, payer)
        known = self._known.get(key)
        if known is not None and now - known[0] < _GOOD_SECONDS:
            return known[1]
        answer = await self._driver.chat_template(reference, api_token, allowed, payer)
        if isinstance(answer, Failed):
            raise RequestError.of(answer)
        self._known[key] = (now, answer)
        self._known.move_to_end(key)
        if len(self._known) > _MAX_TEMPLATES:
            self._known.popitem(last=False)
        return answer

    def choose(
        self,
        text: ModelTokenizer,
        own: TemplateSource,
        adapter: str,
        with_tools: bool,
        name: str | None,
    ) -> Template:
        """The template for a request: an adapter's, if it has `own` ones, else the model's.

        name: of one of them, where the client named one.
        """
        if not own.by_name:
            chosen = text.templates.alone(_chosen(text.templates, "the model", with_tools, name))
        else:
            owner = f"adapter '{adapter}'"
            # The tokenizer is the model's: its special tokens are those that `own` does not name.
            tokens = text.templates.special_tokens | own.special_tokens
            chosen = TemplateSource(_chosen(own, owner, with_tools, name), tokens)
        alike = chosen.special_tokens == text.templates.special_tokens
        try:
            compiled = text.compiled(chosen.text) if alike else None
        except TemplateError as error:
            raise invalid(f"the chat template is broken: {error}", _PARAM) from error
        if compiled is not None:
            return _ModelTemplate(compiled, chosen, self)
        return _AdapterTemplate(chosen, f"adapter '{adapter}'", self.renderer)

    async def close(self) -> None:
        """End what renders."""
        self.pool.shutdown(wait=False)
        await self.renderer.close()


def _chosen(source: TemplateSource, owner: str, with_tools: bool, name: str | None) -> str:
    """The text of the template that transformers would take."""
    known = source.by_name
    if not known:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    names = ", ".join(known)
    if name is not None:
        if name not in known:
            words = f"`{_PARAM}` must name one of {owner}'s templates ({names}): no other is run"
            raise invalid(words, _PARAM, "unsupported_parameter")
        return known[name]
    default = TOOL_USE if with_tools and TOOL_USE in known else DEFAULT
    if default not in known:
        words = f"{owner} has chat templates ({names}), but none is the default: name one"
        raise invalid(f"{words} in `{_PARAM}`", _PARAM)
    return known[default]
