"""Messages in Anthropic's form, whose content is a list of blocks, as the messages of a chat."""

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import ConfigDict

from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.requests.request_fields import NO_SUCH

ChatMessage = dict[str, Any]


class Block(Typed):
    """One block of a message: text, thinking, a call of a tool, or its result."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Unicode
    text: Unicode | None = None
    thinking: Unicode | None = None
    id: Unicode | None = None
    name: Unicode | None = None
    input: dict[str, Any] | None = None
    tool_use_id: Unicode | None = None
    content: "Unicode | Items[Block] | None" = None
    is_error: bool | None = None


class MessageInput(Typed):
    """One message of the conversation."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    role: Literal["user", "assistant", "system"]
    content: Unicode | Items[Block]

    @property
    def blocks(self) -> Sequence[Block]:
        """The content as blocks."""
        if isinstance(self.content, str):
            return (Block(type="text", text=self.content),)
        return self.content


def chat_messages(messages: Sequence[MessageInput]) -> list[ChatMessage]:
    """The chat's messages; consecutive ones of one role are one turn."""
    written: list[ChatMessage] = []
    for message in messages:
        for block in message.blocks:
            if message.role == "assistant":
                _add_answer(_turn(written, "assistant"), block)
            elif block.type == "tool_result":
                written.append(_result(block))
            else:
                _turn(written, message.role).setdefault("content", []).append(_text(block))
        if not message.blocks:
            _turn(written, message.role).setdefault("content", [])
    for message_written in written:
        _simplify(message_written)
    return written


def chat_content(content: str | Sequence[Block], where: str) -> str | list[dict[str, Any]]:
    """A content of text alone, for a chat."""
    if isinstance(content, str):
        return content
    return [_text(block, where) for block in content]


def _turn(written: list[ChatMessage], role: str) -> ChatMessage:
    """The message of this role to which the next block belongs."""
    if not written or written[-1]["role"] != role:
        written.append({"role": role})
    return written[-1]


def _add_answer(message: ChatMessage, block: Block) -> None:
    """Add a block of an earlier answer."""
    if block.type == "tool_use":
        function = {"name": block.name or "", "arguments": json.dumps(block.input or {})}
        call = {"id": block.id, "type": "function", "function": function}
        message.setdefault("tool_calls", []).append(call)
    elif block.type == "thinking":
        # Templates decide which earlier thinking a prompt repeats.
        message["reasoning_content"] = message.get("reasoning_content", "") + (block.thinking or "")
    elif block.type != "redacted_thinking":
        message.setdefault("content", []).append(_text(block))


def _result(block: Block) -> ChatMessage:
    """The result of a call; is_error: for templates that read it, as others show the text alone."""
    content = chat_content(block.content or "", "messages")
    message: ChatMessage = {
        "role": "tool", "tool_call_id": block.tool_use_id, "content": content,
    }  # fmt: skip
    return {**message, "is_error": True} if block.is_error else message


def _text(block: Block, where: str = "messages") -> dict[str, Any]:
    if block.type != "text" or block.text is None:
        raise _unsupported(block.type, where)
    return {"type": "text", "text": block.text}


def _unsupported(kind: str, where: str) -> RequestError:
    return invalid(f"content of type `{kind}` is not supported here: only text", where, NO_SUCH)


def _simplify(message: ChatMessage) -> None:
    """Write a content of one text as a string, as most clients do."""
    content = message.get("content")
    if isinstance(content, list) and len(content) < 2:
        message["content"] = content[0]["text"] if content else ""
