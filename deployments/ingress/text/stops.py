"""Finds stop strings in a text that arrives in pieces."""

from collections.abc import Iterable, Sequence


class StopStrings:
    """Ends a growing text at its first stop string, however the text is split into pieces.

    The match that completes first wins; of those that complete together, the longest.
    keep=False removes the stop string, and withholds text that may be the start of one.
    keep=True returns the text up to the stop string's end, each piece at once.

    Special tokens are not visible in the text. A stop string that contains one of `special` (their
    contents) is searched in the text with those contents; all others in the visible text.

    found: the stop string that ended the text; None before.
    """

    def __init__(self, stops: Sequence[str], keep: bool, special: Iterable[str] = ()) -> None:
        assert all(stops), "an empty stop string matches everywhere"
        contents = list(special)
        self._with_special = [stop for stop in stops if any(each in stop for each in contents)]
        self._plain = [stop for stop in stops if stop not in self._with_special]
        self._has_stops = bool(stops)
        self._keep = keep
        self._pending = ""
        # One byte for each pending character: 1 where it belongs to a special token.
        self._hidden = b""
        self.found: str | None = None

    @property
    def matched(self) -> bool:
        """Whether a stop string has ended the text."""
        return self.found is not None

    def push(self, text: str, hidden: bool = False, may_end: bool = True) -> str:
        """Add text and return what the client may see now; after a match that is nothing.

        hidden: the text is a special token's content, which is searched but never returned.
        may_end: whether a stop string that is complete with this text is a match.
        """
        if not self._has_stops:
            return "" if hidden else text
        if self.matched:
            return ""
        seen = len(self._pending)
        returned = seen if self._keep else 0
        self._pending += text
        self._hidden += (b"\1" if hidden else b"\0") * len(text)
        match = self._first_match(seen) if may_end else None
        if match is not None:
            start, end, self.found = match
            return self._visible(returned, end if self._keep else start)
        # Only the end that may begin a stop string stays; the rest is never searched again.
        cut = len(self._pending) - self._num_undecided()
        released = self._visible(returned, len(self._pending) if self._keep else cut)
        self._pending, self._hidden = self._pending[cut:], self._hidden[cut:]
        return released

    def flush(self) -> str:
        """The text that was withheld for a stop string that did not come."""
        rest = "" if self._keep or self.matched else self._visible(0, len(self._pending))
        self._pending, self._hidden = "", b""
        return rest

    def _visible(self, start: int, stop: int) -> str:
        """This slice of the pending text without the hidden characters."""
        text, hidden = self._pending[start:stop], self._hidden[start:stop]
        if 1 not in hidden:
            return text
        return "".join(char for char, is_hidden in zip(text, hidden, strict=True) if not is_hidden)

    def _visible_indices(self) -> Sequence[int]:
        """The index in the pending text of each visible character."""
        if 1 not in self._hidden:
            return range(len(self._pending))
        return [index for index, is_hidden in enumerate(self._hidden) if not is_hidden]

    def _first_match(self, seen: int) -> tuple[int, int, str] | None:
        """Start and end in the pending text of the match that completes first, and its string.

        seen: pending characters with which no match completes.
        """
        found = [(_find(self._pending, stop, seen), stop) for stop in self._with_special]
        spans = [(start, start + len(stop), stop) for start, stop in found if start >= 0]
        visible, indices = self._visible(0, len(self._pending)), self._visible_indices()
        seen = len(self._visible(0, seen))
        found = [(_find(visible, stop, seen), stop) for stop in self._plain]
        spans += [
            (indices[at], indices[at + len(stop) - 1] + 1, stop) for at, stop in found if at >= 0
        ]
        return min(spans, key=lambda span: (span[1], span[0]), default=None)

    def _num_undecided(self) -> int:
        """Length of the longest end of the pending text that may begin a stop string."""
        visible, indices = self._visible(0, len(self._pending)), self._visible_indices()
        begun = max((begun_length(visible, stop) for stop in self._plain), default=0)
        undecided = len(self._pending) - indices[len(indices) - begun] if begun else 0
        lengths = [begun_length(self._pending, stop) for stop in self._with_special]
        return max([undecided, *lengths])


def _find(text: str, stop: str, seen: int) -> int:
    """Where the first occurrence begins that ends behind `seen` characters; -1 if there is none."""
    return text.find(stop, max(0, seen - len(stop) + 1))


def begun_length(text: str, target: str) -> int:
    """Length of the longest end of `text` with which `target` begins, but not all of `target`."""
    for length in range(min(len(target) - 1, len(text)), 0, -1):
        if text.endswith(target[:length]):
            return length
    return 0
