"""Constraints that are expensive, and some that only seem to be."""

from collections.abc import Mapping
from typing import Any

Body = Mapping[str, Any]


def _schema(schema: Mapping[str, Any]) -> Body:
    return {"guided_json": schema}


def _multiples(divisors: list[int]) -> Body:
    items = [{"type": "integer", "multipleOf": divisor} for divisor in divisors]
    return _schema({"type": "array", "prefixItems": items})


def _properties(count: int) -> Body:
    return _schema({"type": "object", "properties": {f"p{i}": {} for i in range(count)}})


def _gbnf(count: int) -> str:
    rules = [f'a{i} ::= "x" a{i + 1} | "y"' for i in range(count)]
    return "\n".join(["root ::= a0", *rules, f'a{count} ::= "c"'])


COSTLY: Mapping[str, Body] = {
    "one large multipleOf": _multiples([999_983]),
    "four large multipleOf": _multiples([999_983, 999_979, 999_961, 999_959]),
    "2,000 optional properties": _properties(2000),
    "nested repeats": {"guided_regex": "((a{1,100}){1,100}){1,100}"},
    "counted and optional": _schema({"type": "string", "pattern": "^(a?){1000}a{1000}$"}),
    "many rules in GBNF": {"guided_grammar": _gbnf(2500)},
}
"""Refused for any vocabulary."""

STEEP: Mapping[str, Body] = {
    "runs of runs": _schema({"type": "string", "pattern": "^(.*a.{1,300}){1,20}$"}),
    "ambiguous": {"guided_grammar": 'start: e\ne: e e e e | "a" | ""'},
    "less ambiguous": {"guided_grammar": 'start: e\ne: e e | "a" | e "+" e'},
    "right-recursive": {"guided_grammar": 'start: e\ne: "a" e | "b" e | "c" e | /[a-z]/ e | ""'},
}
"""Expensive while tokens are generated; with a large vocabulary soon enough to be refused."""

FAIR: Mapping[str, Body] = {
    "small multipleOf": _multiples([7, 10, 100]),
    "90 optional properties": _properties(90),
    "300 optional properties": _properties(300),
    "a long list": _schema({"type": "array", "items": {"type": "integer"}, "minItems": 100_000}),
    "a long string": _schema({"type": "string", "minLength": 10, "maxLength": 100_000}),
    "a large enum": _schema({"enum": [f"value {i * 7919}" for i in range(3000)]}),
    "many choices": {"guided_choice": [f"choice number {i}" for i in range(1024)]},
    "words": {"guided_regex": r"(\w{1,20} ){1,10}"},
    "backtracking elsewhere": {"guided_regex": "(x+x+)+y"},
    "a tree": _schema({
        "$defs": {"n": {"type": "object", "properties": {
            "a": {"$ref": "#/$defs/n"}, "b": {"$ref": "#/$defs/n"}}}},
        "$ref": "#/$defs/n",
    }),
    "one of 300": _schema({"anyOf": [
        {"type": "object", "properties": {f"k{i}": {"type": "integer"}}, "required": [f"k{i}"]}
        for i in range(300)
    ]}),
    "patternProperties": _schema({
        "type": "object",
        "patternProperties": {f"^{chr(97 + i)}_": {"type": "integer"} for i in range(8)},
    }),
    "formats": _schema({"type": "object", "properties": {
        name: {"type": "string", "format": name} for name in ("date", "email", "uri", "uuid")}}),
    "a wide range": _schema({"type": "integer", "minimum": -(10**13), "maximum": 10**13}),
}  # fmt: skip
