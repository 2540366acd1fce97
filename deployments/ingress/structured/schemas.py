"""`response_format`, as LoRAX and OpenAI write it: the JSON schema of an answer."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ConfigDict, Field

from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import invalid
from deployments.ingress.structured.constraints import UNCONSTRAINED, Constraint

_FIELD = "response_format"
# Options of llguidance for every schema; they replace those in the schema itself.
_OPTIONS = {
    # At most a space, or a new line with indentation: else a model could write blanks forever.
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,16})",
    # Refuse keywords that would not be enforced.
    "lenient": False,
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_KINDS = {
    "text": "text", "json_object": "json_object", "json_schema": "json_schema",
    "Text": "text", "JsonObject": "json_object", "JsonSchema": "json_schema",
}  # fmt: skip


class NamedSchema(Typed):
    """OpenAI's object around a schema; its name and description have no effect."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(Typed):
    """The field of both APIs; the schema is in `schema` (LoRAX) or `json_schema` (OpenAI)."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    type: Literal["text", "json_object", "json_schema", "Text", "JsonObject", "JsonSchema"]
    json_schema: NamedSchema | None = None
    schema_: dict[str, Any] | None = Field(None, alias="schema")

    @property
    def constraint(self) -> Constraint:
        """What an answer must fit."""
        kind = _KINDS[self.type]
        if kind == "text":
            return UNCONSTRAINED
        named = self.json_schema.schema_ if self.json_schema is not None else None
        if kind == "json_schema" and named is None and self.schema_ is None:
            raise invalid("`response_format` of type json_schema needs a schema", _FIELD)
        return Constraint(_FIELD, json_schema=schema_text(named or self.schema_ or ANY_OBJECT))


# Their values are no schemas.
_LITERALS = frozenset({"const", "enum", "default", "examples"})


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as text for llguidance, with this server's options."""
    text = json.dumps({**schema, "x-guidance": _OPTIONS}, separators=(",", ":"))
    if '"discriminator"' not in text:
        return text
    copy = json.loads(text)
    _require_discriminators(copy)
    return json.dumps(copy, separators=(",", ":"))


def _require_discriminators(schema: dict[str, Any]) -> None:
    """Require the property that OpenAPI's `discriminator` names for the schemas of a `oneOf`.

    Changes the schema. OpenAPI demands that the property is required; pydantic leaves that out
    where it has a default. An answer with it fits one of the schemas only, as `oneOf` says.
    """
    waiting: list[Any] = [schema]
    while waiting:
        part = waiting.pop()
        if isinstance(part, list):
            waiting += part
        elif isinstance(part, dict):
            given, required = part.get("discriminator"), part.get("required", [])
            name = given.get("propertyName") if isinstance(given, dict) else None
            if isinstance(name, str) and "oneOf" in part and isinstance(required, list):
                part["required"] = [*required, name]
            waiting += [inner for key, inner in part.items() if key not in _LITERALS]
