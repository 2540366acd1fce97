"""One sequence's state between its tokens and the text that its client sees."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from configs.wire.plan import TokenLogprobs
from deployments.ingress.text.detokenize import TextStream
from deployments.ingress.text.stops import StopStrings


class TextPiece(NamedTuple):
    """The text that one token releases; `offset` is where the token's own text begins."""

    token: int
    text: str
    offset: int
    logprobs: TokenLogprobs | None


class DetokenizerState:
    """Feeds tokens through decoding and stop strings.

    num_tokens counts the tokens up to the stop string's last. per_token=False makes one piece
    of each batch of tokens, which is cheaper when nobody looks at single tokens; not with stop
    strings, which end between tokens. hidden: contents of tokens that only stop strings see.
    """

    def __init__(
        self,
        stream: TextStream,
        stops: StopStrings,
        per_token: bool,
        hidden: Mapping[int, str] | None = None,
    ) -> None:
        self._stream = stream
        self._stops = stops
        self._per_token = per_token
        self._hidden = hidden or {}
        self.num_tokens = 0

    @property
    def stopped(self) -> bool:
        """Whether a stop string has ended the text; later tokens are not the client's."""
        return self._stops.matched

    def feed(
        self, tokens: Sequence[int], logprobs: Sequence[TokenLogprobs] | None = None
    ) -> list[TextPiece]:
        """The pieces that these tokens release, up to the stop string if one completes."""
        if not tokens:
            return []
        if not self._per_token:
            return [self._piece(tokens, None)]
        pieces = []
        for index, token in enumerate(tokens):
            pieces.append(self._piece((token,), logprobs[index] if logprobs else None))
            if self._stops.matched:
                break
        return pieces

    def end(self) -> str:
        """The rest of the text, unfinished characters and held back text included."""
        return self._stops.push(self._stream.flush()) + self._stops.flush()

    def _piece(self, tokens: Sequence[int], logprobs: TokenLogprobs | None) -> TextPiece:
        text = self._stops.push(self._stream.push(tokens))
        if tokens[-1] in self._hidden:
            text += self._stops.push(self._hidden[tokens[-1]], hidden=True)
        self.num_tokens += len(tokens)
        return TextPiece(tokens[-1], text, self._stream.start, logprobs)
