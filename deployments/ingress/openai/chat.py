"""From a chat, its tools and its format to what the driver is asked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from configs.wire.templates import TemplateSource
from deployments.ingress.access.keys import Grant
from deployments.ingress.chat_templates.selection import Template
from deployments.ingress.generation.engine import EngineClient, GenerationJob, ServedModel
from deployments.ingress.generation.prompt_replies import Prompt
from deployments.ingress.http.errors import invalid
from deployments.ingress.openai.conversations import conversation
from deployments.ingress.openai.jobs import Caller, job_of, prompt_limit, reference_of
from deployments.ingress.openai.replies import ChatWriter, Envelope
from deployments.ingress.openai.schema import ChatBody
from deployments.ingress.openai.tool_replies import ToolChatWriter
from deployments.ingress.structured.constraints import Constraint
from deployments.ingress.tools.grammars import calls_constraint
from deployments.ingress.tools.tooling import ToolFormat, tooling


class ChatJob(NamedTuple):
    """One chat on its way to the driver; tooling is None when nothing may be called."""

    job: GenerationJob
    tooling: ToolFormat | None

    def writer(self, envelope: Envelope) -> ChatWriter:
        """What writes its chat.completion objects."""
        if self.tooling is None:
            return ChatWriter(envelope)
        return ToolChatWriter(envelope, self.tooling)


async def chat(
    body: ChatBody, engine: EngineClient, served: ServedModel, caller: Caller
) -> ChatJob:
    """A checked body as a job."""
    toolbox = body.toolbox
    template = await _template(body, engine, served, caller, toolbox is not None)
    means = tooling(toolbox, template, engine.settings.tool_parser)
    words = served.tokenizer.added(means.format.markers) if means is not None else {}
    asked = await engine.compiler.compiled(await _asked(body, means, words), served.info)
    rendered = await template.render(conversation(body, means, template))
    # The template has written all special tokens.
    limit = prompt_limit(served.info, "messages")
    ids = await served.tokenizer.encode(rendered, bool(body.add_special_tokens), limit)
    prompt = Prompt(rendered, ids)
    job = job_of(body, [prompt], served, engine.settings, caller, asked)
    if means is not None:
        job = replace(job, visible_special_tokens=frozenset(words.values()))
    return ChatJob(job, means)


async def _template(
    body: ChatBody, engine: EngineClient, served: ServedModel, caller: Caller, with_tools: bool
) -> Template:
    """The chat template that makes the prompt: the adapter's own, or the model's."""
    reference = reference_of(body, served.info, engine.settings)
    own, name = TemplateSource(), ""
    if reference is not None and not reference.parts:  # A merge's chats use the model's.
        grant = caller.grant or Grant()
        token = body.api_token or caller.token
        own = await engine.adapter_templates.get(reference, token, grant.patterns, grant.name)
        name = reference.id
    model = served.tokenizer.templates
    return engine.templates.select(model, own, name, with_tools, body.chat_template)


async def _asked(body: ChatBody, means: ToolFormat | None, words: Mapping[str, int]) -> Constraint:
    """What the answer must fit: the format, calls, or either."""
    asked = await body.constraint()
    if means is None:
        return asked
    toolbox = means.toolbox
    if asked and (toolbox.forced or not asked.json_schema):
        cannot = "tools that must be called" if toolbox.forced else "tools: only JSON can"
        raise invalid(f"`{asked.param}` cannot be combined with {cannot}", asked.param)
    return calls_constraint(toolbox, means.format, words, asked.json_schema)
