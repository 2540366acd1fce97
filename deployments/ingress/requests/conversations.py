"""Converts a chat request to the input of its template."""

from collections.abc import Sequence
from typing import Any

from deployments.ingress.chat_templates.template import Conversation, TemplateText
from deployments.ingress.http.errors import invalid
from deployments.ingress.requests.schema import ChatBody
from deployments.ingress.tools.tooling import ToolFormat, with_tools

# Parameters of transformers' apply_chat_template, which are not variables of a template.
RESERVED = frozenset({
    "messages", "conversation", "tools", "documents", "chat_template", "add_generation_prompt",
    "continue_final_message", "tokenize", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_dict", "return_assistant_tokens_mask",
    "tokenizer_kwargs",
})  # fmt: skip
# Fields of a request that are variables of the template.
_TEMPLATE_FIELDS = ("documents", "reasoning_effort")
SWITCHES = ("enable_thinking", "thinking")
"""Variables by which templates switch reasoning on and off."""


def conversation(
    body: ChatBody, tool_format: ToolFormat | None, template: TemplateText
) -> Conversation:
    """Messages, tools and variables; refuses fields that would have no effect."""
    messages, tools, tools_text = with_tools(body.rendered_messages(), tool_format, template)
    return Conversation(messages, _variables(body, tools, template), tools_text, _continues(body))


def _variables(
    body: ChatBody, tools: Sequence[Any] | None, template: TemplateText
) -> dict[str, Any]:
    variables = dict(body.chat_template_kwargs or {})
    for name in sorted(RESERVED & variables.keys()):
        message = f"`chat_template_kwargs` cannot set `{name}`: it is no variable of the template"
        raise invalid(message, "chat_template_kwargs")
    _switch_reasoning(body, variables, template)
    for name in _TEMPLATE_FIELDS:
        value = getattr(body, name)
        if name == "reasoning_effort" and _switch(template) and not template.reads(name):
            continue
        if value is None or (not value and not template.reads(name)):
            continue
        if not template.reads(name):
            message = f"`{name}` would have no effect: the chat template does not read it"
            raise invalid(message, name, "unsupported_parameter")
        if variables.setdefault(name, value) != value:
            raise invalid(f"`{name}` is in `chat_template_kwargs` with another value", name)
    continues = bool(body.continue_final_message)
    starts = body.add_generation_prompt if body.add_generation_prompt is not None else not continues
    if starts and continues:
        message = "`continue_final_message` cannot be combined with `add_generation_prompt`"
        raise invalid(message, "continue_final_message")
    return {**variables, "add_generation_prompt": starts, "tools": tools}


def _switch(template: TemplateText) -> str | None:
    """The template's variable that switches reasoning on and off; None without one."""
    return next((name for name in SWITCHES if template.reads(name)), None)


def _switch_reasoning(body: ChatBody, variables: dict[str, Any], template: TemplateText) -> None:
    """Switch reasoning by `reasoning_effort`, unless the template grades it or it is set."""
    switch, effort = _switch(template), body.reasoning_effort
    if switch is None or effort is None:
        return
    if effort == "none" or not template.reads("reasoning_effort"):
        variables.setdefault(switch, effort != "none")


def _continues(body: ChatBody) -> str:
    """The field of the last message that the answer continues; "" for a new message."""
    field = body.continue_final_message
    return field if isinstance(field, str) else "content" if field else ""
