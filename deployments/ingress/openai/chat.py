"""A chat, its tools and its format as a job for the driver."""

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
    tool_format = tooling(toolbox, template, engine.settings.tool_parser)
    marker_ids = (
        served.tokenizer.added(tool_format.format.markers) if tool_format is not None else {}
    )
    constraint = await engine.compiler.compiled(
        await _constraint(body, tool_format, marker_ids), served.info
    )
    rendered = await template.render(conversation(body, tool_format, template))
    # The template has written all special tokens.
    limit = prompt_limit(served.info, "messages")
    ids = await served.tokenizer.encode(rendered, bool(body.add_special_tokens), limit)
    prompt = Prompt(rendered, ids)
    job = job_of(body, [prompt], served, engine.settings, caller, constraint)
    if tool_format is not None:
        job = replace(job, visible_special_tokens=frozenset(marker_ids.values()))
    return ChatJob(job, tool_format)


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


async def _constraint(
    body: ChatBody, tool_format: ToolFormat | None, marker_ids: Mapping[str, int]
) -> Constraint:
    """What the answer must fit: the format, calls, or either."""
    constraint = await body.constraint()
    if tool_format is None:
        return constraint
    toolbox = tool_format.toolbox
    if constraint and (toolbox.forced or not constraint.json_schema):
        cannot = "tools that must be called" if toolbox.forced else "tools: only JSON can"
        raise invalid(f"`{constraint.param}` cannot be combined with {cannot}", constraint.param)
    return calls_constraint(toolbox, tool_format.format, marker_ids, constraint.json_schema)
