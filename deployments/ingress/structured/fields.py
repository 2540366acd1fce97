"""vLLM's fields for constrained answers: `structured_outputs` and the older `guided_*`."""

import asyncio
import json
import re
from collections.abc import Sequence
from typing import Any, NoReturn

from pydantic import ConfigDict, Field

from deployments.ingress.http.body_lists import Items
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.structured.constraints import MAX_CHARACTERS, UNCONSTRAINED, Constraint
from deployments.ingress.structured.schemas import ANY_OBJECT, ResponseFormat, schema_text

_FIELD = "structured_outputs"
_MAX_CHOICES = 1024
# A grammar could set the temperature, which is the request's. The pattern is linear in the text: a
# slow search would block all other threads.
_TEMPERATURE = re.compile(r"\[[^\[\]\n]*\btemperature\s*=")
# Comments, strings and patterns, also unfinished ones; brackets in them have no meaning.
_LITERALS = re.compile(r'//[^\n]*+|"(?:\\.|[^"\\\n])*+"?|/(?:\\.|[^/\\\n])*+/?')
# What must be escaped in a Lark pattern. A backslash pair is matched whole, so it stays.
_TO_ESCAPE = re.compile(r"\\.|/|\n", re.DOTALL)


class StructuredOutputs(Typed):
    """vLLM's `structured_outputs`: exactly one of these fields."""

    model_config = ConfigDict(frozen=True, extra="allow")

    json_: dict[str, Any] | str | None = Field(None, alias="json")
    regex: Unicode | None = None
    choice: Items[Unicode] | None = Field(None, max_length=_MAX_CHOICES)
    grammar: Unicode | None = None
    json_object: bool | None = None

    @property
    def constraint(self) -> Constraint:
        """What an answer must fit; refuses a request with none or several."""
        for name, value in (self.model_extra or {}).items():
            if value not in (None, False):
                message = f"`{_FIELD}.{name}` is not supported"
                raise invalid(message, _FIELD, "unsupported_parameter")
        return _only(_FIELD, [
            _json(_FIELD, self.json_), _regex(_FIELD, self.regex), _choice(_FIELD, self.choice),
            _grammar(_FIELD, self.grammar), _json(_FIELD, ANY_OBJECT if self.json_object else None),
        ])  # fmt: skip


class Constrainable(Typed):
    """The fields of a request that constrain its answer."""

    model_config = ConfigDict(frozen=True)

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: dict[str, Any] | str | None = None
    guided_regex: Unicode | None = None
    guided_choice: Items[Unicode] | None = Field(None, max_length=_MAX_CHOICES)
    guided_grammar: Unicode | None = None

    async def constraint(self) -> Constraint:
        """What the answer must fit; refuses more than one."""
        fields = (self.response_format, self.structured_outputs, self.guided_json,
                  self.guided_regex, self.guided_choice, self.guided_grammar)  # fmt: skip
        if all(field is None for field in fields):
            return UNCONSTRAINED
        # Writing a large schema would block the event loop.
        return await asyncio.to_thread(self._constraint)

    def _constraint(self) -> Constraint:
        constraints = [
            self.response_format.constraint if self.response_format else UNCONSTRAINED,
            self.structured_outputs.constraint if self.structured_outputs else UNCONSTRAINED,
            _json("guided_json", self.guided_json),
            _regex("guided_regex", self.guided_regex),
            _choice("guided_choice", self.guided_choice or None),
            _grammar("guided_grammar", self.guided_grammar),
        ]
        given = [one for one in constraints if one]
        if len(given) > 1:
            first, second = given[0].param, given[1].param
            raise invalid(f"`{first}` cannot be combined with `{second}`", second)
        return given[0] if given else UNCONSTRAINED


def lark_string(text: str) -> str:
    """A text as a string literal of a Lark grammar."""
    return json.dumps(text, ensure_ascii=False)


def _only(param: str, constraints: Sequence[Constraint]) -> Constraint:
    given = [one for one in constraints if one]
    if len(given) != 1:
        names = "json, regex, choice, grammar, json_object"
        raise invalid(f"`{param}` needs exactly one of {names}; {len(given)} are given", param)
    return given[0]


def _json(param: str, schema: Any) -> Constraint:
    if schema is None:
        return UNCONSTRAINED
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as fault:
            raise invalid(f"the schema in `{param}` is not valid JSON", param) from fault
    if not isinstance(schema, dict):
        raise invalid(f"the schema in `{param}` must be a JSON object", param)
    return Constraint(param, json_schema=schema_text(schema))


def _regex(param: str, pattern: str | None) -> Constraint:
    if pattern is None:
        return UNCONSTRAINED
    if not pattern:
        _refuse_empty(param, "regex")
    return Constraint(param, grammar=f"start: /{_TO_ESCAPE.sub(_escaped, pattern)}/")


def _escaped(found: "re.Match[str]") -> str:
    return {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}.get(found[0], found[0])


def _choice(param: str, choices: Sequence[str] | None) -> Constraint:
    if choices is None:
        return UNCONSTRAINED
    if not choices or not all(choices):
        _refuse_empty(param, "choice")
    # As one terminal, the texts share one automaton; as rules, each would be followed alone.
    texts = " | ".join(map(lark_string, choices))
    return Constraint(param, grammar=f"start: CHOICE\nCHOICE: {texts}")


def _grammar(param: str, grammar: str | None) -> Constraint:
    """A grammar in Lark or GBNF; the check finds out which."""
    if grammar is None:
        return UNCONSTRAINED
    if not grammar.strip():
        _refuse_empty(param, "grammar")
    if len(grammar) > MAX_CHARACTERS:
        raise invalid(f"the grammar is longer than {MAX_CHARACTERS} characters", param)
    if _TEMPERATURE.search(_LITERALS.sub('""', grammar)):
        raise invalid("a grammar cannot set a temperature", param)
    if grammar.lstrip().startswith("{"):
        raise invalid("the grammar must be Lark or GBNF text", param)
    return Constraint(param, grammar=grammar, foreign=True)


def _refuse_empty(param: str, kind: str) -> NoReturn:
    raise invalid(f"the {kind} in `{param}` is empty", param)
