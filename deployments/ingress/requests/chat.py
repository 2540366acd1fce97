"""Makes a job from a chat request: its template, tools, reasoning and constraint."""

from collections.abc import Mapping
from dataclasses import replace
from typing import NamedTuple

import msgspec

from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.contract import SequenceRequest
from deployments.ingress.chat_templates.message_forms import text_of
from deployments.ingress.chat_templates.selection import Template
from deployments.ingress.generation.engine import EngineClient, GenerationJob, ServedModel
from deployments.ingress.generation.prompt_replies import Prompt
from deployments.ingress.http.errors import invalid
from deployments.ingress.reasoning.answers import AnswerFormat
from deployments.ingress.reasoning.formats import (
    FreePart,
    ReasoningFormat,
    Start,
    free_part,
    reasoning_format,
)
from deployments.ingress.requests.conversations import conversation
from deployments.ingress.requests.jobs import Caller, adapter_of, job_of
from deployments.ingress.requests.restrictions import restricted
from deployments.ingress.requests.schema import ChatBody
from deployments.ingress.requests.truncation import encoded
from deployments.ingress.structured.constraints import Constraint
from deployments.ingress.tools.grammars import calls_constraint
from deployments.ingress.tools.tooling import ToolFormat, tooling


class ChatJob(NamedTuple):
    """A chat's job; answers: what its answers consist of."""

    job: GenerationJob
    answers: AnswerFormat


async def chat(
    body: ChatBody, engine: EngineClient, served: ServedModel, caller: Caller
) -> ChatJob:
    """The job of a body that has passed `check`."""
    toolbox = body.toolbox
    adapter = adapter_of(body, served.info, engine.settings.default_source)
    template = await _template(body, engine, served, caller, adapter)
    wanted = await body.constraint()
    past_calls = sum(len(message.tool_calls or ()) for message in body.messages)
    parser = engine.settings.tool_parser
    tool_format = tooling(toolbox, template, parser, bool(wanted), past_calls)
    markers = tool_format.format.markers if tool_format is not None else frozenset()
    marker_ids = served.tokenizer.added_within(markers)
    constraint = await engine.compiler.compiled(
        _constraint(wanted, tool_format, marker_ids), served.info
    )
    rendered = await template.render(conversation(body, tool_format, template))
    # Special tokens only on request: the template writes those that it needs.
    ids = await encoded(rendered, body, served, bool(body.add_special_tokens), "messages")
    job = job_of(body, [Prompt(rendered, ids)], adapter, served.info, caller, constraint)
    job = await restricted(job, body, served)
    answers = AnswerFormat(tool_format, shows_reasoning=body.include_reasoning is not False)
    chat_job = ChatJob(_showing(job, marker_ids), answers)
    reasoning = reasoning_format(engine.settings.reasoning_parser, template)
    if reasoning is not None and body.separate_reasoning is False:
        marks = served.tokenizer.added_within(reasoning.markers)
        chat_job = ChatJob(_showing(chat_job.job, marks), answers)
    elif reasoning is not None and job.detokenize:
        start = _start(body, reasoning, rendered)
        chat_job = await _split(chat_job, reasoning, start, served)
    return _ending(chat_job)


def _ending(chat_job: ChatJob) -> ChatJob:
    """The chat's job, which ends with the first call if there may be no other."""
    job, answers = chat_job
    if not answers.ends_with_call:
        return chat_job
    return ChatJob(replace(job, end_check=answers.end_check), answers)


async def _split(
    chat_job: ChatJob, reasoning: ReasoningFormat, start: Start, served: ServedModel
) -> ChatJob:
    """The chat's job with its answers' reasoning split off; a constraint begins after it."""
    job, answers = chat_job
    constrains_all = answers.tooling is not None and answers.tooling.constrains_all
    if job.request.sequences[0].sampling.constraint and not constrains_all:
        free = await free_part(reasoning, start, served.tokenizer, served.info.vocab_size)
        if free is None:
            return chat_job  # The constraint begins at once, so there is no reasoning.
        sequences = [_freed(sequence, free) for sequence in job.request.sequences]
        job = replace(job, request=msgspec.structs.replace(job.request, sequences=sequences))
    # Tokens of the reasoning are counted one by one.
    job = _showing(job, served.tokenizer.added_within(reasoning.markers))
    job = replace(job, per_token=True)
    return ChatJob(job, replace(answers, reasoning=reasoning, start=start))


def _freed(sequence: SequenceRequest, free: FreePart) -> SequenceRequest:
    """The sequence with a free part before its constraint."""
    sampling = msgspec.structs.replace(sequence.sampling, free_from=free.begin, free_until=free.end)
    return msgspec.structs.replace(sequence, sampling=sampling)


def _showing(job: GenerationJob, marker_ids: Mapping[str, int]) -> GenerationJob:
    """The job with these special tokens in its text, as a reader needs them."""
    visible = job.visible_special_tokens | frozenset(marker_ids.values())
    return replace(job, visible_special_tokens=visible)


def _start(body: ChatBody, reasoning: ReasoningFormat, prompt: str) -> Start:
    """Where the answer begins: in its reasoning, or after it."""
    if not body.continue_final_message:
        return reasoning.start(prompt)
    if isinstance(body.continue_final_message, str) and body.continue_final_message != "content":
        return Start.REASONING
    return reasoning.start_within(text_of(body.messages[-1].rendered().get("content") or ""))


async def _template(
    body: ChatBody,
    engine: EngineClient,
    served: ServedModel,
    caller: Caller,
    adapter: AdapterReference | None,
) -> Template:
    """The chat template of the prompt: the adapter's own, or the model's."""
    own, name = TemplateSource(), ""
    if adapter is not None and not adapter.parts:  # Merges use the model's template.
        token, grant = body.api_token or caller.token, caller.grant
        own = await engine.adapter_templates.get(adapter, token, grant.patterns, grant.name)
        name = adapter.id
    model, with_tools = served.tokenizer.templates, body.toolbox is not None
    return engine.templates.select(model, own, name, with_tools, body.chat_template)


def _constraint(
    constraint: Constraint, tool_format: ToolFormat | None, marker_ids: Mapping[str, int]
) -> Constraint:
    """What the answer must fit: a format, calls of tools, or one of both."""
    if tool_format is None:
        return constraint
    toolbox = tool_format.toolbox
    if toolbox.forced and constraint.param == "response_format":
        constraint = Constraint()  # It is about the text, and such an answer has none.
    if constraint and (toolbox.forced or not constraint.json_schema):
        cannot = "tools that must be called" if toolbox.forced else "tools: only JSON can"
        raise invalid(f"`{constraint.param}` cannot be combined with {cannot}", constraint.param)
    return calls_constraint(toolbox, tool_format.format, marker_ids, constraint.json_schema)
