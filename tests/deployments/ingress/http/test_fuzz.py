"""Malformed requests over a raw socket: none is answered with a 5xx, none ends the server."""

import contextlib
import json
import re
import socket
from urllib.parse import urlsplit

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deployments.ingress.lorax.schema import GenerateParameters
from tests.deployments.ingress.conftest import PATIENCE, Server

PATHS = ("/generate", "/generate_stream")
SETTINGS = settings(
    max_examples=60, deadline=None, derandomize=True, database=None,
    suppress_health_check=list(HealthCheck),
)  # fmt: skip

_junk = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    | st.lists(st.integers(-3, 3) | st.text(max_size=3), max_size=3)
    | st.dictionaries(st.text(max_size=3), st.integers(), max_size=2)
)  # fmt: skip
_parameters = st.dictionaries(st.sampled_from(sorted(GenerateParameters.model_fields)), _junk)
_bodies = st.builds(
    lambda inputs, parameters, rest: json.dumps(
        {"inputs": inputs, "parameters": parameters, **rest}
    ).encode(),
    st.text(max_size=40) | _junk,
    _parameters | _junk,
    st.dictionaries(st.text(max_size=5), _junk, max_size=2),
)


@st.composite
def _broken(draw: st.DrawFn) -> bytes:
    """A body that is cut off, overwritten somewhere, or no JSON at all."""
    body = draw(_bodies)
    start = draw(st.integers(0, len(body)))
    stop = draw(st.integers(start, len(body)))
    return draw(
        st.sampled_from([body[:start], body[:start] + body[stop:]])
        | st.binary(max_size=40).map(lambda junk: body[:start] + junk + body[stop:])
        | st.binary(max_size=60)
        | st.sampled_from(
            [b"", b"[" * 5000, b'{"a":' * 5000, b"\xef\xbb\xbf{}", b"\xff\xfe{", b"NaN"]
        )
    )


_names = st.sampled_from(
    [b"content-type", b"authorization", b"x-hub-token", b"accept", b"expect", b"transfer-encoding",
     b"content-encoding", b"x-request-id", b"origin", b"host", b"cookie", b"x-forwarded-for"]
)  # fmt: skip
_values = st.binary(max_size=60) | st.sampled_from(
    [b"application/json", b"application/json; charset=utf-7", b"multipart/form-data", b"chunked",
     b"gzip", b"Bearer ", b"Bearer \xff\xfe", b"100-continue", b"text/html", b"a" * 9000]
)  # fmt: skip
_headers = st.lists(st.tuples(_names, _values), max_size=6)


def _answer(server: Server, request: bytes, leaves: bool = False) -> list[int]:
    """The statuses that come back before the server closes; `leaves` ends our side first."""
    address = urlsplit(server.url)
    with socket.create_connection((address.hostname, address.port), timeout=PATIENCE) as connection:
        connection.sendall(request)
        if leaves:
            with contextlib.suppress(OSError):  # the server may have hung up before
                connection.shutdown(socket.SHUT_WR)
        received = b""
        try:
            while part := connection.recv(65536):
                received += part
        except ConnectionResetError:
            pass
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3})", received)]


def _lives(server: Server) -> bool:
    body = {"inputs": "hello", "parameters": {"max_new_tokens": 3}}
    reply = httpx.post(f"{server.url}/generate", json=body, timeout=PATIENCE)
    return reply.status_code == 200 and len(server.inboxes) == 0


@pytest.mark.parametrize("path", PATHS)
def test_bodies(server: Server, path: str) -> None:
    @SETTINGS
    @given(_bodies | _broken())
    def send(body: bytes) -> None:
        head = (
            f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n"
            f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        )
        [status] = _answer(server, head.encode() + body)
        assert status < 500

    send()
    assert _lives(server)


@pytest.mark.parametrize("path", PATHS)
def test_heads(server: Server, path: str) -> None:
    @SETTINGS
    @given(
        _headers, st.integers(-1, 200), st.binary(max_size=30),
        st.sampled_from(["POST", "GET", "PUT", "HEAD", "TRACE", "PRI", "\x00"]),
    )  # fmt: skip
    def send(headers: list[tuple[bytes, bytes]], length: int, query: bytes, method: str) -> None:
        body = b'{"inputs": "a", "parameters": {"max_new_tokens": 2}}'
        announced = length if length >= 0 else len(body)
        lines = [f"{method} {path}?".encode() + query + b" HTTP/1.1", b"connection: close"]
        lines += [name + b": " + value for name, value in headers]
        lines += [b"content-length: %d" % announced, b"", body]
        unfinished = announced > len(body) or any(
            name == b"transfer-encoding" for name, _ in headers
        )
        statuses = _answer(server, b"\r\n".join(lines), leaves=unfinished)
        assert all(status < 500 for status in statuses)

    send()
    assert _lives(server)
