"""LoRAX's reply objects: whole replies, and events of a stream."""

from collections.abc import AsyncGenerator, Sequence
from typing import NotRequired, TypedDict

import msgspec

from configs.wire.sampling import FinishReason
from deployments.contract import SequenceRequest
from deployments.ingress.generation.choices import best_first
from deployments.ingress.generation.prompt_replies import PrefillToken, prefill
from deployments.ingress.generation.replies import Choice, FinishedCall, RunningCall
from deployments.ingress.http.sse import data
from deployments.ingress.lorax.schema import GenerateRequestBody
from deployments.ingress.text.detokenizer_state import TextPiece
from deployments.ingress.text.logprobs import finite, sampled_logprob
from deployments.ingress.text.tokenizer import ModelTokenizer


class Alternative(msgspec.Struct):
    """One of the likeliest tokens at a position."""

    id: int
    text: str
    logprob: float


class Token(msgspec.Struct):
    """One generated token in LoRAX's form; alternatives only if they are requested."""

    id: int
    text: str
    logprob: float
    special: bool
    skipped: bool = False
    alternative_tokens: list[Alternative] | msgspec.UnsetType = msgspec.UNSET


class StreamDetails(msgspec.Struct):
    """Details of the last event of a stream; seed: None for greedy requests."""

    finish_reason: FinishReason
    prompt_tokens: int
    generated_tokens: int
    seed: int | None
    skipped_tokens: int = 0


class OtherSequence(msgspec.Struct):
    """One of the `best_of` sequences that are not the best."""

    generated_text: str
    finish_reason: FinishReason
    generated_tokens: int
    seed: int | None
    tokens: list[Token]
    prefill: list[PrefillToken] = []


class Details(StreamDetails, kw_only=True):
    """Details of a whole reply; the other sequences only with `best_of`."""

    tokens: list[Token]
    prefill: list[PrefillToken] = []
    best_of_sequences: list[OtherSequence] | msgspec.UnsetType = msgspec.UNSET


class GenerateReply(TypedDict):
    """A whole reply; details only if they are requested."""

    generated_text: str
    details: NotRequired[Details]


class StreamEvent(msgspec.Struct):
    """One event of a stream; the last one has the whole text."""

    token: Token
    generated_text: str | None = None
    details: StreamDetails | None = None


class LoraxWriter:
    """Writes the reply to one native request."""

    def __init__(
        self,
        body: GenerateRequestBody,
        sequences: Sequence[SequenceRequest],
        tokenizer: ModelTokenizer,
    ) -> None:
        """sequences: of the driver's request; one, or `best_of`."""
        first = sequences[0]
        self._prefix = body.inputs if body.given.return_full_text else ""
        self._details = body.given.details
        self._whole_details = body.given.detailed
        self._num_input = len(first.prompt)
        self._stopping = first.stopping
        drawn = first.sampling.temperature > 0
        self._seeds = [each.sampling.seed if drawn else None for each in sequences]
        self._token_writer = _TokenWriter(tokenizer, first.sampling.logprobs > 0)

    def body(self, result: FinishedCall) -> GenerateReply:
        """A whole reply: the best sequence, and the others in its details."""
        choices = result.choices
        best, *others = best_first(
            result.completion.sequences, [choice.num_tokens for choice in choices]
        )
        reply: GenerateReply = {"generated_text": self._prefix + choices[best].text}
        if self._whole_details:
            choice = choices[best]
            reply["details"] = Details(
                finish_reason=choice.reason,
                prompt_tokens=self._num_input,
                generated_tokens=choice.num_tokens,
                seed=self._seeds[best],
                skipped_tokens=sum(piece.skipped for piece in choice.pieces),
                tokens=self._token_writer.all_of(choice),
                prefill=prefill(choice, self._token_writer.tokenizer),
                best_of_sequences=[self._other(choices[i], self._seeds[i]) for i in others]
                or msgspec.UNSET,
            )
        return reply

    def _other(self, choice: Choice, seed: int | None) -> OtherSequence:
        return OtherSequence(
            generated_text=self._prefix + choice.text,
            finish_reason=choice.reason,
            generated_tokens=choice.num_tokens,
            seed=seed,
            tokens=self._token_writer.all_of(choice),
            prefill=prefill(choice, self._token_writer.tokenizer),
        )

    async def chunks(self, running: RunningCall) -> AsyncGenerator[bytes, None]:
        """One event for each token; the last event also has the whole text."""
        writer = self._token_writer
        detokenizer = running.detokenizers[0]
        # The token that may be the last one: it waits, for only the last event has details.
        waiting: list[TextPiece] = []
        texts: list[str] = []
        num_skipped = 0
        async for batch in running.events():
            [event] = batch
            pieces = waiting + event.pieces
            texts.append(event.text)
            num_skipped += sum(piece.skipped for piece in event.pieces)
            if event.reason is not None:
                *others, last = writer.tokens(pieces, event.rest) or [_NO_TOKEN]
                counts = detokenizer.num_tokens, num_skipped
                ending = self._ending(last, "".join(texts), event.reason, *counts)
                yield b"".join([data(StreamEvent(token)) for token in others]) + data(ending)
                continue
            sendable = len(pieces) - self._may_end(pieces[-1], detokenizer.num_tokens)
            pieces, waiting = pieces[:sendable], pieces[sendable:]
            if pieces:
                yield b"".join([data(StreamEvent(writer.token(piece))) for piece in pieces])

    def _may_end(self, last: TextPiece, num_tokens: int) -> bool:
        """Whether the driver may end the sequence at this token."""
        stopping = self._stopping
        return last.token in stopping.stop_token_ids or num_tokens >= stopping.max_new_tokens

    def _ending(
        self, token: Token, text: str, reason: FinishReason, num_tokens: int, num_skipped: int
    ) -> StreamEvent:
        seed = self._seeds[0]
        details = StreamDetails(reason, self._num_input, num_tokens, seed, num_skipped)
        return StreamEvent(token, self._prefix + text, details if self._details else None)


# For the last event, if the last token was sent before the end of the sequence was known.
_NO_TOKEN = Token(id=0, text="", logprob=0.0, special=True)


class _TokenWriter:
    """Converts pieces to LoRAX's tokens."""

    def __init__(self, tokenizer: ModelTokenizer, alternatives: bool) -> None:
        self.tokenizer = tokenizer
        self._alternatives = alternatives

    def token(self, piece: TextPiece) -> Token:
        """One token."""
        special = piece.token in self.tokenizer.special_ids
        shown = self.tokenizer.token_text(piece.token) if special else piece.text
        token = Token(piece.token, shown, sampled_logprob(piece), special, piece.skipped)
        if self._alternatives and piece.logprobs is not None:
            pairs = zip(piece.logprobs.top_ids, piece.logprobs.top_logprobs, strict=True)
            token.alternative_tokens = [
                Alternative(id, self.tokenizer.token_text(id), finite(value)) for id, value in pairs
            ]
        return token

    def tokens(self, pieces: Sequence[TextPiece], rest: str) -> list[Token]:
        """All tokens; the rest of the text is added to the last token that has text."""
        tokens = [self.token(piece) for piece in pieces]
        owner = next((token for token in reversed(tokens) if not token.special), None)
        if owner is not None:
            owner.text += rest
        return tokens

    def all_of(self, choice: Choice) -> list[Token]:
        """The tokens of a whole sequence."""
        rest = choice.text[sum(len(piece.text) for piece in choice.pieces) :]
        return self.tokens(choice.pieces, rest)
