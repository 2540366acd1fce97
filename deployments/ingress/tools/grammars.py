"""Grammars that hold an answer to calls of known functions, with arguments that fit."""

import json
from collections.abc import Mapping
from typing import Any

from deployments.ingress.http.errors import invalid
from deployments.ingress.structured.constraints import UNCONSTRAINED, Constraint
from deployments.ingress.structured.fields import lark_string
from deployments.ingress.structured.schemas import ANY_OBJECT, schema_text
from deployments.ingress.tools.parsers import CallFormat
from deployments.ingress.tools.schema import Function, Toolbox

# A model that likes to call would never end.
_MOST_CALLS = 16
# Schemas that leave their fields open on purpose.
_OPEN = frozenset({"additionalProperties", "patternProperties", "allOf", "anyOf", "oneOf", "$ref"})
_TEXT = r"TEXT: /(.|\n)*/"
# Text that is not read as a call where calls have no opening marker.
_PLAIN = r"PLAIN: /\s*([^\s{\[<](.|\n)*)?/"


def calls_constraint(
    toolbox: Toolbox, format: CallFormat, ids: Mapping[str, int], answer: str = ""
) -> Constraint:
    """What an answer must fit for its calls to fit their functions' schemas.

    ids: those of the format's markers that are tokens of their own. answer: the schema of an answer
    that is no call, "" for any text. Unconstrained where nothing has to be held.
    """
    strict = any(function.strict for function in toolbox.callable)
    if not (toolbox.forced or answer or strict):
        return UNCONSTRAINED
    rules = _Rules(toolbox, format, ids)
    grammar = rules.forced() if toolbox.forced else rules.free(answer)
    return Constraint(toolbox.param, grammar=grammar, trusted=True)


class _Rules:
    """Builds one grammar in Lark as llguidance reads it."""

    def __init__(self, toolbox: Toolbox, format: CallFormat, ids: Mapping[str, int]) -> None:
        self._toolbox = toolbox
        self._format = format
        self._ids = ids

    def forced(self) -> str:
        """One list of calls and nothing else."""
        return _grammar("start: list", self._list(), *self._objects(", "))

    def free(self, answer: str) -> str:
        """Calls in the model's own format, or an answer."""
        other = f"answer: %json {answer}" if answer else ""
        if self._format.at_start:
            start = f"start: {'answer' if answer else 'PLAIN'} | {self._opening()} calls"
            return _grammar(start, other or _PLAIN, *self._schemas())
        most = _MOST_CALLS if self._toolbox.parallel else 1
        if answer:
            start, lead = f"start: answer | tagged{{1,{most}}}", f"lead: /\\s?/ {self._opening()}"
        else:
            start, lead = f"start: tagged{{0,{most}}} TEXT", self._lead()
        return _grammar(start, other or _TEXT, lead, *self._tagged())

    def _lead(self) -> str:
        """Text up to the first marker that opens calls."""
        [marker] = self._format.begins
        return f"lead{'' if marker in self._ids else '[lazy]'}: TEXT {self._marker(marker)}"

    def _opening(self) -> str:
        return f"{self._marker(self._format.begins[0])}{'?' if self._format.at_start else ''}"

    def _tagged(self) -> list[str]:
        """One opening marker with its calls."""
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
        """Calls as objects by schemas: what begins like an answer is read like one."""
        rules = [self._calls("; ")]
        for index, function in enumerate(self._toolbox.callable):
            properties = {"name": {"const": function.name}, self._format.key: self._held(function)}
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
            rules.append(f"args{index}: %json {schema_text(self._held(function))}")
        return rules

    def _calls(self, separator: str) -> str:
        more = _MOST_CALLS - 1 if self._toolbox.parallel else 0
        again = f" ({lark_string(separator)} call){{0,{more}}}" if more else ""
        kinds = " | ".join(f"call{index}" for index in range(len(self._toolbox.callable)))
        return f"calls: call{again}\ncall: {kinds}"

    def _held(self, function: Function) -> Mapping[str, Any]:
        """What a function's arguments must fit."""
        held = self._toolbox.forced or function.strict
        return _arguments_schema(function) if held else ANY_OBJECT

    def _marker(self, marker: str) -> str:
        """A marker of the format, as its token where it is one."""
        return f"<[{self._ids[marker]}]>" if marker in self._ids else lark_string(marker)


def _grammar(*lines: str) -> str:
    return "\n".join(lines)


def _moved(schema: Any, key: str) -> Any:
    """The schema with its references to its own root led to where it lies now."""
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
    """The schema of a function's arguments: an object with no more than what it names."""
    schema = {"type": "object", **(function.parameters or {})}
    kinds, schema["type"] = schema["type"], "object"
    if kinds != "object" and not (isinstance(kinds, list) and "object" in kinds):
        message = f"the parameters of `{function.name}` must be a schema of type object"
        raise invalid(message, "tools")
    if not _OPEN & schema.keys():
        schema["additionalProperties"] = False
    return schema
