"""From tokens to text, one sequence at a time: incremental decoding and stop strings."""

from collections.abc import Callable, Container, Sequence

_REPLACEMENT = "\ufffd"
# A character has at most four bytes; with one byte a token, a longer tail is not a character.
_MAX_PENDING = 8


class TextStream:
    """Decodes a growing list of tokens; what it emits never changes afterwards.

    Tokens in `silent` have no text. Emitted text ends between characters; `flush` gives the
    rest, so that all pieces together equal the decoding of all tokens. Only a window of the
    last few tokens is decoded each time: `_window[:_read]` is context whose text is out.
    """

    def __init__(
        self, decode: Callable[[Sequence[int]], str], silent: Container[int] = frozenset()
    ) -> None:
        """`decode` turns ids into text without clean-up."""
        self._decode = decode
        self._silent = silent
        self._window: list[int] = []
        self._read = 0
        self._sent = 0

    def push(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete; empty while a character is unfinished."""
        audible = [token for token in tokens if token not in self._silent]
        if not audible:
            return ""
        self._window += audible
        text = self._decode(self._window)
        if len(text) <= self._sent:
            return ""
        if not text.endswith(_REPLACEMENT):
            return self._advance(text)
        if len(self._window) - self._read > _MAX_PENDING:
            return self._give_up(text)
        return ""

    def flush(self) -> str:
        """What is left, unfinished characters included; the stream is over."""
        if self._read == len(self._window):
            return ""
        text = self._decode(self._window)[self._sent :]
        self._read = len(self._window)
        return text

    def _advance(self, text: str) -> str:
        """Emit all of the window; its new part becomes the context of the next."""
        new = text[self._sent :]
        del self._window[: self._read]
        self._read = len(self._window)
        self._sent = len(self._decode(self._window))
        return new

    def _give_up(self, text: str) -> str:
        """Emit broken bytes up to a token boundary that no character spans.

        Decoding both sides apart gives the same text only if nothing spans the boundary.
        """
        for cut in range(len(self._window) - 1, len(self._window) - 5, -1):
            head = self._decode(self._window[:cut])
            if head + self._decode(self._window[cut:]) == text:
                new = head[self._sent :]
                del self._window[:cut]
                self._read = self._sent = 0
                return new
        return ""


class StopStrings:
    """Looks for stop strings in a stream of text, whatever pieces it comes in.

    The match that completes first wins; of those that complete together, the longest.
    keep=False cuts the stop string out, and holds back text that may turn out to begin one;
    keep=True passes everything up to the stop string's end at once.
    """

    def __init__(self, stops: Sequence[str], keep: bool) -> None:
        """`stops` are non-empty."""
        assert all(stops), "an empty stop string matches everywhere"
        self._stops = tuple(stops)
        self._keep = keep
        self._pending = ""
        self.matched = False

    def push(self, text: str) -> str:
        """The text that may be shown now; after a match nothing more is."""
        if not self._stops:
            return text
        if self.matched:
            return ""
        shown = len(self._pending) if self._keep else 0
        self._pending += text
        match = self._first_match()
        if match is not None:
            self.matched = True
            return self._pending[shown : match[1] if self._keep else match[0]]
        held = self._held()
        out = self._pending[shown:] if self._keep else self._pending[: len(self._pending) - held]
        self._pending = self._pending[len(self._pending) - held :]
        return out

    def flush(self) -> str:
        """Text that was held back for a stop string that did not come."""
        rest = "" if self._keep or self.matched else self._pending
        self._pending = ""
        return rest

    def _first_match(self) -> tuple[int, int] | None:
        """Start and end of the match that completes first."""
        found = [(self._pending.find(stop), len(stop)) for stop in self._stops]
        spans = [(start, start + length) for start, length in found if start >= 0]
        return min(spans, key=lambda span: (span[1], span[0]), default=None)

    def _held(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        return max(self._begun(stop) for stop in self._stops)

    def _begun(self, stop: str) -> int:
        """Length of the longest end of the pending text that begins this stop string."""
        longest = min(len(stop) - 1, len(self._pending))
        ends = (n for n in range(longest, 0, -1) if self._pending.endswith(stop[:n]))
        return next(ends, 0)
