"""Readers of a call's arguments as they come: each style as JSON text.

Text that was read is not read again, so a reader takes time linear in it.
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any, Protocol

from deployments.ingress.text.stops import begun_length
from deployments.ingress.tools.formats import ArgumentStyle, CallFormat
from deployments.ingress.tools.values import json_text, value_of

# Outside of strings JSON has no "<": there the model went on without closing its brackets.
_MARKS = re.compile(r'["\\{}\[\]<]')
_PYTHON_MARKS = re.compile(r"""["'\\(){}\[\]]""")
_DEPTH = {"{": 1, "[": 1, "(": 1, "}": -1, "]": -1, ")": -1}
# The longest opening of an argument; longer ones are none.
_MAX_OPENING = 1024
_LITERALS = {"true": True, "false": False, "null": None}
# Schemas of values whose opening says whether they are strings.
_BY_STRING = {
    "true": {"type": "string"},
    "false": {"type": ["number", "boolean", "null", "object", "array"]},
}


class ArgumentsReader(Protocol):
    """Reads the arguments of one call."""

    def feed(self, text: str) -> tuple[str, str, bool]:
        """Read more; returns JSON text, what was not read yet, and whether the arguments ended."""


class Span:
    """Finds where a JSON object or list ends, or a Python call."""

    def __init__(self, depth: int = 0, python: bool = False) -> None:
        """depth: number of brackets that are open already."""
        self._depth = depth
        self._marks = _PYTHON_MARKS if python else _MARKS
        self._quotes = "\"'" if python else '"'
        self._quote = ""
        self._escaped = -1
        self._seen = 0

    def feed(self, text: str) -> int:
        """The index at which the value ends in this text; -1 if it does not."""
        for mark in self._marks.finditer(text):
            at = self._seen + mark.start()
            if self._closes(mark[0], at):
                return mark.start() if mark[0] == "<" else mark.end()
        self._seen += len(text)
        return -1

    def _closes(self, mark: str, at: int) -> bool:
        if self._quote:
            if at == self._escaped:
                return False
            if mark == "\\":
                self._escaped = at + 1
            if mark == self._quote:
                self._quote = ""
            return False
        if mark in self._quotes:
            self._quote = mark
        self._depth += _DEPTH.get(mark, 0)
        return mark == "<" or (mark in "}])" and self._depth <= 0)


class JsonArguments:
    """An object, which is passed on as it is written."""

    def __init__(self) -> None:
        self._span = Span()

    def feed(self, text: str) -> tuple[str, str, bool]:
        """Pass the text on up to the object's end."""
        end = self._span.feed(text)
        return (text, "", False) if end < 0 else (text[:end], text[end:], True)


class TaggedArguments:
    """Each argument between tags; its value is read by the function's schema."""

    def __init__(self, format: CallFormat, properties: Mapping[str, Any]) -> None:
        self._tags = tags = format.tags
        # Without the end of its arguments, a call ends before the end of its block or a next call.
        self._ends = {tags.end, format.end, *format.begins} - {""}
        self._opening = re.compile(tags.opening)
        self._properties = properties
        self._name: str | None = None
        self._schema: Any = None
        self._value: list[str] = []
        self._before = "{"  # What precedes the next argument.

    def feed(self, text: str) -> tuple[str, str, bool]:
        """Read tags; returns the arguments that are complete."""
        shown = ""
        while True:
            if self._name is None:
                text, more, ended = self._between(text)
                if not more:
                    return shown + self._end() * ended, text, ended
            tag, at = self._tags.close, text.find(self._tags.close)
            if at < 0:
                cut = len(text) - begun_length(text, tag)
                self._value.append(text[:cut])
                return shown, text[cut:], False
            self._value.append(text[:at])
            shown += self._argument()
            text = text[at + len(tag) :]

    def _between(self, text: str) -> tuple[str, bool, bool]:
        """Before an argument: the rest, whether an argument begins, whether the call ends."""
        begin, end = self._tags.begin, self._tags.end
        ends = [at for mark in self._ends if (at := text.find(mark)) >= 0]
        # An opening ends with ">"; without one, each new piece would be searched for nothing.
        found = self._opening.search(text) if ">" in text else None
        at = min(ends, default=-1)
        if found is not None and (at < 0 or found.start() < at):
            self._name = found[1]
            named = _BY_STRING.get(found.groupdict().get("string") or "")
            self._schema = named or self._properties.get(found[1])
            return text[found.end() :], True, False
        if at >= 0:
            return text[at:].removeprefix(end), False, True
        last = text.rfind(begin)
        if last >= 0 and len(text) - last < _MAX_OPENING:
            return text[last:], False, False
        undecided = max(begun_length(text, mark) for mark in (begin, *self._ends))
        return text[len(text) - undecided :], False, False

    def _argument(self) -> str:
        """The complete argument as JSON."""
        name, raw = self._name or "", "".join(self._value)
        if self._tags.trims:
            raw = raw.removeprefix("\n").removesuffix("\n")
        self._name, self._value = None, []
        before, self._before = self._before, ", "
        return f"{before}{json_text(name)}: {json_text(value_of(raw, self._schema))}"

    def _end(self) -> str:
        return "{}" if self._before == "{" else "}"


class EscapedArguments:
    """An object with bare names, and strings between marks."""

    def __init__(self, quote: str) -> None:
        self._quote = quote
        self._word_end = re.compile(rf"[{{}}\[\],:\s]|{re.escape(quote)}")
        self._string: list[str] | None = None
        self._scanned = 0  # Of a word whose end has not come yet.
        self._depth = 0

    def feed(self, text: str) -> tuple[str, str, bool]:
        """Read tokens; returns those that are complete."""
        shown: list[str] = []
        ended = False
        while text and not ended:
            if self._string is not None:
                at = text.find(self._quote)
                cut = at if at >= 0 else len(text) - begun_length(text, self._quote)
                self._string.append(text[:cut])
                if at < 0:
                    return "".join(shown), text[cut:], False
                shown.append(json_text("".join(self._string)))
                text, self._string = text[at + len(self._quote) :], None
                continue
            length = self._token_length(text)
            if length == 0:
                break
            token, text = text[:length], text[length:]
            shown.append(self._written(token, text))
            ended = self._depth == 0
        return "".join(shown), text, ended

    def _token_length(self, text: str) -> int:
        """The length of the first token: a mark, a bracket, a blank or a word; 0: not known yet."""
        if text.startswith(self._quote):
            return len(self._quote)
        if text[0] in "{}[],:" or text[0].isspace():
            return 1
        found = self._word_end.search(text, max(0, self._scanned - len(self._quote)))
        self._scanned = 0 if found is not None else len(text)
        return found.start() if found is not None else 0

    def _written(self, token: str, after: str) -> str:
        if token == self._quote:
            self._string = []
            return ""
        self._depth += _DEPTH.get(token, 0)
        if token in "{}[]:," or token.isspace():
            return token
        if after.startswith(":"):
            return json_text(token.strip('"'))
        try:
            return json_text(json.loads(token))
        except (ValueError, RecursionError):
            return json_text(token)


def arguments_reader(format: CallFormat, properties: Mapping[str, Any]) -> ArgumentsReader:
    """The reader of a named call's arguments; properties: their schemas by name."""
    if format.style is ArgumentStyle.TAGGED:
        return TaggedArguments(format, properties)
    return (
        EscapedArguments(format.quote) if format.style is ArgumentStyle.ESCAPED else JsonArguments()
    )


def keywords(text: str) -> str | None:
    """The keywords of a Python call, `a=1, b=[None])`, as JSON text; None if they are none."""
    try:
        call = ast.parse(f"f({text}", mode="eval").body
        if not isinstance(call, ast.Call) or call.args:
            return None
        values = {one.arg: _literal(one.value) for one in call.keywords}
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    return None if None in values else json_text(values)


def _literal(node: ast.expr) -> Any:
    """The value of a literal, with JSON's names of the constants too."""
    if isinstance(node, ast.Name) and node.id in _LITERALS:
        return _LITERALS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_literal(each) for each in node.elts]
    if isinstance(node, ast.Dict):
        return {
            str(ast.literal_eval(key)): _literal(value)
            for key, value in zip(node.keys, node.values, strict=True)
            if key is not None
        }
    found = ast.literal_eval(node)
    if found is None or isinstance(found, str | bool | int | float):
        return found
    raise ValueError(f"{type(found).__name__} is no value of JSON")
