"""Stop strings in a text that comes in pieces."""

from collections.abc import Iterable, Sequence


class StopStrings:
    """Looks for stop strings in a stream of text, whatever pieces it comes in.

    The match that completes first wins; of those that complete together, the longest.
    keep=False cuts the stop string out, and holds back text that may turn out to begin one;
    keep=True passes everything up to the stop string's end at once.

    Special tokens have no text that is shown. A stop string that holds one of `special`, their
    contents, is looked for in the text with those contents; all others in the text that is shown.
    """

    def __init__(self, stops: Sequence[str], keep: bool, special: Iterable[str] = ()) -> None:
        """`stops` are non-empty."""
        assert all(stops), "an empty stop string matches everywhere"
        words = list(special)
        self._full = [stop for stop in stops if any(word in stop for word in words)]
        self._shown = [stop for stop in stops if stop not in self._full]
        self._stops = bool(stops)
        self._keep = keep
        self._pending = ""
        # Which characters of the pending text are a special token's.
        self._hidden = b""
        self.matched = False

    def push(self, text: str, hidden: bool = False) -> str:
        """The text that may be shown now; after a match nothing more is.

        hidden: it is a special token's content, which is looked at and never shown.
        """
        if not self._stops:
            return "" if hidden else text
        if self.matched:
            return ""
        shown = len(self._pending) if self._keep else 0
        self._pending += text
        self._hidden += (b"\1" if hidden else b"\0") * len(text)
        match = self._first_match()
        if match is not None:
            self.matched = True
            return self._visible(shown, match[1] if self._keep else match[0])
        held = len(self._pending) - self._num_held()
        out = self._visible(shown, len(self._pending) if self._keep else held)
        self._pending, self._hidden = self._pending[held:], self._hidden[held:]
        return out

    def flush(self) -> str:
        """Text that was held back for a stop string that did not come."""
        rest = "" if self._keep or self.matched else self._visible(0, len(self._pending))
        self._pending, self._hidden = "", b""
        return rest

    def _visible(self, start: int, stop: int) -> str:
        """The pending text between two places, without what is hidden."""
        text, hidden = self._pending[start:stop], self._hidden[start:stop]
        if 1 not in hidden:
            return text
        return "".join(char for char, is_hidden in zip(text, hidden, strict=True) if not is_hidden)

    def _places(self) -> Sequence[int]:
        """Where in the pending text each visible character stands."""
        if 1 not in self._hidden:
            return range(len(self._pending))
        return [place for place, is_hidden in enumerate(self._hidden) if not is_hidden]

    def _first_match(self) -> tuple[int, int] | None:
        """Start and end of the match that completes first, in the pending text."""
        found = [(self._pending.find(stop), len(stop)) for stop in self._full]
        spans = [(start, start + length) for start, length in found if start >= 0]
        visible, places = self._visible(0, len(self._pending)), self._places()
        found = [(visible.find(stop), len(stop)) for stop in self._shown]
        spans += [(places[at], places[at + length - 1] + 1) for at, length in found if at >= 0]
        return min(spans, key=lambda span: (span[1], span[0]), default=None)

    def _num_held(self) -> int:
        """Length of the longest end of the pending text that begins a stop string."""
        visible, places = self._visible(0, len(self._pending)), self._places()
        begun = max((_begun(visible, stop) for stop in self._shown), default=0)
        held = len(self._pending) - places[len(places) - begun] if begun else 0
        return max([held, *(_begun(self._pending, stop) for stop in self._full)])


def _begun(text: str, stop: str) -> int:
    """Length of the longest end of the text that begins this stop string."""
    longest = min(len(stop) - 1, len(text))
    ends = (n for n in range(longest, 0, -1) if text.endswith(stop[:n]))
    return next(ends, 0)
