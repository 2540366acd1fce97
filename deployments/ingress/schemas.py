"""JSON schemas for answers: both vendors' `response_format`, tried before the driver is asked."""

import asyncio
import json
from importlib.util import find_spec
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from deployments.contract import EngineInfo
from deployments.ingress.errors import RequestError, invalid

MAX_CHARACTERS = 64 * 1024

_FIELD = "response_format"
# How llguidance is to read a schema, whatever the schema itself says about that.
_OPTIONS = {
    # A space, or a new line and its indentation: a model that likes blanks would never end.
    "whitespace_flexible": True,
    "whitespace_pattern": r"( |\n {0,16})",
    # A keyword that would not be enforced is refused.
    "lenient": False,
}
_ANY_OBJECT: dict[str, Any] = {"type": "object"}
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
    def schema_asked(self) -> dict[str, Any] | None:
        """The schema that an answer must fit; None for any text."""
        kind = _KINDS[self.type]
        if kind == "text":
            return None
        named = self.json_schema.schema_ if self.json_schema is not None else None
        if kind == "json_schema" and named is None and self.schema_ is None:
            raise invalid("`response_format` of type json_schema needs a schema", _FIELD)
        return named or self.schema_ or _ANY_OBJECT


async def schema_text(asked: ResponseFormat | None, info: EngineInfo) -> str:
    """The schema as the driver takes it, "" for none; refuses what cannot be compiled."""
    schema = asked.schema_asked if asked is not None else None
    if schema is None:
        return ""
    if find_spec("llguidance") is None:
        raise _unsupported("this server has no compiler for schemas (pip install llguidance)")
    if not info.stop_token_ids:
        raise _unsupported("this model has no token that ends an answer")
    text = json.dumps({**schema, "x-guidance": _OPTIONS}, separators=(",", ":"))
    if len(text) > MAX_CHARACTERS:
        raise invalid(f"the schema is longer than {MAX_CHARACTERS} characters", _FIELD)
    if fault := await asyncio.to_thread(_fault, text):
        raise invalid(f"the schema is not supported: {fault}", _FIELD)
    return text


def check_endings(schema: str, ignores_end: bool, min_tokens: int) -> None:
    """Refuse what would keep an answer from ending where its schema is fulfilled."""
    if schema and (ignores_end or min_tokens):
        words = "ignored end tokens" if ignores_end else "`min_tokens`"
        raise invalid(f"`response_format` cannot be combined with {words}", _FIELD)


def _unsupported(words: str) -> RequestError:
    return invalid(f"`response_format` is not supported: {words}", _FIELD, "unsupported_parameter")


def _fault(text: str) -> str:
    """What is wrong with a schema, in a line."""
    from llguidance import LLMatcher

    try:
        found: str = LLMatcher.validate_grammar(LLMatcher.grammar_from_json_schema(text))
    except ValueError as fault:
        found = str(fault)
    return found.strip().split("\n")[0]
