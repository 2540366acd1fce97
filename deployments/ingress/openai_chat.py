"""From a chat, its tools and its format to what the driver is asked."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

from deployments.ingress.constraints import Constraint
from deployments.ingress.engine import Engine, Job, Served
from deployments.ingress.errors import invalid
from deployments.ingress.openai_jobs import Caller, job_of, reference_of
from deployments.ingress.openai_replies import ChatWriter, Envelope
from deployments.ingress.openai_schema import ChatBody
from deployments.ingress.prompt_replies import Prompt
from deployments.ingress.templates import AdapterTemplate
from deployments.ingress.tool_grammars import calls_constraint
from deployments.ingress.tool_replies import ToolChatWriter
from deployments.ingress.tools import Tooling, prompted, tooling


class Chat(NamedTuple):
    """One chat on its way to the driver; tooling is None when nothing may be called."""

    job: Job
    tooling: Tooling | None

    def writer(self, envelope: Envelope) -> ChatWriter:
        """What writes its chat.completion objects."""
        if self.tooling is None:
            return ChatWriter(envelope)
        return ToolChatWriter(envelope, self.tooling)


async def chat(body: ChatBody, engine: Engine, served: Served, caller: Caller) -> Chat:
    """A checked body as a job."""
    toolbox = body.toolbox
    text = served.text
    own = await _own_template(body, engine, served, caller)
    template = own or text.template
    means = tooling(toolbox, template, engine.settings.tool_parser)
    words = text.added(means.format.markers) if means is not None else {}
    asked = await engine.compiler.compiled(await _asked(body, means, words), served.info)
    messages, told = prompted(body.rendered_messages(), means, template)
    variables = {
        **body.chat_template_kwargs, **told, "add_generation_prompt": body.add_generation_prompt,
    }  # fmt: skip
    if own is None:
        prompt = Prompt(*await text.encode_chat(messages, variables))
    else:
        rendered = await own.render(messages, variables)
        prompt = Prompt(rendered, await text.encode(rendered, add_special_tokens=False))
    job = job_of(body, [prompt], served, engine.settings, caller, asked)
    if means is not None:
        job = replace(job, spoken=frozenset(words.values()))
    return Chat(job, means)


async def _own_template(
    body: ChatBody, engine: Engine, served: Served, caller: Caller
) -> AdapterTemplate | None:
    """The chat template that the request's adapter brings."""
    reference = reference_of(body, served.info, engine.settings)
    if reference is None:
        return None
    if reference.parts:
        return None  # A merge's chats use the base model's.
    allowed = caller.grant.patterns if caller.grant is not None else None
    return await engine.templates.of(reference, body.api_token or caller.token, allowed)


async def _asked(body: ChatBody, means: Tooling | None, words: Mapping[str, int]) -> Constraint:
    """What the answer must fit: the format, calls, or either."""
    asked = await body.constraint()
    if means is None:
        return asked
    toolbox = means.toolbox
    if asked and (toolbox.forced or not asked.json_schema):
        cannot = "tools that must be called" if toolbox.forced else "tools: only JSON can"
        raise invalid(f"`{asked.param}` cannot be combined with {cannot}", asked.param)
    return calls_constraint(toolbox, means.format, words, asked.json_schema)
