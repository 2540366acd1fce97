"""Messages and their events. A whole reply is made from the events of a stream."""

import re
import secrets
from collections.abc import Sequence
from typing import Any

import msgspec
from pydantic_core import from_json

from configs.wire.sampling import FinishReason
from deployments.ingress.anthropic.reply_types import (
    MessageReply,
    MessageUsage,
    StopReason,
    ThinkingTokens,
)
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.replies import Choice
from deployments.ingress.http.errors import RequestError, anthropic_error, anthropic_status
from deployments.ingress.reasoning.answers import AnswerFormat
from deployments.ingress.reasoning.splitter import AnswerPart, ReasoningDelta
from deployments.ingress.requests.usage import UsageReply
from deployments.ingress.tools.parsers import ArgumentsDelta, CallStart

_encode = msgspec.json.Encoder().encode

# Group 1: an escape that stays; a pair of surrogates is one. No group: half of a pair, which UTF-8
# cannot hold.
_ESCAPE = re.compile(
    r"(\\(?:[^u]|u(?![dD][89a-fA-F])|u[dD][89abAB][0-9a-fA-F]{2}\\u[dD][c-fC-F][0-9a-fA-F]{2}))"
    r"|\\u[dD][89a-fA-F][0-9a-fA-F]{2}"
)
# Clients need a signature to send a block of thinking back; nothing checks it here.
_SIGNATURE = "unsigned"


class MessageWriter:
    """Writes one message: its growing list of blocks, and an event for each change."""

    def __init__(
        self, model: str, num_prompt: int, answers: AnswerFormat, cut_to_context: bool
    ) -> None:
        """num_prompt: tokens. cut_to_context: the answer may be as long as the context only."""
        self._message: MessageReply = {
            "id": f"msg_{secrets.token_hex(12)}",
            "type": "message",
            "role": "assistant",
            "model": model,
            "content": [],
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(num_prompt, 0, 0),
        }
        self._answers = answers
        self._reader = answers.reader()
        self._cut_to_context = cut_to_context
        self._reason = FinishReason.LENGTH
        self._block: dict[str, Any] | None = None
        self._arguments = ""
        self._blanks = ""  # Before a block of text: clients refuse one of blanks alone.
        self._events: list[bytes] = []

    def opening(self, num_choices: int) -> bytes:
        """The event before any token; a message has one choice."""
        self._add_event("message_start", message=self._message)
        return self._take_events()

    def chunks(self, event: Event) -> bytes:
        """The events for new text of the sequence, or its end."""
        parts = self._reader.push(event.pieces, event.rest)
        for part in parts + (self._reader.end() if event.reason is not None else []):
            self._write_part(part)
        if event.reason is not None:
            self._reason, self._message["stop_sequence"] = event.reason, event.stop
        return self._take_events()

    def closing(self, usage: UsageReply) -> bytes:
        """The events after the sequence has ended."""
        if self._blanks and not self._message["content"]:
            self._open_block({"type": "text", "text": ""})
            self._write_text(self._blanks)
        self._close_block()
        message = self._message
        cached = usage["prompt_tokens_details"]["cached_tokens"]
        message["usage"] = _usage(usage["prompt_tokens"], cached, usage["completion_tokens"])
        if self._reader.reasoning_tokens:
            thinking: ThinkingTokens = {"thinking_tokens": self._reader.reasoning_tokens}
            message["usage"]["output_tokens_details"] = thinking
        message["stop_reason"] = self._stop_reason()
        delta = {
            "stop_reason": message["stop_reason"],
            "stop_sequence": message["stop_sequence"],
        }
        self._add_event("message_delta", delta=delta, usage=message["usage"])
        self._add_event("message_stop")
        return self._take_events()

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> MessageReply:
        """The whole message."""
        [choice] = choices
        rest = choice.text.removeprefix("".join([piece.text for piece in choice.pieces]))
        self.chunks(Event(0, choice.pieces, rest, choice.reason, choice.stop))
        self.closing(usage)
        return self._message

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        body = anthropic_error(anthropic_status(error.kind), error.message, error.code)
        return b"event: error\ndata: " + _encode(body) + b"\n\n"

    def _write_part(self, part: AnswerPart) -> None:
        if isinstance(part, ArgumentsDelta):
            self._arguments += part.text
            self._add_delta({"type": "input_json_delta", "partial_json": part.text})
        elif isinstance(part, CallStart):
            self._blanks = ""
            call = {
                "type": "tool_use",
                "id": self._answers.call_id(part, "toolu_"),
                "name": part.name,
                "input": {},
            }
            self._open_block(call)
        elif isinstance(part, ReasoningDelta):
            self._add_thinking(part.text)
        else:
            self._add_text(part.text)

    def _add_thinking(self, text: str) -> None:
        if self._block is None or self._block["type"] != "thinking":
            self._open_block({"type": "thinking", "thinking": "", "signature": ""})
        assert self._block is not None, "thinking without a block"
        self._block["thinking"] += text
        self._add_delta({"type": "thinking_delta", "thinking": text})

    def _add_text(self, text: str) -> None:
        if self._block is None or self._block["type"] != "text":
            text, self._blanks = self._blanks + text, ""
            if not text.strip():
                self._blanks = text
                return
            self._open_block({"type": "text", "text": ""})
        self._write_text(text)

    def _write_text(self, text: str) -> None:
        assert self._block is not None, "text without a block"
        self._block["text"] += text
        self._add_delta({"type": "text_delta", "text": text})

    def _open_block(self, block: dict[str, Any]) -> None:
        self._close_block()
        self._block = block
        content = self._message["content"]
        content.append(block)
        self._add_event("content_block_start", index=len(content) - 1, content_block=block)
        if len(content) == 1:
            self._add_event("ping")

    def _close_block(self) -> None:
        """End the block under way; a call that was cut off has the arguments so far."""
        if self._block is None:
            return
        if self._block["type"] == "tool_use":
            self._block["input"] = _input(self._arguments)
            self._arguments = ""
        elif self._block["type"] == "thinking":
            self._block["signature"] = _SIGNATURE
            self._add_delta({"type": "signature_delta", "signature": _SIGNATURE})
        self._add_event("content_block_stop", index=len(self._message["content"]) - 1)
        self._block = None

    def _stop_reason(self) -> StopReason:
        if self._reason is FinishReason.LENGTH:
            return "model_context_window_exceeded" if self._cut_to_context else "max_tokens"
        if self._reason is FinishReason.STOP_STRING:
            return "stop_sequence"
        calls = any(block["type"] == "tool_use" for block in self._message["content"])
        return "tool_use" if calls else "end_turn"

    def _add_delta(self, delta: dict[str, Any]) -> None:
        index = len(self._message["content"]) - 1
        self._add_event("content_block_delta", index=index, delta=delta)

    def _add_event(self, kind: str, **fields: object) -> None:
        event = _encode({"type": kind, **fields})
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + event + b"\n\n")

    def _take_events(self) -> bytes:
        written = b"".join(self._events)
        self._events.clear()
        return written


def _usage(num_prompt: int, num_cached: int, num_generated: int) -> MessageUsage:
    return {
        "input_tokens": num_prompt - num_cached,
        # Tokens that a client pays to keep in a cache, which this server does not offer.
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": num_cached,
        "output_tokens": num_generated,
    }


def _input(arguments: str) -> dict[str, Any]:
    """The value of a call's arguments, as far as they were written."""
    arguments = _ESCAPE.sub(lambda escape: escape[1] or r"\ufffd", arguments)
    try:
        found = from_json(arguments, allow_partial="trailing-strings")
    except ValueError:
        return {}
    return found if isinstance(found, dict) else {}
