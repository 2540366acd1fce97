"""From a model's text to the calls in it: one incremental reader for the formats of today.

What comes out never depends on the pieces that the text comes in. Text that turns out to be no
call of a known function is given back as text.
"""

import json
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from configs.model import ToolParser
from deployments.ingress.http.unicode import is_encodable


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls: objects with `name` and `arguments` (or `parameters`).

    begins: the markers that open calls.
    end: the marker that closes them, "" for none.
    at_start: whether an answer that begins with { or [ is a call without a marker.
    named: whether a call may be a name and its arguments.
    others: further markers that belong to a call.
    key: the field of the arguments where a grammar writes them.
    """

    begins: tuple[str, ...] = ()
    end: str = ""
    at_start: bool = False
    named: bool = False
    others: tuple[str, ...] = ()
    key: str = "arguments"

    @property
    def markers(self) -> frozenset[str]:
        """Markers that must reach the reader even where they are special tokens."""
        return frozenset([*self.begins, self.end, *self.others]) - {""}


FORMATS = {
    ToolParser.HERMES: CallFormat(("<tool_call>",), "</tool_call>"),
    ToolParser.LLAMA3_JSON: CallFormat(("<|python_tag|>",), at_start=True, key="parameters"),
    ToolParser.MISTRAL: CallFormat(
        ("[TOOL_CALLS]",), named=True, others=("[ARGS]", "[CALL_ID]")
    ),
}  # fmt: skip
FORCED = CallFormat(at_start=True)
"""What a grammar makes of required calls: one list of objects."""


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

# Outside of strings no JSON has a "<": there a model goes on without having closed its brackets.
_MARKS = re.compile(r'["\\{}\[\]<]')
_DEPTH = {"{": 1, "[": 1, "}": -1, "]": -1}


class _Span:
    """Finds where a JSON object or list ends."""

    def __init__(self, depth: int = 0) -> None:
        """`depth` brackets are open already."""
        self._depth = depth
        self._quoted = False
        self._escaped = -1
        self._seen = 0

    def feed(self, text: str) -> int:
        """Where the value ends in this text, -1 if it goes on."""
        for mark in _MARKS.finditer(text):
            at = self._seen + mark.start()
            if self._closes(mark[0], at):
                return mark.start() if mark[0] == "<" else mark.end()
        self._seen += len(text)
        return -1

    def _closes(self, mark: str, at: int) -> bool:
        if self._quoted:
            if at == self._escaped:
                return False
            if mark == "\\":
                self._escaped = at + 1
            self._quoted = mark != '"'
            return False
        self._quoted = mark == '"'
        self._depth += _DEPTH.get(mark, 0)
        return mark == "<" or (mark in "}]" and self._depth <= 0)


class CallReader:
    """Reads one answer; `push` its text as it comes, then `end`."""

    def __init__(self, format: CallFormat, names: Sequence[str], parallel: bool) -> None:
        """`names` are the functions that may be called, without parallel once at most."""
        self._format = format
        self._names = frozenset(names)
        self._parallel = parallel
        any_name = "|".join(map(re.escape, sorted(names)))
        # Blanks are never tried again in other lengths: a model may write very many of them.
        self._head = re.compile(
            r'\s*+\{\s*+(?:"type"\s*+:\s*+"function"\s*+,\s*+)?"name"\s*+:\s*+"(' + any_name +
            r')"\s*+,\s*+"(?:arguments|parameters)"\s*+:\s*+(?=\{)'
        )  # fmt: skip
        self._named_head = re.compile(
            r"\s*+(" + any_name + r")\s*+(?:\[CALL_ID\]\w++)?\s*+(?:\[ARGS\])?\s*+(?=\{)"
        )
        self._state: Callable[[], bool] = self._start if format.at_start else self._text
        self._buffer = ""  # not decided yet
        self._opener = ""  # what led to the call that is being read, in case it is none
        self._span = _Span()
        self._scanned = 0
        self._listed = False
        self._closes = False
        self._trims = False
        self._parts: list[Part] = []
        self.num_calls = 0

    def push(self, text: str) -> list[Part]:
        """What is known once this came too."""
        self._buffer += text
        while self._buffer and self._state():
            pass
        parts, self._parts = self._parts, []
        return parts

    def end(self) -> list[Part]:
        """The rest."""
        rest = self._opener + self._buffer
        calling = self._state in (self._arguments, self._closing, self._fields, self._between)
        cut_off = self.num_calls > 0 and (self._opener in (",", ";") or not rest.strip())
        if not (calling or cut_off):
            self._add_text(rest)
        self._buffer = self._opener = ""
        self._state = self._ignore_rest
        parts, self._parts = self._parts, []
        return parts

    # Each state takes what it can from the buffer; True: the next state may go on with the rest.

    def _start(self) -> bool:
        """Nothing but blanks so far."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        self._enter(self._block if begun[0] in "{[" else self._text)
        return True

    def _text(self) -> bool:
        """Text for the client, up to a marker that opens calls; blanks beside calls are dropped."""
        if self._trims:
            self._buffer = self._buffer.lstrip()
            self._trims = not self._buffer
        found = [(self._buffer.find(marker), marker) for marker in self._format.begins]
        at, marker = min([(at, marker) for at, marker in found if at >= 0], default=(-1, ""))
        if at < 0:
            held = self._undecided()
            self._add_text(self._buffer[: len(self._buffer) - held])
            self._buffer = self._buffer[len(self._buffer) - held :]
            return False
        shown = self._buffer[:at].rstrip()
        self._add_text(shown)
        self._opener = self._buffer[len(shown) : at] + marker
        self._buffer = self._buffer[at + len(marker) :]
        self._enter(self._block)
        return True

    def _block(self) -> bool:
        """A call must begin here."""
        begun = self._buffer.lstrip()
        if not begun:
            return False
        if begun[0] == "[" and not self._listed:
            self._listed = True
            self._opener += self._buffer[: len(self._buffer) - len(begun) + 1]
            self._buffer = begun[1:]
        elif begun[0] == "{":
            self._enter(self._item)
        elif self._format.named and not self._listed:
            self._enter(self._name)
        else:
            self._reject_call()
        return True

    def _item(self) -> bool:
        """An object: its arguments are passed on as they come if its head is the usual one."""
        if head := self._head.match(self._buffer):
            self._begin(head[1], head.end(), closing=True)
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
        """A name, then its arguments."""
        if head := self._named_head.match(self._buffer):
            self._begin(head[1], head.end(), closing=False)
            return True
        if "{" not in self._buffer:
            return False
        self._reject_call()
        return True

    def _arguments(self) -> bool:
        end = self._span.feed(self._buffer)
        cut = len(self._buffer) if end < 0 else end
        self._parts.append(ArgumentsDelta(self.num_calls - 1, self._buffer[:cut]))
        self._buffer = self._buffer[cut:]
        if end >= 0:
            self._enter(self._closing if self._closes else self._between)
        return end >= 0

    def _closing(self) -> bool:
        """After its arguments an object ends, has more fields, or was forgotten to be closed."""
        begun = self._buffer.lstrip()
        if begun:
            self._enter(self._fields if begun[0] in ",}" else self._between)
        return bool(begun)

    def _fields(self) -> bool:
        """Skip what else an object has after its arguments."""
        end = self._span.feed(self._buffer)
        self._buffer = "" if end < 0 else self._buffer[end:]
        if end >= 0:
            self._enter(self._between)
        return end >= 0

    def _between(self) -> bool:
        """A call is over: another one, the end of calls, or text."""
        if not self._parallel:
            self._enter(self._ignore_rest)
            return True
        begun = self._buffer = self._buffer.lstrip()
        if not begun:
            return False
        end = self._format.end
        if self._listed and begun[0] == "]":
            self._listed = False
            self._buffer = begun[1:]
        elif begun[0] in "}]":
            self._buffer = begun[1:]  # A bracket too many.
        elif begun[0] in ",;":
            self._opener, self._buffer = begun[0], begun[1:]
            self._enter(self._block)
        elif not self._listed and begun[0] == "{":
            self._enter(self._block)
        elif end and end.startswith(begun) and begun != end:
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
        # What closes is the object around the arguments.
        self._span = _Span(1 if state == self._fields else 0)
        if state == self._text:
            self._listed = False

    def _begin(self, name: str, cut: int, closing: bool) -> None:
        self._closes = closing
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
        """It was no call: send all of it as text."""
        self._add_text(self._opener)
        self._opener = ""
        self._enter(self._text)

    def _undecided(self) -> int:
        """Length of the end of the buffer that may belong to the opening of calls."""
        if not self._format.begins:
            return 0
        longest = 0
        for marker in self._format.begins:
            ends = (n for n in range(len(marker) - 1, 0, -1) if self._buffer.endswith(marker[:n]))
            longest = max(longest, next(ends, 0))
        shown = self._buffer[: len(self._buffer) - longest]
        return longest + len(shown) - len(shown.rstrip())

    def _add_text(self, text: str) -> None:
        if text:
            self._parts.append(TextDelta(text))


def _call(text: str, names: frozenset[str]) -> tuple[str, str] | None:
    """Name and arguments of an object whose fields come in any order, None if it is no call."""
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
    written = json.dumps(arguments, ensure_ascii=False)
    # Half of a surrogate pair can only be written by JSON's escapes.
    return found["name"], written if is_encodable(written) else json.dumps(arguments)
