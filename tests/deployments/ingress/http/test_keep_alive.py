"""Streams that are silent for long say so."""

from itertools import islice
from typing import Any

import httpx
import pytest

from deployments.contract import ErrorKind, Failed
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.http.sse import KEEP_ALIVE
from tests.deployments.ingress.conftest import PATIENCE, Server
from tests.fakes import FakeDriver

STREAMS = [
    ("/v1/completions", {"model": "tiny", "prompt": "a", "max_tokens": 50, "stream": True}),
    ("/generate_stream", {"inputs": "a"}),
]


@pytest.fixture
def hasty(server: Server) -> FakeDriver:
    """The driver of a server that keeps no stream silent for long."""
    server.fresh_app(IngressSettings(keep_alive_seconds=0.05))
    return server.driver


@pytest.mark.parametrize(("path", "body"), STREAMS)
@pytest.mark.parametrize("tokens", [0, 3])
def test_comments_fill_the_silence(
    http: httpx.Client, hasty: FakeDriver, path: str, body: dict[str, Any], tokens: int
) -> None:
    """Before the first token, and after some."""
    hasty.hold_after = tokens
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        text = ""
        for part in islice(reply.iter_text(), 1000):
            text += part
            # Of a busy machine comments come before the tokens as well.
            if text.endswith(":\n\n:\n\n") and ("data: " in text) == (tokens > 0):
                break
        else:
            pytest.fail(f"this is all that came: {text}")
    assert hasty.cancelled.wait(PATIENCE)


def test_a_late_start_ends_as_it_would(http: httpx.Client, hasty: FakeDriver) -> None:
    hasty.hold_after = 0
    text = _released(http, hasty)
    assert text.count("data: ") > 100


def test_a_late_failure_is_an_event(http: httpx.Client, hasty: FakeDriver) -> None:
    hasty.hold_after = 0
    hasty.faults[None] = Failed(ErrorKind.GENERATION, "gone")
    assert "Request failed during generation: gone" in _released(http, hasty)


def _released(http: httpx.Client, driver: FakeDriver) -> str:
    """A stream with a driver that continues only when the client has received a comment."""
    path, body = STREAMS[1]
    with http.stream("POST", path, json=body) as reply:
        assert reply.status_code == 200
        parts = reply.iter_text()
        text = next(parts)
        assert not text.replace(KEEP_ALIVE.decode(), ""), "it was withheld"
        driver.go_on()
        return text + "".join(parts)


def test_a_busy_stream_has_no_comments(server: Server, http: httpx.Client) -> None:
    server.fresh_app(IngressSettings(keep_alive_seconds=PATIENCE))
    for path, body in STREAMS:
        assert "\n:" not in http.post(path, json=body).text
