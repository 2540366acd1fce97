"""Match regular expressions of untrusted files in bounded time: as `re` does, or refused.

`re` backtracks: it may try one position in exponentially many ways, and holds the interpreter.
Here each part of a pattern maps the set of positions where it may begin to the set where it may
end, as bits of one integer, so the number of ways to reach a position does not matter.

Texts are module paths: one line of ASCII.
"""

import importlib
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

# The parser of `re` itself, so that both read a pattern alike.
_PARSER: Any = importlib.import_module("re._parser")

_Parts = Sequence[tuple[Any, Any]]

_CATEGORIES: dict[str, Callable[[str], bool]] = {
    "CATEGORY_DIGIT": str.isdecimal,
    "CATEGORY_SPACE": str.isspace,
    "CATEGORY_WORD": lambda char: char.isalnum() or char == "_",
}
_NOT = "CATEGORY_NOT_"


class PatternError(ValueError):
    """The pattern is invalid, needs backtracking, or costs too much."""


class MatchBudget:
    """The budget of one adapter's patterns, in steps of about a microsecond."""

    def __init__(self, steps: int) -> None:
        """steps: the whole budget."""
        self._left = steps

    def spend(self, steps: int) -> None:
        """Take steps; PatternError when the budget is used up."""
        self._left -= steps
        if self._left < 0:
            raise PatternError("it takes too long to match")


class Pattern:
    """A pattern in `re`'s language, without back references and possessive parts."""

    def __init__(self, text: str, effort: MatchBudget) -> None:
        """PatternError says what is wrong with `text`."""
        effort.spend(len(text))
        try:
            parsed = _PARSER.parse(text)
        except (re.error, RecursionError, OverflowError) as error:
            raise PatternError(f"it is not a regular expression: {error}") from error
        self._parts: _Parts = parsed
        self._flags: int = parsed.state.flags
        self._effort = effort

    def begins(self, text: str) -> bool:
        """Return whether it matches at the beginning of `text`, as `re.match`."""
        return self._ends(text) != 0

    def fits(self, text: str) -> bool:
        """Return whether it matches the whole `text`, as `re.fullmatch`."""
        return bool(self._ends(text) >> len(text))

    def _ends(self, text: str) -> int:
        try:
            return _Match(text, self._effort).ends(self._parts, 1, self._flags)
        except RecursionError as error:
            raise PatternError("it is nested too deeply") from error


class _Match:
    """One pattern on one text. Sets of positions are bits: bit i is before character i."""

    def __init__(self, text: str, effort: MatchBudget) -> None:
        self._effort = effort
        self._length = len(text)
        self._chars: dict[str, int] = {}
        for at, char in enumerate(text):
            self._chars[char] = self._chars.get(char, 0) | 1 << at
        self._found: dict[tuple[int, int], int] = {}
        self._assertions: dict[tuple[int, int], bool] = {}

    def ends(self, parts: _Parts, starts: int, flags: int) -> int:
        """Return where the sequence `parts` may end if it begins at one of `starts`."""
        for part in parts:
            if not starts:
                break
            self._effort.spend(1)
            starts = self._after(part, starts, flags)
        return starts

    def _after(self, part: tuple[Any, Any], starts: int, flags: int) -> int:
        kind, value = part[0].name, part[1]
        match kind:
            case "LITERAL" | "NOT_LITERAL" | "ANY" | "IN":
                return (starts & self._where(part, flags & re.IGNORECASE)) << 1
            case "AT":
                return starts & self._at(value.name)
            case "BRANCH":
                return _union(self.ends(parts, starts, flags) for parts in value[1])
            case "SUBPATTERN":
                _, added, removed, parts = value
                return self.ends(parts, starts, (flags | added) & ~removed)
            case "MAX_REPEAT" | "MIN_REPEAT":
                return self._repeat(value, starts, flags)
            case "ASSERT" | "ASSERT_NOT":
                return self._assert(value, kind == "ASSERT", starts, flags)
            case "FAILURE":
                return 0
        raise PatternError(f"it has a part that is not served ({kind.lower()})")

    def _repeat(self, value: tuple[int, int, _Parts], starts: int, flags: int) -> int:
        least, most, parts = value
        # More rounds than there are characters are empty ones, which change nothing more.
        rounds = self._length + 1
        for _ in range(min(least, rounds)):
            starts = self.ends(parts, starts, flags)
        reached = new = starts
        for _ in range(min(most - least, rounds)):
            new = self.ends(parts, new, flags) & ~reached
            if not new:
                break
            reached |= new
        return reached

    def _assert(self, value: tuple[int, Any], wanted: bool, starts: int, flags: int) -> int:
        """Return those of `starts` where a look-ahead (direction 1) or look-behind (-1) holds."""
        direction, parts = value
        at = (at for at in range(starts.bit_length()) if starts >> at & 1)
        return _union(1 << p for p in at if self._looks(direction, parts, p, flags) is wanted)

    def _looks(self, direction: int, parts: Any, at: int, flags: int) -> bool:
        # Cached for each position: nested assertions would multiply the work.
        key = (id(parts), at)
        if key not in self._assertions:
            least, most = parts.getwidth() if direction < 0 else (0, 0)
            if least != most:
                raise PatternError("it is not a regular expression: look-behind of any width")
            ends = self.ends(parts, 1 << at - least, flags) if at >= least else 0
            self._assertions[key] = bool(ends >> at & 1 if direction < 0 else ends)
        return self._assertions[key]

    def _at(self, name: str) -> int:
        """Return the positions of an anchor."""
        end = 1 << self._length
        if name in ("AT_BEGINNING", "AT_BEGINNING_STRING"):
            return 1
        if name in ("AT_END", "AT_END_STRING"):
            return end
        word = _CATEGORIES["CATEGORY_WORD"]
        # A boundary lies between a word's character and another one, or the text's end.
        inside = _union(bits for char, bits in self._chars.items() if word(char))
        edges = inside ^ inside << 1
        return edges if name == "AT_BOUNDARY" else ~edges & (end << 1) - 1

    def _where(self, part: tuple[Any, Any], caseless: int) -> int:
        """Return the positions of characters that a one-character part matches."""
        kind, value = part[0].name, part[1]
        if kind == "LITERAL" and not caseless:
            return self._chars.get(chr(value), 0)
        key = (id(part), caseless)
        if key not in self._found:
            items = value if kind == "IN" else [(part[0], value)]
            self._effort.spend(len(self._chars) * len(items) // 2)
            found = (bits for char, bits in self._chars.items() if _fits(items, char, caseless))
            self._found[key] = _union(found)
        return self._found[key]


def _union(sets: Iterable[int]) -> int:
    found = 0
    for each in sets:
        found |= each
    return found


def _fits(items: _Parts, char: str, caseless: int) -> bool:
    """Return whether an item of a set matches `char`, or for a negated set, none does."""
    # As `re` does for ASCII, which module paths are.
    forms = {char, char.lower(), char.upper()} if caseless else {char}
    negated: bool = items[0][0].name in ("NEGATE", "NOT_LITERAL")
    return negated != any(_is_in(item, form) for item in items for form in forms)


def _is_in(item: tuple[Any, Any], char: str) -> bool:
    kind, value = item[0].name, item[1]
    match kind:
        case "LITERAL" | "NOT_LITERAL":
            return bool(ord(char) == value)
        case "RANGE":
            return bool(value[0] <= ord(char) <= value[1])
        case "CATEGORY":
            plain = _CATEGORIES[value.name.replace(_NOT, "CATEGORY_")]
            return plain(char) != bool(value.name.startswith(_NOT))
    return bool(kind == "ANY")
