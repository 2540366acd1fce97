"""OpenAI's reply objects: whole ones as dicts, chunks as bytes in a prepared frame."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from configs.wire.sampling import FinishReason
from deployments.ingress.generation.calls import Event
from deployments.ingress.generation.prompt_replies import Prompt, echoed, prompt_logprobs_by_id
from deployments.ingress.generation.replies import Choice
from deployments.ingress.http.errors import OpenAIError, RequestError, openai_error
from deployments.ingress.http.sse import DONE, data
from deployments.ingress.openai.reply_types import (
    ChatChoice,
    ChatReply,
    CompletionChoice,
    CompletionReply,
    Reason,
)
from deployments.ingress.requests.usage import UsageReply
from deployments.ingress.text.detokenizer_state import TextPiece
from deployments.ingress.text.logprobs import (
    ChatLogprobs,
    CompletionLogprobs,
    chat_logprobs,
    completion_logprobs,
)
from deployments.ingress.text.tokenizer import ModelTokenizer

_encode = msgspec.json.Encoder().encode

_REASONS: Mapping[FinishReason, Reason] = {
    FinishReason.LENGTH: "length",
    FinishReason.STOP_TOKEN: "stop",
    FinishReason.STOP_STRING: "stop",
}


@dataclass(frozen=True)
class Envelope:
    """What all objects of one reply share.

    num_logprobs: as `Sampling.logprobs`.
    includes_usage: the stream ends with a chunk of usage.
    num_prompt_logprobs: alternatives of each prompt token in vLLM's shape; -1: none.
    prompts: the tokens of each choice's prompt, if the reply has all tokens' ids; None if not.
    created: in seconds since the epoch.
    """

    id: str
    model: str
    tokenizer: ModelTokenizer
    num_logprobs: int
    includes_usage: bool = False
    num_prompt_logprobs: int = -1
    prompts: Sequence[Sequence[int]] | None = None
    created: int = field(default_factory=lambda: int(time.time()))


class ReplyWriter:
    """Writes one reply, whole or in chunks; a subclass defines a choice."""

    chunk_kind: str

    def __init__(self, envelope: Envelope) -> None:
        self._envelope = envelope
        usage = {"usage": None} if envelope.includes_usage else {}
        # All bytes of a chunk but those of its choice are the same, so they are encoded once.
        frame = _encode({**self._chunk_head(), "choices": [], **usage})
        before, after = frame.split(b'"choices":[]', 1)
        self._before = b"data: " + before + b'"choices":[{"index":%d,'
        self._after = b"}]" + after + b"\n\n"

    def chunks(self, event: Event) -> bytes:
        """The chunks of one event."""
        text = event.text
        chunks = b""
        if text or (event.pieces and self._lists_tokens):
            chunks = self._chunk(event.sequence, self._delta(text), event.pieces)
        if event.reason is not None:
            reason = b'"%s"' % _REASONS[event.reason].encode()
            chunks += self._chunk(event.sequence, self._last_delta(), (), reason)
        return chunks

    def opening(self, num_choices: int) -> bytes:
        """The first chunk of each choice."""
        return b"".join([self.first_chunk(index) for index in range(num_choices)])

    def closing(self, usage: UsageReply) -> bytes:
        """The end of a stream: a chunk of usage, if requested, and the end mark."""
        if not self._envelope.includes_usage:
            return DONE
        return data({**self._chunk_head(), "choices": [], "usage": usage}) + DONE

    def failed(self, error: RequestError) -> OpenAIError:
        """The data of the last event of a stream that fails."""
        return openai_error(error)

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> Mapping[str, object]:
        """A whole reply."""
        raise NotImplementedError

    def first_chunk(self, index: int) -> bytes:
        """The chunk of a choice before any token."""
        raise NotImplementedError

    def _prompt_logprobs(self, choice: Choice) -> list[dict[str, Any] | None] | None:
        """The prompt's logprobs in vLLM's shape; None if they are not requested."""
        shared = self._envelope
        if shared.num_prompt_logprobs < 0:
            return None
        return prompt_logprobs_by_id(choice, shared.num_prompt_logprobs, shared.tokenizer)

    def _delta(self, text: str) -> bytes:
        raise NotImplementedError

    def _last_delta(self) -> bytes:
        raise NotImplementedError

    def _token_logprobs(self, pieces: Sequence[TextPiece]) -> Mapping[str, object] | None:
        """The tokens' logprobs; None if they are not requested."""
        raise NotImplementedError

    def _chunk_head(self) -> dict[str, object]:
        shared = self._envelope
        return {
            "id": shared.id, "object": self.chunk_kind, "created": shared.created,
            "model": shared.model,
        }  # fmt: skip

    @property
    def _lists_tokens(self) -> bool:
        """Whether chunks have logprobs or ids of their tokens."""
        return self._envelope.num_logprobs >= 0 or self._envelope.prompts is not None

    def _chunk(
        self,
        index: int,
        delta: bytes,
        pieces: Sequence[TextPiece] = (),
        reason: bytes = b"null",
        others: bytes = b"",
    ) -> bytes:
        """One chunk; pieces: its tokens, for their logprobs and ids; others: more fields."""
        logprobs = _encode(self._token_logprobs(pieces)) if pieces else b"null"
        if pieces and self._envelope.prompts is not None:
            others += b',"token_ids":' + _encode([piece.token for piece in pieces])
        parts = (self._before % index, delta, b',"logprobs":', logprobs, b',"finish_reason":',
                 reason, others, self._after)  # fmt: skip
        return b"".join(parts)


class CompletionWriter(ReplyWriter):
    """Writes text_completion objects; echo: each choice's prompt, if it is to be repeated."""

    chunk_kind = "text_completion"

    def __init__(self, envelope: Envelope, echo: Sequence[Prompt] = ()) -> None:
        super().__init__(envelope)
        self._echo = echo

    def first_chunk(self, index: int) -> bytes:
        """The prompt, if its text is to be repeated or its tokens are requested."""
        prompts = self._envelope.prompts
        if not self._echo and prompts is None:
            return b""
        ids = b',"prompt_token_ids":' + _encode(prompts[index]) if prompts is not None else b""
        text = self._echo[index].text if self._echo else ""
        return self._chunk(index, self._delta(text), others=ids)

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> CompletionReply:
        """A whole reply; each choice has its own prompt's logprobs."""
        shared = self._envelope
        return {
            "id": shared.id,
            "object": "text_completion",
            "created": shared.created,
            "model": shared.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }

    def _choice(self, index: int, choice: Choice) -> CompletionChoice:
        written: CompletionChoice = {
            "index": index,
            "text": self._echo[index].text + choice.text if self._echo else choice.text,
            "logprobs": self._token_logprobs(self._pieces(index, choice)),
            "finish_reason": _REASONS[choice.reason],
        }
        prompt_logprobs = self._prompt_logprobs(choice)
        if prompt_logprobs is not None:
            written["prompt_logprobs"] = prompt_logprobs
        if self._envelope.prompts is not None:
            written["prompt_token_ids"] = list(choice.prompt)
            written["token_ids"] = [piece.token for piece in choice.pieces]
        return written

    def _pieces(self, index: int, choice: Choice) -> list[TextPiece]:
        shared = self._envelope
        if not self._echo or shared.num_logprobs < 0:
            return choice.pieces
        return echoed(self._echo[index], choice, shared.num_logprobs, shared.tokenizer)

    def _delta(self, text: str) -> bytes:
        return b'"text":' + _encode(text)

    def _last_delta(self) -> bytes:
        return b'"text":""'

    def _token_logprobs(self, pieces: Sequence[TextPiece]) -> CompletionLogprobs | None:
        if self._envelope.num_logprobs < 0:
            return None
        return completion_logprobs(pieces, self._envelope.tokenizer, self._envelope.num_logprobs)


class ChatWriter(ReplyWriter):
    """Writes chat.completion objects."""

    chunk_kind = "chat.completion.chunk"

    def body(self, choices: Sequence[Choice], usage: UsageReply) -> ChatReply:
        """A whole reply; all choices share one prompt and its logprobs."""
        shared = self._envelope
        reply: ChatReply = {
            "id": shared.id,
            "object": "chat.completion",
            "created": shared.created,
            "model": shared.model,
            "choices": [self._choice(index, choice) for index, choice in enumerate(choices)],
            "usage": usage,
        }
        prompt_logprobs = self._prompt_logprobs(choices[0])
        if prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs
        if shared.prompts is not None:
            reply["prompt_token_ids"] = list(choices[0].prompt)
        return reply

    def first_chunk(self, index: int) -> bytes:
        """The role; the first choice's chunk has the prompt's tokens, if they are requested."""
        chunk = self._chunk(index, b'"delta":{"role":"assistant","content":"","refusal":null}')
        prompts = self._envelope.prompts
        if index or prompts is None:
            return chunk
        return chunk.replace(b"{", b'{"prompt_token_ids":' + _encode(prompts[0]) + b",", 1)

    def _choice(self, index: int, choice: Choice) -> ChatChoice:
        written: ChatChoice = {
            "index": index,
            "message": {"role": "assistant", "content": choice.text, "refusal": None},
            "logprobs": self._token_logprobs(choice.pieces),
            "finish_reason": _REASONS[choice.reason],
        }
        if self._envelope.prompts is not None:
            written["token_ids"] = [piece.token for piece in choice.pieces]
        return written

    def _delta(self, text: str) -> bytes:
        return b'"delta":{"content":' + _encode(text) + b"}"

    def _last_delta(self) -> bytes:
        return b'"delta":{}'

    def _token_logprobs(self, pieces: Sequence[TextPiece]) -> ChatLogprobs | None:
        if self._envelope.num_logprobs < 0:
            return None
        return chat_logprobs(pieces, self._envelope.tokenizer)
