"""Selects the chat template of a request: one of the adapter's, else one of the model's."""

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

# The longest conversation that the model's template renders in this process.
_SHORT_BYTES = 64 << 10
_PARAM = "chat_template"


class Template(TemplateText, Protocol):
    """A selected template."""

    async def render(self, conversation: Conversation) -> str:
        """The prompt for this conversation; RequestError if the template refuses it."""
        ...


class _ModelTemplate:
    """A model's template. The operator trusts it, so it renders short conversations here."""

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
    """An adapter's template. It is not trusted, so another process renders it."""

    def __init__(self, source: TemplateSource, adapter: str, renderer: Renderer) -> None:
        self.source = source.text
        self._source = source
        self._adapter = adapter
        self._renderer = renderer

    def reads(self, variable: str) -> bool:
        # A search in the text: to parse an untrusted template could take any time.
        return variable in self.source

    async def render(self, conversation: Conversation) -> str:
        return await self._renderer.render(self._adapter, self._source, packed(conversation))


class ChatTemplates:
    """Selects templates, and owns the threads and processes that render them."""

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
        """The template for a request: one of the adapter's `own`, else one of the model's.

        name: requested by the client; None for the default one.
        """
        if not own.by_name:
            source = model.alone(_text(model, "the model", with_tools, name))
        else:
            # Special tokens that `own` does not define are those of the model's tokenizer.
            tokens = model.special_tokens | own.special_tokens
            text = _text(own, f"adapter '{adapter}'", with_tools, name)
            source = TemplateSource(text, tokens)
        # Most adapters have a copy of the model's template, which is as trusted as the original.
        trusted = source.text in model.by_name.values()
        if not trusted or source.special_tokens != model.special_tokens:
            return _AdapterTemplate(source, f"adapter '{adapter}'", self.renderer)
        return _ModelTemplate(self._compile(source), source, self.renderer, self._pool)

    async def close(self) -> None:
        """End the threads and processes."""
        self._pool.shutdown(wait=False)
        await self.renderer.close()

    def _compile(self, source: TemplateSource) -> ChatTemplate:
        """One of the model's templates; compiled once."""
        compiled = self._compiled.get(source.text)
        if compiled is None:
            try:
                compiled = ChatTemplate(source.text, source.special_tokens)
            except TemplateError as error:
                raise invalid(f"the chat template is broken: {error}", _PARAM) from error
            self._compiled[source.text] = compiled
        return compiled


def _text(source: TemplateSource, owner: str, with_tools: bool, name: str | None) -> str:
    """The text of the template, selected like in transformers."""
    templates = source.by_name
    if not templates:
        raise invalid("this model has no chat template; use /v1/completions", "messages")
    names = ", ".join(templates)
    if name is not None:
        if name not in templates:
            message = (
                f"`{_PARAM}` must name one of {owner}'s templates ({names}): others are not run"
            )
            raise invalid(message, _PARAM, "unsupported_parameter")
        return templates[name]
    default = TOOL_USE if with_tools and TOOL_USE in templates else DEFAULT
    if default not in templates:
        message = f"{owner} has chat templates ({names}), but none is the default: name one"
        raise invalid(f"{message} in `{_PARAM}`", _PARAM)
    return templates[default]
