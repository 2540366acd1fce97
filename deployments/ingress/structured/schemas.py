"""`response_format` in both vendors' spelling: what JSON an answer must be."""

import json
from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.ingress.http.errors import invalid
from deployments.ingress.structured.constraints import UNCONSTRAINED, Constraint

_FIELD = "response_format"
# How llguidance is to read a schema, whatever the schema itself says about that.
_OPTIONS = {
    # A space, or a new line and its indentation: a model that likes blanks would never end.
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,16})",
    # A keyword that would not be enforced is refused.
    "lenient": False,
}
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_KINDS = {
    "text": "text", "json_object": "json_object", "json_schema": "json_schema",
    "Text": "text", "JsonObject": "json_object", "JsonSchema": "json_schema",
}  # fmt: skip


class NamedSchema(BaseModel):
    """OpenAI's wrapping of a schema; name and description are for people."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    schema_: dict[str, Any] | None = Field(None, alias="schema")


class ResponseFormat(BaseModel):
    """Both vendors' spelling; a schema may stand here (LoRAX) or in json_schema (OpenAI)."""

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


def schema_text(schema: Mapping[str, Any]) -> str:
    """A schema as llguidance is to read it."""
    return json.dumps({**schema, "x-guidance": _OPTIONS}, separators=(",", ":"))
