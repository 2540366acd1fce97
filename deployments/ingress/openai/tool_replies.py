"""Chat replies with reasoning and tool calls."""

from collections.abc import Sequence

import msgspec

from configs.wire.sampling import FinishReason
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.replies import Choice
from deployments.ingress.openai.replies import ChatWriter, Envelope
from deployments.ingress.openai.reply_types import (
    ChatChoice,
    ChatReply,
    Reason,
    ToolFunction,
)
from deployments.ingress.reasoning.answers import AnswerFormat, AnswerReader, read_whole
from deployments.ingress.reasoning.splitter import AnswerPart, ReasoningDelta
from deployments.ingress.requests.usage import UsageReply
from deployments.ingress.text.detokenizer_state import TextPiece
from deployments.ingress.tools.parsers import CallStart, TextDelta

_encode = msgspec.json.Encoder().encode


class PartsChatWriter(ChatWriter):
    """Writes chat.completion objects with reasoning and calls split from the text.

    Calls are tool_calls, or function_call for `functions`.
    """

    def __init__(self, envelope: Envelope, answers: AnswerFormat) -> None:
        super().__init__(envelope)
        self._answers = answers
        self._legacy = answers.tooling is not None and answers.tooling.toolbox.legacy
        self._readers: dict[int, AnswerReader] = {}

    def first_chunk(self, index: int) -> bytes:
        """The role; starts a reader for the choice."""
        self._readers[index] = self._answers.reader()
        return super().first_chunk(index)

    def chunks(self, event: Event) -> bytes:
        """The chunks of one event; the first of them has the tokens' logprobs and ids."""
        reader = self._readers[event.sequence]
        parts = reader.push(event.pieces, event.rest)
        if event.reason is not None:
            parts += reader.end()
        pieces: Sequence[TextPiece] = event.pieces if self._lists_tokens else ()
        chunks = b""
        for delta in [self._part(part) for part in parts] or ([b'"delta":{}'] if pieces else []):
            chunks += self._chunk(event.sequence, delta, pieces)
            pieces = ()  # Each token is listed once.
        if event.reason is not None:
            reason = b'"%s"' % self._reason(event.reason, reader).encode()
            chunks += self._chunk(event.sequence, self._last_delta(), (), reason)
        return chunks

    def closing(self, usage: UsageReply) -> bytes:
        """The end of a stream; the usage counts the reasoning."""
        return super().closing(self._counted(usage))

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> ChatReply:
        """A whole reply; the usage counts the reasoning."""
        written = super().body(choices, usage)
        return {**written, "usage": self._counted(usage)}

    def _counted(self, usage: UsageReply) -> UsageReply:
        if self._answers.reasoning is None:
            return usage
        tokens = sum(reader.reasoning_tokens for reader in self._readers.values())
        return {**usage, "completion_tokens_details": {"reasoning_tokens": tokens}}

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        """A choice, with the reasoning and the calls split from its text."""
        written = super()._choice(index, choice)
        reader = self._readers[index] = self._answers.reader()
        answer = read_whole(reader, choice.text, choice.pieces)
        message = written["message"]
        split = answer.calls or answer.reasoning
        message["content"] = answer.text if answer.text or not split else None
        if answer.reasoning:
            message["reasoning_content"] = message["reasoning"] = answer.reasoning
        functions: list[ToolFunction] = [
            {"name": call.name, "arguments": call.arguments} for call in answer.calls
        ]
        if functions and self._legacy:
            message["function_call"] = functions[0]
        elif functions:
            message["tool_calls"] = [
                {
                    "id": self._answers.call_id(CallStart(at, function["name"])),
                    "type": "function",
                    "function": function,
                }
                for at, function in enumerate(functions)
            ]
        written["finish_reason"] = self._reason(choice.reason, reader)
        return written

    def _part(self, part: AnswerPart) -> bytes:
        """The delta of a part."""
        if isinstance(part, TextDelta):
            return self._delta(part.text)
        if isinstance(part, ReasoningDelta):
            delta = {"reasoning_content": part.text, "reasoning": part.text}
            return b'"delta":' + _encode(delta)
        if isinstance(part, CallStart):
            call: dict[str, object] = {"name": part.name, "arguments": ""}
            if not self._legacy:
                call = {"index": part.call, "id": self._answers.call_id(part), "type": "function",
                        "function": call}  # fmt: skip
        else:
            call = {"arguments": part.text}
            if not self._legacy:
                call = {"index": part.call, "function": call}
        written = {"function_call": call} if self._legacy else {"tool_calls": [call]}
        return b'"delta":' + _encode(written)

    def _reason(self, reason: FinishReason, reader: AnswerReader) -> Reason:
        if reason is FinishReason.LENGTH:
            return "length"
        # A call that a stop string cut off must not be made.
        cut_off = reason is FinishReason.STOP_STRING and reader.cut_off
        if cut_off or not reader.num_calls:
            return "stop"
        return "function_call" if self._legacy else "tool_calls"


def chat_writer(envelope: Envelope, answers: AnswerFormat) -> ChatWriter:
    """The writer of a chat's reply."""
    return ChatWriter(envelope) if answers.plain else PartsChatWriter(envelope, answers)
