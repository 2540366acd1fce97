"""A body has millions of wrong items, and the reply is about the first."""

from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from fastapi import FastAPI
from pydantic import TypeAdapter, ValidationError

from deployments.ingress.anthropic.schema import MessagesBody
from deployments.ingress.http.body_lists import Closed
from deployments.ingress.openai.responses_schema import ResponsesBody
from deployments.ingress.requests.schema import ChatBody
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.test_openapi import _routes

_MANY = 2000
_UNREAD = {"serialization", "metadata", "function", "json_schema_input_schema"}
CHAT = {"model": "a", "messages": [{"role": "user", "content": "a"}]}


def _parts(schema: object, checked: bool = False) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """Each schema inside of a core schema, and whether a function looks at its value first."""
    if isinstance(schema, list | tuple):
        for part in schema:
            yield from _parts(part, checked)
    elif isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema, checked
        inner = schema.get("type") == "function-before"
        for name, part in schema.items():
            if name not in _UNREAD:
                yield from _parts(part, inner)


def _bodies(app: FastAPI) -> Iterator[tuple[str, Any]]:
    for route in _routes(app.routes):
        if route.body_field is not None:
            yield route.path, route.body_field.field_info.annotation


def test_no_list_and_no_object_of_a_body_collects_faults(server: Server) -> None:
    bodies = dict(_bodies(server.fresh_app()))
    assert {"/v1/chat/completions", "/v1/messages", "/v1/batches", "/generate"} <= set(bodies)
    lists = 0
    for path, body in bodies.items():
        for schema, checked in _parts(TypeAdapter(body).core_schema):
            if schema["type"] == "list" and schema.get("items_schema", {}).get("type") != "any":
                lists += 1
                assert schema.get("fail_fast"), (path, schema)
            if schema["type"] == "dict":
                keys, values = (schema[f"{part}s_schema"]["type"] for part in ("key", "value"))
                assert checked or (keys, values) == ("str", "any"), (path, schema)
            if schema["type"] == "model" and schema["cls"].model_config.get("extra") == "forbid":
                assert issubclass(schema["cls"], Closed), (path, schema["cls"])
    assert lists > 20


@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatBody, {**CHAT, "messages": ["a"] * _MANY}),
        (ChatBody, {**CHAT, "stop": [None] * _MANY}),
        (ChatBody, {**CHAT, "documents": ["a"] * _MANY}),
        (ChatBody, {**CHAT, "messages": [{"role": "user", "content": ["a"] * _MANY}]}),
        (ChatBody, {**CHAT, "logit_bias": {f"t{i}": 1 for i in range(_MANY)}}),
        (ResponsesBody, {"model": "a", "input": [5] * _MANY}),
        (ResponsesBody, {"model": "a", "input": "a", "metadata": dict.fromkeys(range(_MANY))}),
        (MessagesBody, {**CHAT, "max_tokens": 1, "system": [5] * _MANY}),
        (MessagesBody, {**CHAT, "max_tokens": 1, "thinking": {str(i): 1 for i in range(_MANY)}}),
    ],
)  # fmt: skip
def test_there_are_few_faults(model: Any, body: Mapping[str, Any]) -> None:
    with pytest.raises(ValidationError) as caught:
        model.model_validate(body)
    assert caught.value.error_count() <= 3
