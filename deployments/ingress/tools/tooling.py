"""Tools in chats: their description in the prompt, and the format of calls in the answer."""

import json
import secrets
import string
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from configs.model import ToolParser
from deployments.ingress.chat_templates.message_forms import text_of
from deployments.ingress.chat_templates.template import TemplateText
from deployments.ingress.http.errors import invalid
from deployments.ingress.tools.formats import FORCED, FORMATS, TRACES, CallFormat
from deployments.ingress.tools.parsers import CallReader, CallStart
from deployments.ingress.tools.schema import Function, Toolbox

_INTRODUCTION = """You can call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
"""
_CALL_BLOCKS = """To call a function, write a block like this, one for each call:
<tool_call>
{"name": "<the function's name>", "arguments": {<its arguments>}}
</tool_call>"""
_CALL_LIST = """Answer with a JSON list of calls and nothing else:
[{"name": "<the function's name>", "arguments": {<its arguments>}}]"""

_SHORT = string.ascii_letters + string.digits

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class ToolFormat:
    """The tools of one request, and the format of their calls.

    parser: the format of the template, whose ids calls get; required calls have another `format`
        unless they are messages in channels.
    past_calls: calls in the conversation so far.
    """

    toolbox: Toolbox
    format: CallFormat
    parser: ToolParser = ToolParser.HERMES
    past_calls: int = 0

    @property
    def constrains_all(self) -> bool:
        """Whether the grammar of the calls describes the reasoning before them too."""
        return self.toolbox.forced and self.format.channels

    def reader(self) -> CallReader:
        """A reader for one answer."""
        functions = self.toolbox.callable
        schemas = {function.name: _properties(function) for function in functions}
        return CallReader(self.format, [*schemas], self.toolbox.parallel, schemas)

    def call_id(self, call: CallStart, prefix: str = "call_") -> str:
        """The id of a call of an answer."""
        # Mistral's templates require nine letters and digits.
        if self.parser is ToolParser.MISTRAL:
            return "".join(secrets.choice(_SHORT) for _ in range(9))
        # Kimi's write the id as the head of the call; it counts the conversation's calls.
        if self.parser is ToolParser.KIMI:
            return f"functions.{call.name}:{self.past_calls + call.call}"
        return f"{prefix}{secrets.token_hex(12)}"


def _properties(function: Function) -> Mapping[str, Any]:
    found = (function.parameters or {}).get("properties")
    return found if isinstance(found, dict) else {}


def tooling(
    toolbox: Toolbox | None,
    template: TemplateText | None,
    parser: ToolParser,
    constrained: bool = False,
    past_calls: int = 0,
) -> ToolFormat | None:
    """The format of this model's calls for these tools; None without tools.

    constrained: the answer must be an object where it is no call.
    past_calls: calls in the conversation so far.
    """
    if toolbox is None:
        return None
    written = _parser(template, parser)
    format = FORMATS[written]
    if toolbox.forced:
        return ToolFormat(toolbox, format if format.channels else FORCED, written, past_calls)
    strict = any(function.strict for function in toolbox.callable)
    if format.constrained or not (strict or constrained):
        return ToolFormat(toolbox, format, written, past_calls)
    hermes = FORMATS[ToolParser.HERMES]
    if format.begins[:1] == hermes.begins:  # The mask makes the model go on with an object.
        return ToolFormat(toolbox, hermes, written, past_calls)
    kind = "strict functions" if strict else "a format of the answer"
    message = f"{kind} beside calls that may be made cannot be served in this model's format"
    raise invalid(f"{message}: set `tool_choice` to required or none", toolbox.param)


def _parser(template: TemplateText | None, parser: ToolParser) -> ToolParser:
    if template is None or not template.reads("tools"):
        return ToolParser.HERMES  # The format in `_instructions`.
    if parser is not ToolParser.AUTO:
        return parser
    found = (format for trace, format in TRACES if trace in template.source)
    return next(found, ToolParser.LLAMA3_JSON)


def with_tools(
    messages: Messages, tooling: ToolFormat | None, template: TemplateText
) -> tuple[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, str]:
    """Messages, tools and instructions for a template; one that reads no tools gets text."""
    plain = [dict(message) for message in messages]
    toolbox = tooling.toolbox if tooling is not None else None
    if template.reads("tools"):
        return plain, toolbox.shown if toolbox else None, ""
    written: list[dict[str, Any]] = []
    # Consecutive results become one message: many templates require user and assistant to
    # alternate.
    for are_results, group in groupby(plain, lambda message: message["role"] == "tool"):
        if are_results:
            written.append({"role": "user", "content": "\n".join(map(_result, group))})
        else:
            written += map(_calls_as_text, group)
    return written, None, _instructions(toolbox) if toolbox else ""


def _instructions(toolbox: Toolbox) -> str:
    """The text that describes the tools, and how to call them."""
    lines = "\n".join(json.dumps(function.as_written) for function in toolbox.functions)
    instructions = _CALL_LIST if toolbox.forced else _CALL_BLOCKS
    return _INTRODUCTION.format(tools=lines) + instructions


def _result(message: Mapping[str, Any]) -> str:
    """The result of a call, as a user's text."""
    return f"<tool_response>\n{text_of(message.get('content') or '')}\n</tool_response>"


def _calls_as_text(message: dict[str, Any]) -> dict[str, Any]:
    """A message with its calls written into its content."""
    calls = message.pop("tool_calls", None)
    if calls:
        content = text_of(message.get("content") or "")
        texts = [content] if content else []
        blocks = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
        message["content"] = "\n".join([*texts, *blocks])
    return message
