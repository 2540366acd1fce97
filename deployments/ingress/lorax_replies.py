"""LoRAX's reply objects, whole and as events of a stream."""

from collections.abc import AsyncGenerator

import msgspec

from configs.sampling import FinishReason
from deployments.contract import SequenceRequest
from deployments.ingress.logprobs import sampled_logprob
from deployments.ingress.lorax_schema import GenerateRequestBody
from deployments.ingress.replies import Running, Whole
from deployments.ingress.sse import data
from deployments.ingress.text import Text
from deployments.ingress.transcript import Piece


class Token(msgspec.Struct):
    """One generated token as LoRAX shows it."""

    id: int
    text: str
    logprob: float
    special: bool
    skipped: bool = False


class StreamDetails(msgspec.Struct):
    """Details of the last event of a stream; `seed` is set when tokens were drawn."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    skipped_tokens: int = 0


class Details(StreamDetails, kw_only=True):
    """Details of a whole reply."""

    tokens: list[Token]
    prefill: list[Token] = []


class StreamEvent(msgspec.Struct):
    """One event of a stream; the last one bears the whole text."""

    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None


class Writer:
    """Writes the reply to one native request."""

    def __init__(self, body: GenerateRequestBody, sequence: SequenceRequest, text: Text) -> None:
        """`sequence` is what the driver was asked for."""
        self._prefix = body.inputs if body.settled.return_full_text else ""
        self._details = body.settled.details
        self._num_input = len(sequence.prompt)
        self._stopping = sequence.stopping
        self._seed = sequence.sampling.seed if sequence.sampling.temperature > 0 else None
        self._text = text

    def body(self, result: Whole) -> dict[str, object]:
        """A whole reply."""
        choice = result.choices[0]
        reply: dict[str, object] = {"generated_text": self._prefix + choice.text}
        if self._details:
            rest = choice.text[sum(len(piece.text) for piece in choice.pieces) :]
            reply["details"] = Details(
                finish_reason=choice.reason,
                prompt_tokens=self._num_input,
                generated_tokens=choice.num_tokens,
                seed=self._seed,
                tokens=_tokens(choice.pieces, rest, self._text),
            )
        return reply

    async def chunks(self, running: Running) -> AsyncGenerator[bytes, None]:
        """One event a token; a token that may be the last waits for its sequence's end."""
        text = self._text
        transcript = running.transcripts[0]
        held: list[Piece] = []
        shown: list[str] = []
        async for batch in running.events():
            [event] = batch
            pieces = held + event.pieces
            shown.append(event.text)
            if event.reason is not None:
                *others, last = _tokens(pieces, event.rest, text) or [_NO_TOKEN]
                ending = self._ending(last, "".join(shown), event.reason, transcript.num_tokens)
                yield b"".join([data(StreamEvent(token)) for token in others]) + data(ending)
                continue
            sendable = len(pieces) - self._may_end(pieces[-1], transcript.num_tokens)
            pieces, held = pieces[:sendable], pieces[sendable:]
            if pieces:
                yield b"".join([data(StreamEvent(_token(piece, text))) for piece in pieces])

    def _may_end(self, last: Piece, num_tokens: int) -> bool:
        """Whether the driver may end the sequence with this token."""
        stopping = self._stopping
        return last.token in stopping.stop_token_ids or num_tokens >= stopping.max_new_tokens

    def _ending(
        self, token: Token, text: str, reason: FinishReason, num_tokens: int
    ) -> StreamEvent:
        details = StreamDetails(reason, self._num_input, num_tokens, self._seed)
        return StreamEvent(token, self._prefix + text, details if self._details else None)


# Stands for a last token that is out already when its sequence turns out to have ended.
_NO_TOKEN = Token(id=0, text="", logprob=0.0, special=True)


def _token(piece: Piece, text: Text) -> Token:
    special = piece.token in text.special_ids
    shown = text.token_text(piece.token) if special else piece.text
    return Token(piece.token, shown, sampled_logprob(piece), special)


def _tokens(pieces: list[Piece], rest: str, text: Text) -> list[Token]:
    """All tokens; text that came only with the end belongs to the last that has text."""
    tokens = [_token(piece, text) for piece in pieces]
    owner = next((token for token in reversed(tokens) if not token.special), None)
    if owner is not None:
        owner.text += rest
    return tokens
