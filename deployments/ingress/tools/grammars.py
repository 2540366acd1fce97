"""Grammars for answers with tool calls: known functions, and arguments that fit their schemas."""

import json
from collections.abc import Mapping
from typing import Any

from deployments.ingress.http.errors import invalid
from deployments.ingress.structured.constraints import UNCONSTRAINED, Constraint
from deployments.ingress.structured.fields import lark_string
from deployments.ingress.structured.schemas import ANY_OBJECT, schema_text
from deployments.ingress.tools.formats import CallFormat
from deployments.ingress.tools.schema import Function, Toolbox

# Else a model could write calls forever.
_MAX_CALLS = 16
# Messages before required calls in channels: reasoning, and what the model says of it.
_MAX_MESSAGES = 8
# A schema with one of these decides itself about further fields.
_OPEN = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
_TEXT = r"TEXT: /(.|\n)*/"
# Text that is not a call, in a format whose calls have no opening marker.
_PLAIN = r"PLAIN: /\s*([^\s{\[<](.|\n)*)?/"


def calls_constraint(
    toolbox: Toolbox, format: CallFormat, ids: Mapping[str, int], answer: str = ""
) -> Constraint:
    """The constraint under which an answer's calls fit their functions' schemas.

    ids: of the format's markers that are single tokens.
    answer: the schema of an answer without calls, "" for any text.
    UNCONSTRAINED if no call is required, no function is strict, and there is no such schema.
    """
    strict = any(function.strict for function in toolbox.callable)
    if not (toolbox.forced or answer or strict):
        return UNCONSTRAINED
    rules = _Rules(toolbox, format, ids)
    if toolbox.forced:
        grammar = rules.channels() if format.channels else rules.forced()
    else:
        grammar = rules.free(answer)
    return Constraint(toolbox.param, grammar=grammar, trusted=True)


class _Rules:
    """Builds one grammar in llguidance's dialect of Lark."""

    def __init__(self, toolbox: Toolbox, format: CallFormat, ids: Mapping[str, int]) -> None:
        self._toolbox = toolbox
        self._format = format
        self._ids = ids

    def forced(self) -> str:
        """A grammar of one list of calls."""
        return _grammar("start: list", self._list(), *self._objects(", "))

    def channels(self) -> str:
        """A grammar of messages in channels, the last of them calls."""
        channel, message = self._marker("<|channel|>"), self._marker("<|message|>")
        more = f" (next call){{0,{_MAX_CALLS - 1}}}" if self._toolbox.parallel else ""
        calls = [
            f"call{index}: ({channel} {lark_string('commentary' + to)}"
            f" | {lark_string(to)} {channel} {lark_string('commentary')}) json args{index}"
            for index, function in enumerate(self._toolbox.callable)
            for to in [f" to=functions.{function.name}"]
        ]
        return _grammar(
            f"start: lead{{0,{_MAX_MESSAGES}}} call{more}",
            f"lead: {channel} KIND {message} TEXT next",
            # No message in `final`: behind it a model ends, and would not call.
            'KIND: "analysis" | "commentary"',
            f'next: {self._marker("<|end|>")} {self._marker("<|start|>")} "assistant"',
            f'json: (/ ?/ {self._marker("<|constrain|>")}? /( ?json)?/) {message}',
            self._kinds(), *calls, _TEXT, *self._arguments_rules(),
        )  # fmt: skip

    def free(self, answer: str) -> str:
        """A grammar of calls in the model's own format, or an answer."""
        other = f"answer: %json {answer}" if answer else ""
        if self._format.at_start:
            start = f"start: {'answer' if answer else 'PLAIN'} | {self._opening()} calls"
            return _grammar(start, other or _PLAIN, *self._schemas())
        limit = _MAX_CALLS if self._toolbox.parallel else 1
        if answer:
            start, lead = f"start: answer | tagged{{1,{limit}}}", f"lead: /\\s?/ {self._opening()}"
        else:
            start, lead = f"start: tagged{{0,{limit}}} TEXT", self._lead()
        return _grammar(start, other or _TEXT, lead, *self._tagged())

    def _lead(self) -> str:
        """Text up to the first marker of calls."""
        [marker] = self._format.begins
        return f"lead{'' if marker in self._ids else '[lazy]'}: TEXT {self._marker(marker)}"

    def _opening(self) -> str:
        return f"{self._marker(self._format.begins[0])}{'?' if self._format.at_start else ''}"

    def _tagged(self) -> list[str]:
        """The rules of an opening marker with its calls."""
        if not self._format.named:
            end = self._marker(self._format.end)
            return [f"tagged: lead /\\s?/ call /\\s?/ {end}", *self._objects(", ")]
        arguments = self._marker("[ARGS]") + "?"
        named = " | ".join(
            f"{lark_string(function.name)} {arguments} args{index}"
            for index, function in enumerate(self._toolbox.callable)
        )
        return ["tagged: lead /\\s?/ (list | named)", f"named: {named}", self._list(),
                *self._objects(", ")]  # fmt: skip

    def _schemas(self) -> list[str]:
        """Calls as objects by schemas, as free in their spelling as an answer."""
        rules = [self._calls("; ")]
        for index, function in enumerate(self._toolbox.callable):
            properties = {
                "name": {"const": function.name},
                self._format.key: self._arguments(function),
            }
            call = {
                "type": "object", "properties": _moved(properties, self._format.key),
                "required": [*properties], "additionalProperties": False,
            }  # fmt: skip
            rules.append(f"call{index}: %json {schema_text(call)}")
        return rules

    def _list(self) -> str:
        return 'list: "[" calls "]"'

    def _objects(self, separator: str) -> list[str]:
        """Calls as objects in one exact spelling, and the arguments of each function."""
        rules = [self._calls(separator)]
        for index, function in enumerate(self._toolbox.callable):
            head = f'{{"name": {json.dumps(function.name)}, "{self._format.key}": '
            rules.append(f'call{index}: {lark_string(head)} args{index} "}}"')
        return rules + self._arguments_rules()

    def _arguments_rules(self) -> list[str]:
        return [
            f"args{index}: %json {schema_text(self._arguments(function))}"
            for index, function in enumerate(self._toolbox.callable)
        ]

    def _calls(self, separator: str) -> str:
        more = _MAX_CALLS - 1 if self._toolbox.parallel else 0
        again = f" ({lark_string(separator)} call){{0,{more}}}" if more else ""
        return f"calls: call{again}\n{self._kinds()}"

    def _kinds(self) -> str:
        kinds = " | ".join(f"call{index}" for index in range(len(self._toolbox.callable)))
        return f"call: {kinds}"

    def _arguments(self, function: Function) -> Mapping[str, Any]:
        """The schema of a function's arguments."""
        is_strict = self._toolbox.forced or function.strict
        return _arguments_schema(function) if is_strict else ANY_OBJECT

    def _marker(self, marker: str) -> str:
        """A marker of the format; as a token, if it is one."""
        return f"<[{self._ids[marker]}]>" if marker in self._ids else lark_string(marker)


def _grammar(*lines: str) -> str:
    return "\n".join(lines)


def _moved(schema: Any, key: str) -> Any:
    """The schema with references to its root changed to its new location."""
    if isinstance(schema, list):
        return [_moved(part, key) for part in schema]
    if not isinstance(schema, dict):
        return schema
    moved = {name: _moved(part, key) for name, part in schema.items()}
    target = schema.get("$ref")
    if isinstance(target, str) and target.startswith("#"):
        moved["$ref"] = f"#/properties/{key}{target[1:]}"
    return moved


def _arguments_schema(function: Function) -> dict[str, Any]:
    """The schema of a function's arguments: an object with only the fields that it names."""
    schema = {"type": "object", **(function.parameters or {})}
    kinds, schema["type"] = schema["type"], "object"
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = f"the parameters of `{function.name}` must be a schema of type object"
        raise invalid(message, "tools")
    if not _OPEN & schema.keys():
        schema["additionalProperties"] = False
    return schema
