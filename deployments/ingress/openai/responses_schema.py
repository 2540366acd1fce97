"""The body of POST /v1/responses, and its conversion to a chat."""

import json
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from configs.reading import is_encodable
from deployments.contract import EngineInfo
from deployments.ingress.http.body_lists import Items, at_most
from deployments.ingress.http.body_values import Natural, Positive, Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.requests.renaming import malformed_chat
from deployments.ingress.requests.request_fields import (
    NO_SUCH,
    REFUSED_RESPONSES,
    refuse_others,
)
from deployments.ingress.requests.schema import ChatBody

_LOGPROBS = "message.output_text.logprobs"
# The values of `include` that are accepted. There is no reasoning to encrypt.
_INCLUDED = frozenset({_LOGPROBS, "reasoning.encrypted_content"})
_TEXT_PARTS = frozenset({"input_text", "output_text", "text"})

# As many as OpenAI allows.
_MAX_METADATA = 16

NAMES = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "reasoning_effort": "reasoning.effort",
    "logprobs": "include",
}
"""This route's names of a chat's fields."""


class InputPart(Typed):
    """One part of a message; only text is served."""

    model_config = ConfigDict(extra="ignore")

    type: Unicode
    text: Unicode | None = None


class InputItem(Typed):
    """One item of the conversation: a message, a call, or the result of a call."""

    model_config = ConfigDict(extra="ignore")

    type: Unicode | None = None
    role: Unicode | None = None
    content: Unicode | Items[InputPart] | None = None
    call_id: Unicode | None = None
    name: Unicode | None = None
    arguments: Unicode | None = None
    output: Unicode | Items[InputPart] | None = None


class TextConfig(Typed):
    """The format of the answer's text."""

    model_config = ConfigDict(extra="ignore")

    format: dict[str, Any] | None = None
    verbosity: Literal["medium"] | None = None


class Reasoning(Typed):
    """How much the model reasons. The reply has the reasoning itself, and no summary of it."""

    model_config = ConfigDict(extra="ignore")

    effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None


class ResponsesBody(Typed):
    """POST /v1/responses; the other fields of a chat (seed, top_k, ...) are served too."""

    model_config = ConfigDict(frozen=True, allow_inf_nan=False, extra="allow")

    model: Unicode = Field(max_length=1024)
    input: Unicode | Items[InputItem]
    instructions: Unicode | None = None
    max_output_tokens: Positive | None = None
    temperature: float | None = Field(None, ge=0)
    top_p: float | None = Field(None, ge=0, le=1)
    text: TextConfig | None = None
    tools: Items[dict[str, Any]] | None = None
    tool_choice: Unicode | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include: Items[Unicode] | None = None
    top_logprobs: Natural | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    store: bool | None = None
    metadata: Annotated[dict[str, str], at_most(_MAX_METADATA)] | None = None
    reasoning: Reasoning | None = None

    @field_validator("text", "tools", "tool_choice", "metadata")
    @classmethod
    def _is_unicode(cls, given: Any) -> Any:
        """The response repeats these fields, so they must be valid Unicode."""
        plain = given.model_dump() if isinstance(given, BaseModel) else given
        if not is_encodable(json.dumps(plain, ensure_ascii=False)):
            raise ValueError("must be valid Unicode")
        return given

    @property
    def wants_logprobs(self) -> bool:
        """Whether the reply has its tokens' logprobs."""
        return _LOGPROBS in (self.include or ())

    def as_chat(self) -> ChatBody:
        """The same request as a chat; RequestError for what is not supported."""
        given = self.model_extra or {}
        refuse_others(given, REFUSED_RESPONSES)
        for name in self.include or ():
            if name not in _INCLUDED:
                raise invalid(f"`{name}` cannot be included", "include", NO_SUCH)
        if self.top_logprobs and not self.wants_logprobs:
            message = f"`top_logprobs` needs `{_LOGPROBS}` in `include`"
            raise invalid(message, "top_logprobs")
        extra = {name: given[name] for name in given if name not in REFUSED_RESPONSES}
        chat = {**extra, **self._chat()}
        try:
            return ChatBody.model_validate(chat)
        except ValidationError as fault:
            raise malformed_chat(fault, chat, NAMES) from fault

    def _chat(self) -> dict[str, Any]:
        chat: dict[str, Any] = {
            "model": self.model,
            "messages": self._messages(),
            "stream": self.stream,
            "logprobs": self.wants_logprobs or None,
            "top_logprobs": self.top_logprobs if self.wants_logprobs else None,
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "parallel_tool_calls": self.parallel_tool_calls,
            "tools": [_chat_tool(tool) for tool in self.tools] if self.tools else None,
            "tool_choice": _chat_choice(self.tool_choice),
            "response_format": self._format(),
            "reasoning_effort": self._effort,
        }
        return {name: value for name, value in chat.items() if value is not None}

    @property
    def _effort(self) -> str | None:
        return self.reasoning.effort if self.reasoning is not None else None

    def _messages(self) -> list[dict[str, Any]]:
        messages: list[dict[str, Any]] = []
        if self.instructions:
            messages.append({"role": "system", "content": self.instructions})
        if isinstance(self.input, str):
            return [*messages, {"role": "user", "content": self.input}]
        for item in self.input:
            _add(messages, item)
        # Reasoning that led to nothing is not shown to the model.
        messages = [message for message in messages if not _is_reasoning(message)]
        if not messages:
            raise invalid("`input` cannot be empty", "input")
        return messages

    def _format(self) -> dict[str, Any] | None:
        """The chat's response_format, in which a schema is one level deeper."""
        given = self.text.format if self.text is not None else None
        if given is None or given.get("type") != "json_schema":
            return given
        return {"type": "json_schema", "json_schema": given}


def _add(messages: list[dict[str, Any]], item: InputItem) -> None:
    """Append an item; calls join the assistant's message before them."""
    kind = item.type or "message"
    if kind == "message":
        if item.role is None:
            raise invalid("a message needs a `role`", "input")
        message = {"role": item.role, "content": _content(item.content)}
        if item.role == "assistant" and messages and _is_reasoning(messages[-1]):
            message = {**messages.pop(), **message}
        messages.append(message)
    elif kind == "function_call":
        function = {"name": item.name or "", "arguments": item.arguments or ""}
        call = {"id": item.call_id, "type": "function", "function": function}
        if not messages or messages[-1]["role"] != "assistant":
            messages.append({"role": "assistant"})
        messages[-1].setdefault("tool_calls", []).append(call)
    elif kind == "function_call_output":
        output = {"role": "tool", "tool_call_id": item.call_id, "content": _content(item.output)}
        messages.append(output)
    elif kind == "reasoning":
        # The message or the call that follows joins it; templates decide whether to show it.
        parts = item.content if isinstance(item.content, list) else ()
        reasoning = "".join([part.text or "" for part in parts])
        messages.append({"role": "assistant", "reasoning_content": reasoning})
    else:
        raise invalid(f"input of type `{kind}` is not supported", "input", NO_SUCH)


def _is_reasoning(message: Mapping[str, Any]) -> bool:
    """Whether the message has reasoning and nothing else."""
    return message.keys() == {"role", "reasoning_content"}


def _content(content: str | Iterable[InputPart] | None) -> str | list[dict[str, Any]] | None:
    """A content in the form of chats."""
    if content is None or isinstance(content, str):
        return content
    for part in content:
        if part.type not in _TEXT_PARTS or part.text is None:
            raise invalid(f"content of type `{part.type}` is not supported: only text", "input")
    return [{"type": "text", "text": part.text} for part in content]


def _chat_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of chats: one level deeper."""
    if tool.get("type") != "function" or "function" in tool:
        return dict(tool)
    return {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}


def _chat_choice(choice: str | Mapping[str, Any] | None) -> str | dict[str, Any] | None:
    """A tool_choice in the form of chats."""
    if choice is None or isinstance(choice, str):
        return choice
    if choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    if choice.get("type") == "allowed_tools" and "allowed_tools" not in choice:
        tools = [_chat_choice(tool) for tool in choice.get("tools") or ()]
        return {"type": "allowed_tools",
                "allowed_tools": {"mode": choice.get("mode", "auto"), "tools": tools}}  # fmt: skip
    return dict(choice)


def echoed(body: ResponsesBody, info: EngineInfo) -> dict[str, Any]:
    """The fields of the request that the response repeats."""
    defaults = {"temperature": 1.0, "top_p": 1.0, **info.sampling_defaults}
    shown = body.text.format if body.text is not None else None
    return {
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": body.metadata or {},
        "parallel_tool_calls": body.parallel_tool_calls is not False,
        "reasoning": {"effort": body.reasoning and body.reasoning.effort, "summary": None},
        "temperature": defaults["temperature"] if body.temperature is None else body.temperature,
        "text": {"format": shown or {"type": "text"}},
        "tool_choice": _echoed_choice(body.tool_choice or "auto"),
        "tools": [_echoed_tool(tool) for tool in body.tools or ()],
        "top_logprobs": body.top_logprobs or 0,
        "top_p": defaults["top_p"] if body.top_p is None else body.top_p,
    }


def _echoed_tool(tool: Mapping[str, Any]) -> dict[str, Any]:
    """A tool in the form of responses."""
    function = tool.get("function")
    flat = {"type": "function", **function} if isinstance(function, dict) else tool
    return {"strict": None, "parameters": None, **flat}


def _echoed_choice(choice: str | Mapping[str, Any]) -> str | dict[str, Any]:
    """A tool_choice in the form of responses."""
    if isinstance(choice, str):
        plain = choice in ("none", "auto", "required")
        return choice if plain else {"type": "function", "name": choice}
    nested = choice.get(str(choice.get("type")))
    return {"type": choice.get("type"), **nested} if isinstance(nested, dict) else dict(choice)
