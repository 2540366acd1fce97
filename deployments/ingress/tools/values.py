"""Values of arguments that a model writes as plain text, by the schemas of their functions."""

import json
from collections.abc import Mapping
from typing import Any

from configs.reading import is_encodable

_TRUE, _FALSE = ("true", "1"), ("false", "0")


def json_text(value: Any) -> str:
    """A value as JSON that can be encoded."""
    written = json.dumps(value, ensure_ascii=False)
    # Half of a surrogate pair can only be written with JSON's escapes.
    return written if is_encodable(written) else json.dumps(value)


def value_of(raw: str, schema: Any) -> Any:
    """The text as the first of its schema's types that it fits, else as it is.

    They are taken in order, as transformers' parser of responses does it.
    """
    for kind in _types(schema):
        try:
            fits, value = _as_type(raw, kind)
        except (ValueError, RecursionError, OverflowError):
            continue
        if fits:
            return value
    return raw


def _types(schema: Any) -> list[str]:
    """The types that a schema names, of its alternatives too."""
    if not isinstance(schema, Mapping):
        return []
    declared = schema.get("type")
    types = declared if isinstance(declared, list) else [declared]
    found = [each for each in types if isinstance(each, str)]
    for union in ("anyOf", "oneOf"):
        choices = schema.get(union)
        for choice in choices if isinstance(choices, list) else ():
            found += _types({**choice, "anyOf": None}) if isinstance(choice, Mapping) else []
    return [*found, "null"] if schema.get("nullable") and "null" not in found else found


def _as_type(raw: str, kind: str) -> tuple[bool, Any]:
    """Whether the text is of this type, and its value; ValueError if it is not."""
    word = raw.strip().lower()
    if kind == "boolean":
        return word in (*_TRUE, *_FALSE), word in _TRUE
    if kind == "null":
        return raw.strip() in ("null", "None"), None
    if kind in ("integer", "number"):
        return _as_number(raw, kind)
    if kind in ("object", "array"):
        value = json.loads(raw)
        return isinstance(value, dict if kind == "object" else list), value
    return False, raw


def _as_number(raw: str, kind: str) -> tuple[bool, int | float]:
    if "." not in raw and "e" not in raw.lower() and len(raw) < 400:
        return True, int(raw)
    number = float(raw)
    whole = number.is_integer()
    if kind == "integer":
        return whole, int(number) if whole else 0
    return number - number == 0, int(number) if whole and "." not in raw else number
