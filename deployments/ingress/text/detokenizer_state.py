"""The state of one sequence between its tokens and the text that the client sees."""

from collections.abc import Callable, Container, Mapping, Sequence
from typing import NamedTuple

from configs.wire.plan import TokenLogprobs
from deployments.ingress.text.detokenize import TextStream
from deployments.ingress.text.stops import StopStrings


class TextPiece(NamedTuple):
    """The text that one token completes.

    offset: where the token's own text begins, in characters of the whole text.
    skipped: it was guessed right, and came behind another token of its step.
    """

    token: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None
    skipped: bool = False


EndCheck = Callable[[TextPiece], bool]
"""Gets each piece of one sequence; whether the text ends with it."""


class DetokenizerState:
    """Decodes the tokens of one sequence and ends its text at a stop string or where a check says.

    num_tokens: tokens so far, up to the last one of the stop string.
    """

    def __init__(
        self,
        stream: TextStream,
        stops: StopStrings,
        per_token: bool,
        hidden: Mapping[int, str] | None = None,
        end_check: EndCheck | None = None,
        min_tokens: int = 0,
    ) -> None:
        """per_token: make a piece of each token, which stop strings and `end_check` need; else of
        each batch.

        hidden: contents of special tokens, which are searched for stop strings but not returned.
        min_tokens: so many tokens complete no stop string that counts, as in vLLM.
        """
        self._stream = stream
        self._stops = stops
        self._per_token = per_token
        self._hidden = hidden or {}
        self._end_check = end_check
        self._min_tokens = min_tokens
        self._ended = False
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether the text has ended before its sequence; later tokens are discarded."""
        return self._ended or self._stops.matched

    @property
    def stop(self) -> str | None:
        """The stop string that ended the text."""
        return self._stops.found

    def feed(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[TokenLogprobs] | None = None,
        skipped: Container[int] = (),
    ) -> list[TextPiece]:
        """The pieces that these tokens complete, up to the stop string if there is one.

        skipped: the indices of skipped tokens, among all that were ever fed.
        """
        if not tokens:
            return []
        if not self._per_token:
            return [self._piece(tokens, None)]
        pieces = []
        for index, token in enumerate(tokens):
            is_skipped = self.num_tokens in skipped
            piece = self._piece((token,), logprobs[index] if logprobs else None)
            pieces.append(piece._replace(skipped=True) if is_skipped else piece)
            self._ended = self._end_check is not None and self._end_check(piece)
            if self.stopped:
                break
        return pieces

    def end(self) -> str:
        """The rest of the text: unfinished characters, and what was withheld for stop strings."""
        text = self._stops.push(self._stream.flush(), may_end=self._may_end)
        return text + self._stops.flush()

    @property
    def _may_end(self) -> bool:
        """Whether a stop string may end the text with the last token."""
        return self.num_tokens > self._min_tokens

    def _piece(self, tokens: Sequence[int], logprobs: TokenLogprobs | None) -> TextPiece:
        self.num_tokens += len(tokens)
        text = self._stops.push(self._stream.push(tokens), may_end=self._may_end)
        if tokens[-1] in self._hidden:
            hidden = self._hidden[tokens[-1]]
            text += self._stops.push(hidden, hidden=True, may_end=self._may_end)
        return TextPiece(tokens[-1], text, self._stream.start, logprobs)
