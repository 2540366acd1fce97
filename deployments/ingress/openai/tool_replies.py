"""Chat replies with tool calls."""

from collections.abc import Iterable
from dataclasses import dataclass, field

import msgspec

from configs.wire.sampling import FinishReason
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.replies import Choice
from deployments.ingress.openai.replies import ChatWriter, Envelope
from deployments.ingress.openai.reply_types import ChatChoice, Reason, ToolFunction
from deployments.ingress.tools.parsers import CallReader, CallStart, Part, TextDelta
from deployments.ingress.tools.tooling import ToolFormat

_encode = msgspec.json.Encoder().encode


@dataclass
class ReadCall:
    """A call in an answer; arguments: JSON text."""

    name: str
    arguments: str = ""


@dataclass
class Answer:
    """The text and the calls of an answer."""

    text: str = ""
    calls: list[ReadCall] = field(default_factory=list)

    def add(self, parts: Iterable[Part]) -> None:
        """Add parts of a reader."""
        for part in parts:
            if isinstance(part, TextDelta):
                self.text += part.text
            elif isinstance(part, CallStart):
                self.calls.append(ReadCall(part.name))
            else:
                self.calls[-1].arguments += part.text


def read_whole(reader: CallReader, text: str) -> Answer:
    """Read a whole answer."""
    answer = Answer()
    answer.add(reader.push(text) + reader.end())
    return answer


class ToolChatWriter(ChatWriter):
    """Writes chat.completion objects with tool_calls, or function_call for `functions`."""

    def __init__(self, envelope: Envelope, tooling: ToolFormat) -> None:
        super().__init__(envelope)
        self._tooling = tooling
        self._legacy = tooling.toolbox.legacy
        self._readers: dict[int, CallReader] = {}

    def first_chunk(self, index: int) -> bytes:
        """The role; starts a reader for the choice."""
        self._readers[index] = self._tooling.reader()
        return super().first_chunk(index)

    def chunks(self, event: Event) -> bytes:
        """The chunks of one event; the first of them has the logprobs."""
        reader = self._readers[event.sequence]
        parts = reader.push(event.text)
        if event.reason is not None:
            parts += reader.end()
        with_logprobs = bool(event.pieces) and self._envelope.num_logprobs >= 0
        deltas = [self._part(part) for part in parts] or ([b'"delta":{}'] if with_logprobs else [])
        logprobs = self._logprobs(event.pieces) if with_logprobs else b"null"
        chunks = b""
        for delta in deltas:
            chunks += self._chunk(event.sequence, delta, logprobs)
            logprobs = b"null"  # Each token's logprobs are sent once.
        if event.reason is not None:
            reason = b'"%s"' % self._reason(event.reason, reader.num_calls).encode()
            chunks += self._chunk(event.sequence, self._last_delta(), b"null", reason)
        return chunks

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        """A choice, with the calls separated from its text."""
        written = super()._choice(index, choice)
        answer = read_whole(self._tooling.reader(), choice.text)
        message = written["message"]
        message["content"] = answer.text if answer.text or not answer.calls else None
        functions: list[ToolFunction] = [
            {"name": call.name, "arguments": call.arguments} for call in answer.calls
        ]
        if functions and self._legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {"id": self._tooling.call_id(), "type": "function", "function": function}
                for function in functions
            ]
        written["finish_reason"] = self._reason(choice.reason, len(functions))
        return written

    def _part(self, part: Part) -> bytes:
        """The delta of a part."""
        if isinstance(part, TextDelta):
            return self._delta(part.text)
        if isinstance(part, CallStart):
            call: dict[str, object] = {"name": part.name, "arguments": ""}
            if not self._legacy:
                call = {"index": part.call, "id": self._tooling.call_id(), "type": "function",
                        "function": call}  # fmt: skip
        else:
            call = {"arguments": part.text}
            if not self._legacy:
                call = {"index": part.call, "function": call}
        written = {"function_call": call} if self._legacy else {"tool_calls": [call]}
        return b'"delta":' + _encode(written)

    def _reason(self, reason: FinishReason, num_calls: int) -> Reason:
        if reason is FinishReason.LENGTH:
            return "length"
        if not num_calls:
            return "stop"
        return "function_call" if self._legacy else "tool_calls"


def chat_writer(envelope: Envelope, tooling: ToolFormat | None) -> ChatWriter:
    """The writer of a chat's reply."""
    return ChatWriter(envelope) if tooling is None else ToolChatWriter(envelope, tooling)
