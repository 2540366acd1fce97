import json
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import given
from hypothesis.strategies import booleans, dictionaries, integers, lists, recursive, text

from configs.api import ApiConfig
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.http.bodies import nesting
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.fakes import FakeDriver

JSON = {"content-type": "application/json"}
LONG = b'{"model": "tiny", "prompt": "' + b"a" * (8 * 2**20) + b'"}'


def _pieces() -> Iterator[bytes]:
    """Sent in chunks, a body announces no length."""
    for start in range(0, len(LONG), 2**20):
        yield LONG[start : start + 2**20]


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
@pytest.mark.parametrize("announced", [True, False])
def test_a_body_that_is_too_long(
    http: httpx.Client, driver: FakeDriver, path: str, announced: bool
) -> None:
    headers = {"content-type": "application/json"}
    reply = http.post(path, content=LONG if announced else _pieces(), headers=headers)
    assert reply.status_code == 413
    assert "longer than 8388608 bytes" in str(reply.json()["error"])
    assert driver.requests == []


def test_a_body_that_is_announced_as_too_long_is_not_read(
    server: Server, http: httpx.Client
) -> None:
    address = urlsplit(server.url)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\nexpect: 100-continue\r\n"
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as client:
        client.sendall(head + b"content-length: %d\r\n\r\n" % (8 * 2**20 + 1))
        assert client.recv(12) == b"HTTP/1.1 413"


@pytest.mark.parametrize(("path", "status"), [("/v1/completions", 400), ("/generate", 422)])
def test_a_body_that_is_too_deep(
    http: httpx.Client, driver: FakeDriver, path: str, status: int
) -> None:
    headers = {"content-type": "application/json"}
    for deep in (b'{"a":' * 65, b"[" * 10**6, b'{"inputs": "a", "x": ' + b"[" * 64 + b"]" * 64):
        reply = http.post(path, content=deep, headers=headers)
        assert reply.status_code == status
        assert "more than 64 deep" in str(reply.json()["error"])
    assert driver.requests == []


def test_brackets_in_strings_are_no_levels(http: httpx.Client) -> None:
    inputs = '[{" \\' * 100
    reply = http.post("/tokenize", json={"inputs": inputs, "nested": [[[["["]]]] * 100})
    assert reply.status_code == 200, reply.text


@given(
    recursive(
        integers() | text(alphabet='[]{}:"\\aé', max_size=8),
        lambda inner: lists(inner, max_size=4) | dictionaries(text('"\\[{:', max_size=3), inner),
        max_leaves=40,
    ),
    booleans(),
)
def test_nesting_is_that_of_the_value(value: object, ascii: bool) -> None:
    def measure(part: object) -> tuple[int, int, int]:
        if not isinstance(part, list | dict):
            return 0, 0, 0
        fields = len(part) if isinstance(part, dict) else 0
        inner = part.values() if isinstance(part, dict) else part
        parts = [measure(each) for each in inner]
        return (
            max((depth for depth, _, _ in parts), default=0) + 1,
            sum(count for _, count, _ in parts) + 1,
            sum(count for _, _, count in parts) + fields,
        )

    body = json.dumps(value, ensure_ascii=ascii).encode()
    assert nesting(body) == measure(value)


def test_headers_that_are_too_many_or_too_long(http: httpx.Client, driver: FakeDriver) -> None:
    body = {"inputs": "a", "parameters": {"max_new_tokens": 1}}
    for headers in ({f"x-{n}": "1" for n in range(101)}, {"x-long": "a" * 33000}):
        reply = http.post("/generate", json=body, headers=headers)
        assert (reply.status_code, reply.json()["error_type"]) == (431, "invalid_request")
    assert http.post("/generate?a=" + "b" * 33000, json=body).status_code == 431
    assert driver.requests == []
    assert http.post("/generate", json=body, headers={"x-long": "a" * 20000}).status_code == 200


@pytest.mark.parametrize(
    ("path", "words"), [("/generate", "overloaded"), ("/v1/messages", "large")]
)
def test_open_bodies_are_bounded_together(server: Server, path: str, words: str) -> None:
    """An upload that has stopped holds its bytes; small requests pass it."""
    server.fresh_app(IngressSettings(api=ApiConfig(max_body_bytes=200_000, max_open_body_bytes=1)))
    address = urlsplit(server.url)
    head = b"POST /generate HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
    large = b'{"inputs": "hello", "x": "' + b"a" * 150_000 + b'"}'
    length = b"content-length: %d\r\n\r\n" % len(large)
    with httpx.Client(base_url=server.url, timeout=PATIENCE, headers=JSON) as http:
        with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as slow:
            slow.sendall(head + length + large[:-1])
            # Its bytes may not have arrived yet: the first one is looked at again and again.
            while (refused := http.post(path, content=large)).status_code not in (429, 529):
                assert refused.status_code in (200, 400)
            assert (words in refused.text, int(refused.headers["retry-after"]) > 0) == (True, True)
            assert http.post("/generate", content=b'{"inputs": "hello"}').status_code == 200
            slow.sendall(large[-1:])
            assert slow.recv(12) == b"HTTP/1.1 200"
        while (served := http.post("/generate", content=large)).status_code != 200:
            assert served.status_code == 429  # until the server has seen that the other ended


def test_a_body_of_too_many_fields(http: httpx.Client, driver: FakeDriver) -> None:
    fields = b",".join(b'"a%d":":"' % number for number in range(100_000))
    for path, status in (("/generate", 422), ("/v1/chat/completions", 400)):
        reply = http.post(path, content=b'{"inputs": "a", ' + fields + b"}", headers=JSON)
        assert reply.status_code == status
        assert "have 100001 fields; at most 100000 are read" in str(reply.json()["error"])
    assert driver.requests == []
    text = b'{"inputs": "a", "x": "' + b"a:" * 120_000 + b'"}'
    assert http.post("/tokenize", content=text, headers=JSON).status_code == 200
