"""Tools in chats: what the model is told of them, what it may say, how its answer is read."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from configs.model import ToolParser
from deployments.ingress.chat import TemplateText
from deployments.ingress.tool_parsers import FORCED, FORMATS, CallFormat, CallReader
from deployments.ingress.tools_schema import Toolbox

_TOLD = """You can call functions. These are the functions, as JSON:
<tools>
{tools}
</tools>
"""
_HOW_IF_IT_LIKES = """To call a function, write a block like this, one for each call:
<tool_call>
{"name": "<the function's name>", "arguments": {<its arguments>}}
</tool_call>"""
_HOW_BY_FORCE = """Answer with a JSON list of calls and nothing else:
[{"name": "<the function's name>", "arguments": {<its arguments>}}]"""

# What templates of the known formats write, the more particular first.
_TRACES = (
    ("[TOOL_CALLS]", ToolParser.MISTRAL),
    ("<tool_call>", ToolParser.HERMES),
)

Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True)
class Tooling:
    """How one request's tools are told and read."""

    toolbox: Toolbox
    format: CallFormat

    def reader(self) -> CallReader:
        """A reader for one answer."""
        names = [function.name for function in self.toolbox.callable]
        return CallReader(self.format, names, self.toolbox.parallel)

    @property
    def short_ids(self) -> bool:
        """Whether calls are known by nine letters and digits: Mistral's templates insist."""
        return self.format is FORMATS[ToolParser.MISTRAL]


def tooling(
    toolbox: Toolbox | None, template: TemplateText | None, parser: ToolParser
) -> Tooling | None:
    """How the tools of a request meet this model."""
    if toolbox is None:
        return None
    if toolbox.forced:
        return Tooling(toolbox, FORCED)
    return Tooling(toolbox, FORMATS[_parser(template, parser)])


def _parser(template: TemplateText | None, parser: ToolParser) -> ToolParser:
    if template is None or not template.knows_tools:
        return ToolParser.HERMES  # as it was told to
    if parser is not ToolParser.AUTO:
        return parser
    found = (known for trace, known in _TRACES if trace in template.source)
    return next(found, ToolParser.LLAMA3_JSON)


def prompted(
    messages: Messages, tooling: Tooling | None, template: TemplateText
) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Messages and variables for the template; one that knows no tools gets them as text."""
    plain = [dict(message) for message in messages]
    toolbox = tooling.toolbox if tooling is not None else None
    if template.knows_tools:
        shown = [function.shown() for function in toolbox.functions] if toolbox else None
        return plain, {"tools": shown} if shown else {}
    plain = [_in_words(message) for message in plain]
    return (_told(plain, toolbox) if toolbox is not None else plain), {}


def _told(messages: list[dict[str, Any]], toolbox: Toolbox) -> list[dict[str, Any]]:
    """The messages with the tools in their system message."""
    lines = "\n".join(json.dumps(f.shown()["function"]) for f in toolbox.functions)
    how = _HOW_BY_FORCE if toolbox.forced else _HOW_IF_IT_LIKES
    told = _TOLD.format(tools=lines) + how
    if messages and messages[0]["role"] == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{told}".lstrip()}
        return [first, *messages[1:]]
    return [{"role": "system", "content": told}, *messages]


def _in_words(message: dict[str, Any]) -> dict[str, Any]:
    """A message without the fields and roles that are about tools."""
    if message["role"] == "tool":
        content = f"<tool_response>\n{message['content']}\n</tool_response>"
        return {"role": "user", "content": content}
    calls = message.pop("tool_calls", None)
    if calls:
        said = [message["content"]] if message["content"] else []
        blocks = [f"<tool_call>\n{json.dumps(call['function'])}\n</tool_call>" for call in calls]
        message["content"] = "\n".join([*said, *blocks])
    return message
