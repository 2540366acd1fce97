"""Finds tool calls in a model's text: one incremental reader for all formats.

The result does not depend on how the text is split into pieces. Text that turns out not to be a
call of a known function is returned as text.
"""

import json
import re
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

from configs.reading import is_encodable
from deployments.ingress.text.stops import begun_length
from deployments.ingress.tools.arguments import (
    ArgumentsReader,
    JsonArguments,
    Span,
    arguments_reader,
    keywords,
)
from deployments.ingress.tools.formats import ArgumentStyle, CallFormat
from deployments.ingress.tools.values import json_text

_NONE: Mapping[str, Mapping[str, Any]] = MappingProxyType({})


class TextDelta(NamedTuple):
    """Text for the client."""

    text: str


class CallStart(NamedTuple):
    """A call begins; call: its index among the calls of an answer."""

    call: int
    name: str


class ArgumentsDelta(NamedTuple):
    """More of the arguments of that call, as JSON text."""

    call: int
    text: str


Part = TextDelta | CallStart | ArgumentsDelta

# The longest text before the arguments of a call; a longer object is read when it is complete.
_MAX_HEAD = 1024
# The longest call in Python, which is read when it is complete.
_MAX_PYTHON = 64 * 1024

Schemas = Mapping[str, Mapping[str, Any]]
"""The properties of each function's parameters, by its name."""


class CallReader:
    """Reads one answer; `push` its text as it comes, then `end`.

    cut_off: whether it ended within the arguments of a call.
    """

    def __init__(
        self, format: CallFormat, names: Sequence[str], parallel: bool, schemas: Schemas = _NONE
    ) -> None:
        """names: of the functions. parallel: an answer may have several calls."""
        self._format = format
        self._names = frozenset(names)
        self._schemas = schemas
        self._parallel = parallel
        any_name = "|".join(map(re.escape, sorted(names)))
        # Possessive quantifiers: with many blanks, backtracking would take quadratic time.
        self._head = re.compile(
            r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"(' + any_name +
            r')"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
        )  # fmt: skip
        self._named_head = re.compile(r"\s*+" + format.head.replace("NAME", f"({any_name})"))
        self._state: Callable[[], bool] = self._start if format.at_start else self._text
        self._buffer = ""  # Text that is not parsed yet.
        self._opener = ""  # Text that led to the current call; it is text if that is no call.
        self._span = Span()
        self._reader: ArgumentsReader = JsonArguments()
        self._scanned = 0
        self._listed = False
        self._closes = False
        self._trims = False
        self._called, self._head_end = "", 0  # Of a Python call.
        self._parts: list[Part] = []
        self.num_calls = 0
        self.cut_off = False

    @property
    def ended(self) -> bool:
        """Whether the only call that is wanted is complete; what follows is not read."""
        called = self.num_calls > 0 and not self._parallel
        return called and self._state in (self._between, self._ignore_rest)

    def push(self, text: str) -> list[Part]:
        """Add text; returns the parts that are certain now."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[Part]:
        """The remaining parts. No text may follow."""
        rest = self._opener + self._buffer
        self.cut_off = self._state == self._arguments
        calling = self._state in (self._arguments, self._closing, self._fields, self._between)
        cut_off = self.num_calls > 0 and (self._opener in (",", ";") or not rest.strip())
        if not (calling or cut_off):
            self._add_text(rest)
        self._buffer = self._opener = ""
        self._state = self._ignore_rest
        parts, self._parts = self._parts, []
        return parts

    # Each state consumes what it can from the buffer. True: the next state may continue.

    def _start(self) -> bool:
        """State: nothing but blanks so far."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        self._enter(self._block if begun[0] in "{[" else self._text)
        return True

    def _text(self) -> bool:
        """State: text for the client, up to a marker of calls; blanks around calls are dropped."""
        if self._trims:
            self._buffer = self._buffer.lstrip()
            self._trims = not self._buffer
        found = [(self._buffer.find(marker), marker) for marker in self._format.begins]
        at, marker = min([(at, marker) for at, marker in found if at >= 0], default=(-1, ""))
        if at < 0:
            cut = len(self._buffer) - self._num_undecided()
            self._add_text(self._buffer[:cut])
            self._buffer = self._buffer[cut:]
            return False
        text = self._buffer[:at].rstrip()
        self._add_text(text)
        self._opener = self._buffer[len(text) : at] + marker
        self._buffer = self._buffer[at + len(marker) :]
        self._enter(self._block)
        return True

    def _block(self) -> bool:
        """State: a call must begin here."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if begun[0] == "[" and not self._listed:
            self._listed = True
            self._opener += self._buffer[: len(self._buffer) - len(begun) + 1]
            self._buffer = begun[1:]
        elif begun[0] == "{":
            self._enter(self._item)
        elif self._format.named and self._listed is (self._format.style is ArgumentStyle.PYTHON):
            self._enter(self._name)
        else:
            self._reject_call()
        return True

    def _item(self) -> bool:
        """State: an object; if its fields are in the usual order, its arguments are streamed."""
        if head := self._head.match(self._buffer, 0, _MAX_HEAD):
            self._begin(head[1], head.end(), JsonArguments(), closing=True)
            return True
        end = self._span.feed(self._buffer[self._scanned :])
        if end < 0:
            self._scanned = len(self._buffer)
            return False
        end += self._scanned
        call = _call(self._buffer[:end], self._names)
        if call is None:
            self._reject_call()
            return True
        self._call(*call)
        self._buffer = self._buffer[end:]
        self._enter(self._between)
        return True

    def _name(self) -> bool:
        """State: a name, then its arguments."""
        at = self._buffer.find(self._format.stop, 0, _MAX_HEAD)
        if at < 0 and len(self._buffer) < _MAX_HEAD:
            return False
        head = self._named_head.match(self._buffer) if at >= 0 else None
        if head is None:
            self._reject_call()
        elif self._format.style is ArgumentStyle.PYTHON:
            self._scanned, self._head_end = head.end(), head.end()
            self._called = head[1]
            self._state, self._span = self._python, Span(1, python=True)
        else:
            reader = arguments_reader(self._format, self._schemas.get(head[1], {}))
            self._begin(head[1], head.end(), reader, closing=False)
        return True

    def _python(self) -> bool:
        """State: the keywords of a Python call, up to its bracket."""
        end = self._span.feed(self._buffer[self._scanned :])
        if end < 0:
            self._scanned = len(self._buffer)
            if self._scanned > _MAX_PYTHON:
                self._reject_call()
            return self._scanned > _MAX_PYTHON
        end += self._scanned
        found = keywords(self._buffer[self._head_end : end]) if end <= _MAX_PYTHON else None
        if found is None:
            self._reject_call()
            return True
        self._call(self._called, found)
        self._buffer = self._buffer[end:]
        self._enter(self._between)
        return True

    def _arguments(self) -> bool:
        shown, self._buffer, ended = self._reader.feed(self._buffer)
        if shown:
            self._parts.append(ArgumentsDelta(self.num_calls - 1, shown))
        if ended:
            self._enter(self._closing if self._closes else self._between)
        return ended

    def _closing(self) -> bool:
        """State: after its arguments an object ends, has more fields, or lacks its bracket."""
        begun = self._buffer.lstrip()
        if begun:
            self._enter(self._fields if begun[0] in ",}" else self._between)
        return bool(begun)

    def _fields(self) -> bool:
        """State: skip the fields of an object after its arguments."""
        end = self._span.feed(self._buffer)
        self._buffer = "" if end < 0 else self._buffer[end:]
        if end >= 0:
            self._enter(self._between)
        return end >= 0

    def _between(self) -> bool:
        """State: after a call comes another one, the end of calls, or text."""
        if not self._parallel:
            self._enter(self._ignore_rest)
            return True
        begun = self._buffer = self._buffer.lstrip()
        if not begun:
            return False
        end = self._format.end
        tail = next((each for each in self._format.tails if begun.startswith(each)), "")
        if tail:
            self._buffer = begun[len(tail) :]
        elif self._listed and begun[0] == "]":
            self._listed = False
            self._buffer = begun[1:]
        elif begun[0] in "}]":
            self._buffer = begun[1:]  # One bracket too many.
        elif begun[0] in ",;":
            self._opener, self._buffer = begun[0], begun[1:]
            self._enter(self._block)
        elif not self._listed and begun[0] == "{":
            self._enter(self._block)
        elif any(each.startswith(begun) and begun != each for each in (end, *self._format.tails)):
            return False
        else:
            self._buffer = begun.removeprefix(end)
            self._trims = True
            self._enter(self._text)
        return True

    def _ignore_rest(self) -> bool:
        self._buffer = ""
        return False

    def _enter(self, state: Callable[[], bool]) -> None:
        self._state = state
        self._scanned = 0
        # In `_fields` the object around the arguments is open.
        self._span = Span(1 if state == self._fields else 0)
        if state == self._text:
            self._listed = False

    def _begin(self, name: str, cut: int, reader: ArgumentsReader, closing: bool) -> None:
        self._closes = closing
        self._reader = reader
        self._buffer = self._buffer[cut:]
        self._call(name)
        self._enter(self._arguments)

    def _call(self, name: str, arguments: str = "") -> None:
        self._parts.append(CallStart(self.num_calls, name))
        if arguments:
            self._parts.append(ArgumentsDelta(self.num_calls, arguments))
        self.num_calls += 1
        self._opener = ""

    def _reject_call(self) -> None:
        """It was no call: return all of it as text."""
        self._add_text(self._opener)
        self._opener = ""
        self._enter(self._text)

    def _num_undecided(self) -> int:
        """Length of the buffer's end that may belong to a marker of calls or blanks before it."""
        if not self._format.begins:
            return 0
        longest = max(begun_length(self._buffer, marker) for marker in self._format.begins)
        text = self._buffer[: len(self._buffer) - longest]
        return longest + len(text) - len(text.rstrip())

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextDelta(text))


def _call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of an object with fields in any order; None if it is no call."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(found, dict) or not isinstance(found.get("name"), str):
        return None
    arguments = found.get("arguments", found.get("parameters", {}))
    if found["name"] not in names:
        return None
    if isinstance(arguments, str) and is_encodable(arguments):
        return found["name"], arguments
    return found["name"], json_text(arguments)
