"""Errors for malformed bodies: the field as the client wrote it, and why."""

import json
import socket
from typing import Any
from urllib.parse import urlsplit

import httpx
import pytest

from configs.api import ApiConfig
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.fakes import FakeDriver

CHAT = "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]
HI = {"type": "function", "function": {"name": "hi"}}


@pytest.mark.parametrize(
    ("path", "body", "field", "words"),
    [
        (CHAT, {"stop": 5}, "stop", "Input should be a valid string or a valid list"),
        (CHAT, {"stop": ["a", 5]}, "stop.1", "Input should be a valid string"),
        (CHAT, {"stop": ["\ud800"]}, "stop.0", "must be valid Unicode"),
        (CHAT, {"messages": None}, "messages", "Input should be a valid list"),
        (CHAT, {"messages": [{"content": "a"}]}, "messages.0.role", "Field required"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": "a"}]}]},
         "messages.0.content.0.type", "Field required"),
        (CHAT, {"logit_bias": {"-1": 1}}, "logit_bias.-1",
         "Input should be greater than or equal to 0"),
        (CHAT, {"tools": [HI, {"type": "function", "function": {"name": "a b"}}]},
         "tools.1.function.name", "String should match"),
        (CHAT, {"tools": [HI], "tool_choice": {"function": 5}}, "tool_choice.function",
         "Input should be a JSON object"),
        ("/v1/responses", {"input": 5}, "input", "Input should be a valid string or a valid list"),
        ("/v1/responses", {"stop": [5]}, "stop.0", "Input should be a valid string"),
        ("/v1/responses", {"input": [{"role": "user", "content": 5}]}, "input.0.content",
         "Input should be a valid string or a valid list"),
    ],
)  # fmt: skip
def test_the_field_is_named_as_it_was_written(
    http: httpx.Client, path: str, body: dict[str, Any], field: str, words: str
) -> None:
    rest = {"input": "hello"} if path == "/v1/responses" else {"messages": HELLO}
    sent = json.dumps({"model": "tiny", **rest, **body})
    reply = http.post(path, content=sent, headers={"content-type": "application/json"})
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, field)
    assert error["message"].startswith(f"`{field}`: {words}")


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b'{"inputs": "a",}', "the body is not valid JSON: Illegal trailing comma"),
        (b'{"inputs": "\xff"}', "the body is not valid JSON"),
        (b'{"inputs": 1' + b"0" * 5000 + b"}", "the body is not valid JSON"),
        (b'\x1f\x8b\x08 "', "the body is not valid JSON"),
        (b'["a"]', "the body must be a JSON object"),
        (b"", "the body must be a JSON object"),
        ('{"inputs": "a"}'.encode("utf-16"), "the body must be JSON in UTF-8"),
        ('{"inputs": "a"}'.encode("utf-32-le"), "the body must be JSON in UTF-8"),
    ],
)
def test_bodies_that_are_not_json_objects(http: httpx.Client, body: bytes, words: str) -> None:
    reply = http.post("/generate", content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 422
    wanted = f"Input validation error: {words}"
    if "trailing" in words:  # Newer versions of Python have a longer message.
        wanted = wanted.partition(": Illegal")[0]
    assert reply.json()["error"].startswith(wanted)


def test_brackets_cannot_hide_in_another_encoding(http: httpx.Client) -> None:
    """In UTF-16 some letters contain the byte of a quotation mark."""
    deep = '{"inputs": "\u0122", "x": ' + "[" * 5000 + "]" * 5000 + "}"
    headers = {"content-type": "application/json"}
    reply = http.post("/generate", content=deep.encode("utf-16-le"), headers=headers)
    assert (reply.status_code, "UTF-8" in reply.json()["error"]) == (422, True)


@pytest.mark.parametrize("path", ["/generate", "/v1/completions"])
@pytest.mark.parametrize("kind", ["application/x-www-form-urlencoded", "text/plain", None])
def test_a_body_that_does_not_say_that_it_is_json(
    http: httpx.Client, driver: FakeDriver, path: str, kind: str | None
) -> None:
    body = b'{"inputs": "a", "model": "tiny", "prompt": "a"}'
    reply = http.post(path, content=body, headers={} if kind is None else {"content-type": kind})
    assert reply.status_code == 415
    assert "Expected request with `Content-Type: application/json`" in reply.text
    assert driver.requests == []


@pytest.mark.parametrize(("encoding", "status"), [("gzip", 415), ("Identity", 200)])
def test_compressed_bodies_are_refused(http: httpx.Client, encoding: str, status: int) -> None:
    headers = {"content-type": "application/json", "content-encoding": encoding}
    reply = http.post("/generate", content=b'{"inputs": "a"}', headers=headers)
    assert (reply.status_code, "without Content-Encoding" in reply.text) == (status, status == 415)


def test_a_body_that_does_not_come(server: Server) -> None:
    server.fresh_app(IngressSettings(api=ApiConfig(body_timeout_s=0.2)))
    address = urlsplit(server.url)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(head + b'content-length: 100\r\n\r\n{"inputs')
        received = b""
        while part := connection.recv(65536):
            received += part
    assert received.startswith(b"HTTP/1.1 408")
    assert b"the body did not come within 0.2 s" in received


@pytest.mark.parametrize("path", ["/", "/health", "/ping", "/info", "/metrics", "/v1/models"])
def test_head_is_served_where_get_is(http: httpx.Client, path: str) -> None:
    reply = http.head(path)
    assert (reply.status_code, reply.content) == (200, b"")
    assert reply.headers["content-type"] == http.get(path).headers["content-type"]


def test_head_is_refused_where_get_is(server: Server, http: httpx.Client) -> None:
    server.fresh_app(IngressSettings(loopback=True))
    for path in ("/generate", "/v1/completions", "/v1/adapters/unknown", "/nowhere"):
        assert http.head(path).status_code in (404, 405)
