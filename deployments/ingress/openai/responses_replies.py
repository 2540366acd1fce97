"""Response objects and their events. A whole reply is made from the events of a stream."""

import secrets
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from configs.wire.sampling import FinishReason
from deployments.contract import ErrorKind
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.replies import Choice
from deployments.ingress.http.errors import RequestError
from deployments.ingress.openai.reply_types import ResponseUsage
from deployments.ingress.reasoning.answers import AnswerFormat
from deployments.ingress.reasoning.splitter import AnswerPart
from deployments.ingress.requests.usage import UsageReply
from deployments.ingress.text.detokenizer_state import TextPiece
from deployments.ingress.text.logprobs import chat_logprobs
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.ingress.tools.parsers import ArgumentsDelta, CallStart, TextDelta

_encode = msgspec.json.Encoder().encode
_BUSY = frozenset({ErrorKind.OVERLOADED})


def response_usage(usage: UsageReply, reasoning_tokens: int) -> ResponseUsage:
    """Token counts with this API's names."""
    return {
        "input_tokens": usage["prompt_tokens"],
        # Tokens that a client pays to keep in a cache, which this server does not offer.
        "input_tokens_details": {**usage["prompt_tokens_details"], "cache_write_tokens": 0},
        "output_tokens": usage["completion_tokens"],
        "output_tokens_details": {"reasoning_tokens": reasoning_tokens},
        "total_tokens": usage["total_tokens"],
    }


class ResponseWriter:
    """Writes one response: its growing items of output, and an event for each change."""

    def __init__(
        self,
        model: str,
        echoed: Mapping[str, Any],
        answers: AnswerFormat,
        tokenizer: ModelTokenizer | None,
    ) -> None:
        """echoed: fields of the request that the response repeats.

        tokenizer: for logprobs; None if they are not requested.
        """
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
        self._answers = answers
        self._reader = answers.reader()
        self._tokenizer = tokenizer
        self._sequence_number = 0
        self._reason = FinishReason.LENGTH
        self._item: dict[str, Any] | None = None
        self._events: list[bytes] = []
        self._logprobs: list[Any] = []  # Of tokens that are not known to be text or reasoning.

    def opening(self, num_choices: int) -> bytes:
        """The events before any token; a response has one choice."""
        self._add_event("response.created", response=self._response)
        self._add_event("response.in_progress", response=self._response)
        return self._take_events()

    def chunks(self, event: Event) -> bytes:
        """The events for new text of the sequence, or its end."""
        self._reason = event.reason or self._reason
        if self._tokenizer is None:
            self._write_parts(self._reader.push(event.pieces), [])
        else:
            for piece in event.pieces:
                self._write_token(piece, self._tokenizer)
        rest = self._reader.push((), event.rest)
        if event.reason is not None:
            self._write_parts(rest + self._reader.end(), self._logprobs)
        else:
            self._write_parts(rest, [])
        return self._take_events()

    def closing(self, usage: UsageReply) -> bytes:
        """The events after the sequence has ended."""
        if self._item is None and not self._response["output"]:
            self._open_item(_message())
        cut_off = self._reason is FinishReason.LENGTH
        status = "incomplete" if cut_off else "completed"
        # A stop string completes the response, but not the call that it cuts off.
        in_call = self._reason is FinishReason.STOP_STRING and self._reader.cut_off
        self._close_item("incomplete" if in_call else status)
        details = {"reason": "max_output_tokens"} if cut_off else None
        counts = response_usage(usage, self._reader.reasoning_tokens)
        self._response |= {"status": status, "incomplete_details": details, "usage": counts}
        self._add_event(f"response.{status}", response=self._response)
        return self._take_events()

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> dict[str, Any]:
        """The whole response."""
        [choice] = choices
        rest = choice.text.removeprefix("".join(piece.text for piece in choice.pieces))
        self.chunks(Event(0, choice.pieces, rest, choice.reason))
        self.closing(usage)
        return self._response

    def failed(self, error: RequestError) -> bytes:
        """The last event of a stream that fails."""
        code = "rate_limit_exceeded" if error.kind in _BUSY else "server_error"
        self._response |= {
            "status": "failed", "error": {"code": code, "message": error.message},
        }  # fmt: skip
        self._add_event("response.failed", response=self._response)
        return self._take_events()

    def _write_token(self, piece: TextPiece, tokenizer: ModelTokenizer) -> None:
        """Write a token and its logprobs; reasoning has none."""
        num_before = self._reader.reasoning_tokens
        parts = self._reader.push([piece])
        self._logprobs += chat_logprobs([piece], tokenizer)["content"]
        if self._reader.undecided_tokens:
            self._write_parts(parts, [])
            return
        known, self._logprobs = self._logprobs, []
        self._write_parts(parts, known if self._reader.reasoning_tokens == num_before else [])

    def _write_parts(self, parts: Sequence[AnswerPart], logprobs: list[Any]) -> None:
        # Each token's logprobs are sent once, with the first part; without parts, with empty text.
        for part in parts:
            self._write_part(part, logprobs)
            logprobs = []
        if logprobs:
            self._write_part(TextDelta(""), logprobs)

    def _write_part(self, part: AnswerPart, logprobs: list[Any]) -> None:
        if isinstance(part, ArgumentsDelta):
            self._write_arguments(part.text)
            return
        if isinstance(part, CallStart):
            self._close_item("completed")
            self._open_item(_call(part.name, self._answers.call_id(part)))
            return
        kind, item = ("message", _message) if isinstance(part, TextDelta) else _REASONING
        if self._item is None or self._item["type"] != kind:
            self._close_item("completed")
            self._open_item(item())
        self._write_text(part.text, logprobs)

    def _open_item(self, item: dict[str, Any]) -> None:
        """Begin an item of output."""
        self._item = item
        self._response["output"].append(item)
        self._add_item_event("response.output_item.added", item={**item, "content": []}
                           if "content" in item else item)  # fmt: skip
        if "content" in item:
            self._add_part_event("response.content_part.added", part=item["content"][0])

    def _write_text(self, text: str, logprobs: list[Any]) -> None:
        assert self._item is not None, "text without an item"
        part = self._item["content"][0]
        part["text"] += text
        if part["type"] == "reasoning_text":  # It has no logprobs.
            self._add_part_event("response.reasoning_text.delta", delta=text)
            return
        part["logprobs"] += logprobs
        self._add_part_event("response.output_text.delta", delta=text, logprobs=logprobs)

    def _write_arguments(self, text: str) -> None:
        assert self._item is not None, "arguments without a call"
        self._item["arguments"] += text
        self._add_item_event("response.function_call_arguments.delta", id=True, delta=text)

    def _close_item(self, status: str) -> None:
        """End the item under way."""
        item = self._item
        if item is None:
            return
        item["status"] = status
        if "content" in item:
            part = item["content"][0]
            own = {name: part[name] for name in ("text", "logprobs") if name in part}
            self._add_part_event(f"response.{part['type']}.done", **own)
            self._add_part_event("response.content_part.done", part=part)
        else:
            arguments = item["arguments"]
            self._add_item_event("response.function_call_arguments.done", id=True,
                               name=item["name"], arguments=arguments)  # fmt: skip
        self._add_item_event("response.output_item.done", item=item)
        self._item = None

    def _add_part_event(self, kind: str, **fields: object) -> None:
        self._add_item_event(kind, id=True, content_index=0, **fields)

    def _add_item_event(self, kind: str, id: bool = False, **fields: object) -> None:
        assert self._item is not None, kind
        named = {"item_id": self._item["id"]} if id else {}
        self._add_event(kind, output_index=len(self._response["output"]) - 1, **named, **fields)

    def _add_event(self, kind: str, **fields: object) -> None:
        event = {"type": kind, "sequence_number": self._sequence_number, **fields}
        self._events.append(b"event: " + kind.encode() + b"\ndata: " + _encode(event) + b"\n\n")
        self._sequence_number += 1

    def _take_events(self) -> bytes:
        written = b"".join(self._events)
        self._events.clear()
        return written


def _message() -> dict[str, Any]:
    part: dict[str, Any] = {"type": "output_text", "text": "", "annotations": [], "logprobs": []}
    return {"id": f"msg_{secrets.token_hex(24)}", "type": "message", "role": "assistant",
            "status": "in_progress", "content": [part]}  # fmt: skip


def _reasoning() -> dict[str, Any]:
    part = {"type": "reasoning_text", "text": ""}
    return {"id": f"rs_{secrets.token_hex(24)}", "type": "reasoning", "summary": [],
            "status": "in_progress", "encrypted_content": None, "content": [part]}  # fmt: skip


_REASONING = ("reasoning", _reasoning)


def _call(name: str, call: str) -> dict[str, Any]:
    return {"id": f"fc_{secrets.token_hex(24)}", "type": "function_call", "call_id": call,
            "name": name, "arguments": "", "status": "in_progress"}  # fmt: skip
