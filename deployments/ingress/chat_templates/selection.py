"""Selects the chat template of a request: one of its adapter's, else one of the model's."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol

from jinja2 import TemplateError

from configs.wire.templates import DEFAULT, TOOL_USE, TemplateSource
from deployments.ingress.access.quotas import Clock
from deployments.ingress.chat_templates.renderer import Renderer
from deployments.ingress.chat_templates.rendering import packed
from deployments.ingress.chat_templates.template import ChatTemplate, Conversation, TemplateText
from deployments.ingress.http.errors import invalid

# Of a conversation that the model's own template renders here; longer ones go to a process.
_SHORT_BYTES = 64 << 10
_PARAM = "chat_template"


class Template(TemplateText, Protocol):
    """A selected template."""

    async def render(self, conversation: Conversation) -> str:
        """The prompt for this conversation; RequestError when the template refuses it."""
        ...


class _ModelTemplate:
    """The model's own. The operator trusts it, so short conversations render in this process."""

    def __init__(
        self,
        compiled: ChatTemplate,
        source: TemplateSource,
        renderer: Renderer,
        pool: ThreadPoolExecutor,
    ) -> None:
        self.source = compiled.source
        self._compiled = compiled
        self._source = source
        self._renderer = renderer
        self._pool = pool

    def reads(self, variable: str) -> bool:
        return self._compiled.reads(variable)

    async def render(self, conversation: Conversation) -> str:
        data = packed(conversation)
        if len(data) > _SHORT_BYTES:
            return await self._renderer.render_own(self._source, data)
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._pool, self._compiled.render, conversation)


class _AdapterTemplate:
    """An adapter's own. It is not trusted, so it renders in another process."""

    def __init__(self, source: TemplateSource, adapter: str, renderer: Renderer) -> None:
        self.source = source.text
        self._source = source
        self._adapter = adapter
        self._renderer = renderer

    def reads(self, variable: str) -> bool:
        # Parsing an untrusted template in this process could take any time.
        return variable in self.source

    async def render(self, conversation: Conversation) -> str:
        return await self._renderer.render(self._adapter, self._source, packed(conversation))


class ChatTemplates:
    """Selects templates and owns what renders them."""

    def __init__(self, clock: Clock) -> None:
        self.renderer = Renderer(clock)
        self._pool = ThreadPoolExecutor(2, thread_name_prefix="templates")
        self._compiled: dict[str, ChatTemplate] = {}

    def select(
        self,
        model: TemplateSource,
        own: TemplateSource,
        adapter: str,
        with_tools: bool,
        name: str | None,
    ) -> Template:
        """The template for a request: an adapter's, if it has `own` ones, else the model's.

        name: of one of them, where the client named one.
        """
        if not own.by_name:
            source = model.alone(_text(model, "the model", with_tools, name))
        else:
            # The tokenizer is the model's: it has the special tokens that `own` does not name.
            tokens = model.special_tokens | own.special_tokens
            text = _text(own, f"adapter '{adapter}'", with_tools, name)
            source = TemplateSource(text, tokens)
        # Most adapters are saved with a copy of the model's template, which is trusted.
        trusted = source.text in model.by_name.values()
        if not trusted or source.special_tokens != model.special_tokens:
            return _AdapterTemplate(source, f"adapter '{adapter}'", self.renderer)
        return _ModelTemplate(self._compile(source), source, self.renderer, self._pool)

    async def close(self) -> None:
        """End the threads and processes that render."""
        self._pool.shutdown(wait=False)
        await self.renderer.close()

    def _compile(self, source: TemplateSource) -> ChatTemplate:
        """One of the model's own templates, compiled once."""
        compiled = self._compiled.get(source.text)
        if compiled is None:
            try:
                compiled = ChatTemplate(source.text, source.special_tokens)
            except TemplateError as error:
                raise invalid(f"the chat template is broken: {error}", _PARAM) from error
            self._compiled[source.text] = compiled
        return compiled


def _text(source: TemplateSource, owner: str, with_tools: bool, name: str | None) -> str:
    """The text of the template that transformers would take."""
    known = source.by_name
    if not known:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    names = ", ".join(known)
    if name is not None:
        if name not in known:
            message = f"`{_PARAM}` must name one of {owner}'s templates ({names}): no other is run"
            raise invalid(message, _PARAM, "unsupported_parameter")
        return known[name]
    default = TOOL_USE if with_tools and TOOL_USE in known else DEFAULT
    if default not in known:
        message = f"{owner} has chat templates ({names}), but none is the default: name one"
        raise invalid(f"{message} in `{_PARAM}`", _PARAM)
    return known[default]
