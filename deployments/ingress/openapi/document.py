"""The OpenAPI document: requests as the routes declare them, the rest from tables."""

from collections.abc import Callable, Iterator, Mapping
from http import HTTPStatus
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deployments.ingress.openapi import control, native, openai
from deployments.ingress.openapi.openai_replies import OpenAIError
from deployments.ingress.openapi.operation import EVENTS, JSON, Operation

OPERATIONS: Mapping[tuple[str, str], Operation] = {
    **native.OPERATIONS,
    **openai.OPERATIONS,
    **control.OPERATIONS,
}

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = (
    "One base model and any number of LoRA adapters, by LoRAX's API and OpenAI's. A request names "
    "an adapter as `[source:]id[@revision]`. Where the server asks for API keys, send one as "
    "`Authorization: Bearer …`; a token for private adapters of the hub then goes into `api_token` "
    "or the header `x-hub-token`."
)


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """What `app.openapi` is to be: the document, made when it is first asked for."""
    made: dict[str, Any] = {}

    def document() -> dict[str, Any]:
        if not made:
            made.update(_document(app))
        return made

    return document


def _document(app: FastAPI) -> dict[str, Any]:
    written = get_openapi(
        title=app.title, version=app.version, description=_DESCRIPTION, routes=app.routes
    )
    schemas, components = _schemas()
    shared = written.setdefault("components", {})
    shared.setdefault("schemas", {}).update(components)
    shared["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, methods in written["paths"].items():
        for method, known in methods.items():
            row = OPERATIONS.get((method, path))
            if row is not None:
                _fill(known, row, schemas, path)
    for unused in ("HTTPValidationError", "ValidationError"):
        shared["schemas"].pop(unused, None)
    return written


def _fill(known: dict[str, Any], row: Operation, schemas: "_Schemas", path: str) -> None:
    """Complete what FastAPI wrote of one route."""
    body = known.get("requestBody")
    known["tags"] = [row.tag]
    known["summary"] = row.summary
    if row.description:
        known["description"] = row.description
    # A key is not always asked for.
    known["security"] = [{}, {"key": []}]
    if body is not None and row.request:
        examples = {
            f"example{index}": {"summary": summary, "value": value}
            for index, (summary, value) in enumerate(row.request.items())
        }
        body["content"][JSON]["examples"] = examples
    error = schemas[OpenAIError if path.startswith("/v1/") else native.LoraxError]
    failures = {
        str(status): {
            "description": HTTPStatus(status).phrase,
            "content": {JSON: {"schema": error}},
            **_headers(status),
        }
        for status in row.statuses(has_body=body is not None)
    }
    known["responses"] = {str(row.status): _success(row, schemas), **failures}


def _success(row: Operation, schemas: "_Schemas") -> dict[str, Any]:
    content: dict[str, Any] = {}
    if row.reply is not None:
        content[JSON] = {"schema": schemas[row.reply]}
        if row.answer is not None:
            content[JSON]["example"] = row.answer
    if row.event is not None:
        content[EVENTS] = {"itemSchema": _event(schemas[row.event])}
    for other in row.others:
        content[other] = {"schema": {"type": "string"}}
    reply: dict[str, Any] = {"description": HTTPStatus(row.status).phrase}
    return {**reply, "content": content} if content else reply


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """A server-sent event whose data is JSON of that schema."""
    text = {"type": "string", "contentMediaType": JSON, "contentSchema": data}
    return {
        "type": "object",
        "properties": {"event": {"type": "string"}, "data": text},
        "required": ["data"],
    }


def _headers(status: int) -> dict[str, Any]:
    if status != HTTPStatus.TOO_MANY_REQUESTS:
        return {}
    seconds = {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}
    return {"headers": {"Retry-After": seconds}}


class _Schemas:
    """Schemas by their type."""

    def __init__(self, types: list[Any], schemas: list[dict[str, Any]]) -> None:
        self._pairs = list(zip(types, schemas, strict=True))

    def __getitem__(self, wanted: Any) -> dict[str, Any]:
        return next(schema for known, schema in self._pairs if known == wanted)


def _schemas() -> tuple[_Schemas, dict[str, Any]]:
    """A schema for each type that a table names, and the components that they share."""
    types = list(_types())
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    return _Schemas(types, list(schemas)), components


def _types() -> Iterator[Any]:
    yield native.LoraxError
    yield OpenAIError
    for row in OPERATIONS.values():
        yield from (kind for kind in (row.reply, row.event) if kind is not None)
