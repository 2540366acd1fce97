"""Streams that are silent for long say so."""

from typing import Any

import httpx
import pytest

from deployments.contract import ErrorKind, Failed
from deployments.ingress.engine import IngressSettings
from tests.deployments.ingress.conftest import Server
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
        for part in reply.iter_text():
            text += part
            if text.endswith(":\n\n:\n\n"):
                break
    assert (text.count("data: ") > 0) == (tokens > 0)
    assert hasty.cancelled.wait(30)


def test_a_late_start_ends_as_it_would(http: httpx.Client, hasty: FakeDriver) -> None:
    path, body = STREAMS[1]
    hasty.delay = 0.2
    reply = http.post(path, json=body)
    assert reply.text.startswith(":\n\n")
    assert reply.text.count("data: ") > 100
    hasty.faults[None] = Failed(ErrorKind.GENERATION, "gone")
    reply = http.post(path, json=body)
    assert reply.status_code == 200
    assert "Request failed during generation: gone" in reply.text


def test_a_busy_stream_has_no_comments(http: httpx.Client) -> None:
    for path, body in STREAMS:
        assert "\n:" not in http.post(path, json=body).text
