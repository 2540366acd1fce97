"""The OpenAPI document: requests by the routes' bodies, replies by their writers' types.

operations.yaml adds descriptions and examples.
"""

from collections.abc import Callable, Mapping
from functools import cache
from http import HTTPStatus
from pathlib import Path
from typing import Any

import msgspec
import yaml
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from deployments.ingress.admin.adapters import AdapterReply, AdaptersReply
from deployments.ingress.admin.sleeping import SleepingReply
from deployments.ingress.anthropic.reply_types import MessageEvent, MessageReply, TokenCount
from deployments.ingress.batches.records import BatchRecord, FileRecord
from deployments.ingress.embeddings import EmbeddingsReply, EmbedReply
from deployments.ingress.http.errors import (
    OVERLOADED_STATUS,
    AnthropicError,
    LoraxError,
    OpenAIError,
)
from deployments.ingress.lorax.replies import GenerateReply, StreamEvent
from deployments.ingress.lorax.routes import InfoReply, TextSlice
from deployments.ingress.openai.pages import BatchesReply, DeletedFile, FilesReply
from deployments.ingress.openai.reply_types import (
    ChatChunk,
    ChatReply,
    CompletionReply,
    ModelReply,
    ModelsReply,
    ResponseEvent,
    ResponseReply,
)
from deployments.ingress.scores.replies import (
    ClassifyReply,
    Entity,
    PoolingReply,
    RerankReply,
    ScoreReply,
)

JSON = "application/json"
EVENTS = "text/event-stream"

REPLIES: Mapping[str, Any] = {
    "post /": list[GenerateReply],
    "post /invocations": list[GenerateReply],
    "post /generate": GenerateReply,
    "post /tokenize": list[TextSlice],
    "post /embed": EmbedReply,
    "post /classify": list[Entity] | ClassifyReply,
    "post /classify_batch": list[list[Entity]],
    "post /v1/classify": ClassifyReply,
    "post /pooling": PoolingReply,
    "post /score": ScoreReply,
    "post /v1/score": ScoreReply,
    "post /rerank": RerankReply,
    "post /v1/rerank": RerankReply,
    "post /v2/rerank": RerankReply,
    "get /info": InfoReply,
    "get /metrics": dict[str, Any],
    "post /v1/completions": CompletionReply,
    "post /v1/chat/completions": ChatReply,
    "post /v1/responses": ResponseReply,
    "post /v1/files": FileRecord,
    "get /v1/files": FilesReply,
    "get /v1/files/{id}": FileRecord,
    "delete /v1/files/{id}": DeletedFile,
    "post /v1/batches": BatchRecord,
    "get /v1/batches": BatchesReply,
    "get /v1/batches/{id}": BatchRecord,
    "post /v1/batches/{id}/cancel": BatchRecord,
    "post /v1/messages": MessageReply,
    "post /v1/messages/count_tokens": TokenCount,
    "post /v1/embeddings": EmbeddingsReply,
    "get /v1/models": ModelsReply,
    "get /v1/models/{id}": ModelReply,
    "get /is_sleeping": SleepingReply,
    "get /v1/adapters": AdaptersReply,
    "post /v1/adapters": AdapterReply,
    "post /v1/push_lora_adapter": AdapterReply,
    "get /v1/adapters/{name}": AdapterReply,
    "patch /v1/adapters/{name}": AdapterReply,
    "delete /v1/adapters/{name}": AdapterReply,
}
"""The types of JSON replies, by route."""

STREAMS: Mapping[str, Any] = {
    "post /": StreamEvent,
    "post /invocations": StreamEvent,
    "post /generate_stream": StreamEvent,
    "post /v1/completions": CompletionReply,
    "post /v1/chat/completions": ChatChunk,
    "post /v1/responses": ResponseEvent,
    "post /v1/messages": MessageEvent,
}
"""The types of one event's data, by the routes that can stream."""

# Statuses of errors before any route, and those of requests with a body.
_ANY = (401, 431)
_BODY = (*_ANY, 400, 408, 413, 415, 429)
_Schemas = Mapping[Any, dict[str, Any]]
"""Schemas by their type."""

_REFERENCE = "#/components/schemas/{name}"
_DESCRIPTION = (
    "One base model and any number of LoRA adapters, by the APIs of LoRAX, OpenAI and Anthropic. A "
    "request names an adapter as `[source:]id[@revision]`. Where the server asks for API keys, "
    "send one as `Authorization: Bearer …` or `x-api-key`; a token for private adapters of the hub "
    "then goes into `api_token` or the header `x-hub-token`."
)


class Operation(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The entry of one method of one path in operations.yaml.

    others: content types of the reply besides JSON and events.
    errors: statuses besides those that all such routes have.
    request: examples by their summaries. answer: the reply to the first one.
    """

    tag: str
    summary: str
    description: str = ""
    others: tuple[str, ...] = ()
    errors: tuple[int, ...] = ()
    request: dict[str, Any] = {}
    answer: Any = None

    def statuses(self, has_body: bool) -> list[int]:
        """Every status that an error of this route can have."""
        return sorted({*(_BODY if has_body else _ANY), *self.errors})


@cache
def operations() -> Mapping[str, Operation]:
    """operations.yaml by "method /path"; read at the first call."""
    text = Path(__file__).with_name("operations.yaml").read_text(encoding="utf-8")
    return msgspec.convert(yaml.safe_load(text), dict[str, Operation])


def documented(app: FastAPI) -> Callable[[], dict[str, Any]]:
    """A function for `app.openapi`, which makes the document at the first request."""
    return cache(lambda: _document(app))


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
            _fill(known, f"{method} {path}", schemas)
    for unused in ("HTTPValidationError", "ValidationError"):
        shared["schemas"].pop(unused, None)
    return written


def _fill(known: dict[str, Any], route: str, schemas: _Schemas) -> None:
    """Complete FastAPI's description of one route."""
    operation = operations()[route]
    body = known.get("requestBody")
    known["tags"] = [operation.tag]
    known["summary"] = operation.summary
    if operation.description:
        known["description"] = operation.description
    # A key is not always required.
    known["security"] = [{}, {"key": []}]
    if body is not None and operation.request:
        body["content"][JSON]["examples"] = {
            f"example{index}": {"summary": summary, "value": value}
            for index, (summary, value) in enumerate(operation.request.items())
        }
    error = schemas[_error_of(route)]
    failures = {
        str(status): {
            "description": _phrase(status),
            "content": {JSON: {"schema": error}},
            **_headers(status),
        }
        for status in operation.statuses(has_body=body is not None)
    }
    known["responses"] = {"200": _success(route, operation, schemas), **failures}


def _phrase(status: int) -> str:
    return "Overloaded" if status == OVERLOADED_STATUS else HTTPStatus(status).phrase


def _error_of(route: str) -> type[Any]:
    """The type of a route's errors."""
    if " /v1/messages" in route:
        return AnthropicError
    return OpenAIError if " /v1/" in route else LoraxError


def _success(route: str, operation: Operation, schemas: _Schemas) -> dict[str, Any]:
    content: dict[str, Any] = {}
    if route in REPLIES:
        content[JSON] = {"schema": schemas[REPLIES[route]]}
        if operation.answer is not None:
            content[JSON]["example"] = operation.answer
    if route in STREAMS:
        content[EVENTS] = {"itemSchema": _event(schemas[STREAMS[route]])}
    for other in operation.others:
        content[other] = {"schema": {"type": "string"}}
    reply: dict[str, Any] = {"description": HTTPStatus.OK.phrase}
    return {**reply, "content": content} if content else reply


def _event(data: dict[str, Any]) -> dict[str, Any]:
    """The schema of a server-sent event whose data is JSON of that schema."""
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


def _schemas() -> tuple[_Schemas, dict[str, Any]]:
    """A schema for each type of a reply, and the components that they share."""
    types = [LoraxError, OpenAIError, AnthropicError, *REPLIES.values(), *STREAMS.values()]
    schemas, components = msgspec.json.schema_components(types, ref_template=_REFERENCE)
    return dict(zip(types, schemas, strict=True)), components
