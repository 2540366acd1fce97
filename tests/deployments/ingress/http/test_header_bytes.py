"""Bytes in headers: those that Serve reads are refused, all others break nothing."""

import asyncio
import json
from typing import Any

import httpx
import pytest
from ray.serve._private import constants, http_util
from starlette.types import Message, Receive, Scope, Send

from deployments.ingress.http.header_bytes import CALLBACK, READ, HeaderBytes
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO

BYTES = [b"\xff", b"\x80abc", "é".encode(), b"\xc3", b"\x7f"]


def answered(headers: list[tuple[bytes, bytes]], path: str = "/v1/models") -> list[Message]:
    """The messages sent; none if the request is passed on."""
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def receive() -> Message:
        return {"type": "http.request"}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert scope["headers"] == headers

    scope = {"type": "http", "path": path, "method": "GET", "headers": headers}
    asyncio.run(HeaderBytes(app)(scope, receive, send))
    return sent


def test_all_headers_that_serve_reads_are_checked() -> None:
    names = {
        constants.SERVE_MULTIPLEXED_MODEL_ID, constants.SERVE_HTTP_REQUEST_ID_HEADER,
        constants.SERVE_HTTP_REQUEST_TIMEOUT_S_HEADER, constants.SERVE_SESSION_ID,
        constants.SERVE_HTTP_REQUEST_DISCONNECT_DISABLED_HEADER, "traceparent", "tracestate",
    }  # fmt: skip
    assert {name.lower().replace("-", "_").encode() for name in names} == READ


def test_serve_loads_the_middleware_by_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    [(name, path)] = CALLBACK.items()
    assert hasattr(constants, name)
    monkeypatch.setattr(http_util, name, path)
    found = http_util.configure_http_middlewares(http_util.HTTPOptions()).middlewares
    assert [middleware.cls for middleware in found] == [HeaderBytes]


@pytest.mark.parametrize("name", [b"X-Request-Id", b"serve_multiplexed_model_id", b"traceparent"])
@pytest.mark.parametrize("value", BYTES)
def test_unreadable_headers_are_refused(name: bytes, value: bytes) -> None:
    for path, key in (("/v1/models", "message"), ("/info", "error_type")):
        start, body = answered([(b"host", b"x"), (name, value)], path)
        assert start["status"] == 400
        assert key.encode() in body["body"]
        assert name in body["body"]


def test_other_headers_pass() -> None:
    assert answered([(b"x-request-id", b"abc 1-2"), (b"user-agent", b"caf\xe9")]) == []
    assert answered([(b"na\xefve", b"x")])[0]["status"] == 400


NAMES = [
    "accept", "accept-encoding", "authorization", "content-type", "cookie", "origin", "referer",
    "user-agent", "x-forwarded-for", "x-forwarded-proto", "forwarded", "x-hub-token",
    "x-request-id", "serve_multiplexed_model_id", "traceparent", "if-none-match", "range",
    "x-api-key", "te", "access-control-request-method", "access-control-request-headers", "baggage",
]  # fmt: skip
ROUTES: list[tuple[str, str, dict[str, Any] | None]] = [
    ("GET", "/health", None), ("GET", "/info", None), ("GET", "/v1/models", None),
    ("GET", "/", None), ("GET", "/metrics", None), ("GET", "/docs", None),
    ("OPTIONS", CHAT, None), ("GET", "/nowhere", None),
    ("POST", CHAT, {"model": "org/pirate", "messages": HELLO, "max_tokens": 1}),
    ("POST", COMPLETIONS, {"model": "org/pirate", "prompt": "a", "max_tokens": 1}),
    ("POST", "/v1/responses", {"model": "tiny", "input": "a", "max_output_tokens": 1}),
    ("POST", "/v1/embeddings", {"model": "tiny", "input": "a"}),
    ("POST", "/generate", {"inputs": "a", "parameters": {"max_new_tokens": 1}}),
    ("POST", "/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "a"}),
]  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_no_byte_of_a_header_is_the_servers_fault(http: httpx.Client, name: str) -> None:
    for method, path, body in ROUTES:
        for value in [
            *BYTES,
            b"\xff" * 4000,
            b"Bearer \xff",
            b"text/html\xff",
            b"application/\xe9",
        ]:
            headers = [(name.encode(), value)]
            if body is not None and name != "content-type":
                headers.append((b"content-type", b"application/json"))
            try:
                content = None if body is None else json.dumps(body)
                reply = http.request(method, path, content=content, headers=headers)
            except httpx.RemoteProtocolError:
                continue  # The HTTP server itself would not read it.
            assert reply.status_code < 500, (method, path, value, reply.text)
