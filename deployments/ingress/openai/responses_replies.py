"""Response objects and their events: whole ones are made by the same hand as streams."""

import secrets
import time
from collections.abc import Mapping
from typing import Any

import msgspec

from configs.wire.sampling import FinishReason
from deployments.contract import ErrorKind
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.replies import Choice
from deployments.ingress.http.errors import RequestError
from deployments.ingress.openai.reply_types import ResponseUsage, UsageReply
from deployments.ingress.openai.tool_replies import call_id
from deployments.ingress.text.logprobs import chat_logprobs
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.ingress.tools.parsers import ArgumentsDelta, CallStart, Part, TextDelta
from deployments.ingress.tools.tooling import ToolFormat

_encode = msgspec.json.Encoder().encode
_BUSY = frozenset({ErrorKind.OVERLOADED})


def response_usage(usage: UsageReply) -> ResponseUsage:
    """Token counts by this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        # Written means: for a time that the request asked for. Here no request can.
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage["total_tokens"],
    }


class ResponseWriter:
    """Writes one response: items of output as they grow, and an event for each change."""

    def __init__(
        self,
        model: str,
        echoed: Mapping[str, Any],
        tooling: ToolFormat | None,
        text: ModelTokenizer | None,
    ) -> None:
        """`echoed` is repeated from the request; `text` spells logprobs, None for none of them."""
        self._response: dict[str, Any] = {
            "id": f"resp_{secrets.token_hex(24)}",
            "object": "response",
            "created_at": int(time.time()),
            "status": "in_progress",
            "background": False,
            "error": None,
            "incomplete_details": None,
            "model": model,
            "output": [],
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
            "usage": None,
            **echoed,
        }
        self._tooling = tooling
        self._reader = tooling.reader() if tooling is not None else None
        self._text = text
        self._number = 0
        self._item: dict[str, Any] | None = None
        self._events: list[bytes] = []

    def opening(self) -> bytes:
        """The events before any token."""
        self._tell("response.created", response=self._response)
        self._tell("response.in_progress", response=self._response)
        return self._told()

    def grow(self, event: Event) -> bytes:
        """The events that one event of the sequence makes."""
        logprobs = self._logprobs(event)
        for part in self._parts(event.text, event.reason is not None):
            self._take(part, logprobs)
            logprobs = []
        if logprobs:
            self._take(TextDelta(""), logprobs)
        return self._told()

    def close(self, reason: FinishReason, usage: UsageReply) -> bytes:
        """The events of the end."""
        if self._item is None and not self._response["output"]:
            self._open(_message())
        cut_off = reason is FinishReason.LENGTH
        status = "incomplete" if cut_off else "completed"
        self._shut(status)
        details = {"reason": "max_output_tokens"} if cut_off else None
        self._response |= {
            "status": status, "incomplete_details": details, "usage": response_usage(usage),
        }  # fmt: skip
        self._tell(f"response.{status}", response=self._response)
        return self._told()

    def whole(self, choice: Choice, usage: UsageReply) -> dict[str, Any]:
        """The response of a sequence at its end."""
        if choice.pieces and self._text is not None:
            rest = choice.text.removeprefix("".join(piece.text for piece in choice.pieces))
            self.grow(Event(0, choice.pieces, rest, choice.reason))
        else:
            self.grow(Event(0, [], choice.text, choice.reason))
        self.close(choice.reason, usage)
        return self._response

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that breaks."""
        code = "rate_limit_exceeded" if error.kind in _BUSY else "server_error"
        self._response |= {
            "status": "failed", "error": {"code": code, "message": error.message},
        }  # fmt: skip
        self._tell("response.failed", response=self._response)
        return self._told()

    def _parts(self, text: str, last: bool) -> list[Part]:
        if self._reader is None:
            return [TextDelta(text)] if text else []
        return self._reader.push(text) + (self._reader.end() if last else [])

    def _logprobs(self, event: Event) -> list[Any]:
        if self._text is None:
            return []
        found: Any = chat_logprobs(event.pieces, self._text)["content"]
        return list(found)

    def _take(self, part: Part, logprobs: list[Any]) -> None:
        if isinstance(part, ArgumentsDelta):
            self._argue(part.text)
            return
        if isinstance(part, CallStart):
            assert self._tooling is not None, "a call without tools"
            self._shut("completed")
            self._open(_call(part.name, call_id(self._tooling)))
            return
        if self._item is None or self._item["type"] != "message":
            self._shut("completed")
            self._open(_message())
        self._say(part.text, logprobs)

    def _open(self, item: dict[str, Any]) -> None:
        """Begin an item of output."""
        self._item = item
        self._response["output"].append(item)
        self._tell_of_item("response.output_item.added", item={**item, "content": []}
                           if item["type"] == "message" else item)  # fmt: skip
        if item["type"] == "message":
            self._tell_of_part("response.content_part.added", part=item["content"][0])

    def _say(self, text: str, logprobs: list[Any]) -> None:
        assert self._item is not None, "text without a message"
        part = self._item["content"][0]
        part["text"] += text
        part["logprobs"] += logprobs
        self._tell_of_part("response.output_text.delta", delta=text, logprobs=logprobs)

    def _argue(self, text: str) -> None:
        assert self._item is not None, "arguments without a call"
        self._item["arguments"] += text
        self._tell_of_item("response.function_call_arguments.delta", id=True, delta=text)

    def _shut(self, status: str) -> None:
        """End the item under way."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        if item["type"] == "message":
            part = item["content"][0]
            told = {"text": part["text"], "logprobs": part["logprobs"]}
            self._tell_of_part("response.output_text.done", **told)
            self._tell_of_part("response.content_part.done", part=part)
        else:
            arguments = item["arguments"]
            self._tell_of_item("response.function_call_arguments.done", id=True,
                               name=item["name"], arguments=arguments)  # fmt: skip
        self._tell_of_item("response.output_item.done", item=item)
        self._item = None

    def _tell_of_part(self, kind: str, **fields: object) -> None:
        self._tell_of_item(kind, id=True, content_index=0, **fields)

    def _tell_of_item(self, kind: str, id: bool = False, **fields: object) -> None:
        assert self._item is not None, kind
        named = {"item_id": self._item["id"]} if id else {}
        self._tell(kind, output_index=len(self._response["output"]) - 1, **named, **fields)

    def _tell(self, kind: str, **fields: object) -> None:
        event = {"type": kind, "sequence_number": self._number, **fields}
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n")
        self._number += 1

    def _told(self) -> bytes:
        told = b"".join(self._events)
        self._events.clear()
        return told


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{secrets.token_hex(24)}", "type": "message", "role": "assistant",
            "status": "in_progress", "content": [part]}  # fmt: skip


def _call(name: str, call: str) -> dict[str, Any]:
    return {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", "call_id": call,
            "name": name, "arguments": "", "status": "in_progress"}  # fmt: skip
