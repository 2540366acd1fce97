"""A replica that drains: no new requests, and an end for those that run that clients understand."""

import asyncio
import json
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from tests.deployments.ingress.conftest import PATIENCE, Server

STREAM = {"model": "tiny", "max_tokens": 9, "stream": True}
COMPLETION = {**STREAM, "prompt": "a"}


def drained(server: Server, app: FastAPI, seconds: float) -> "Future[None]":
    return asyncio.run_coroutine_threadsafe(app.state.drain.run(seconds), server.loop)


class Reader:
    """Reads a stream in a thread, from its first chunk on."""

    def __init__(self, server: Server, path: str, body: dict[str, Any]) -> None:
        self._pool = ThreadPoolExecutor(1)
        self.began = threading.Event()
        self._read = self._pool.submit(self._run, f"{server.url}{path}", body)
        assert self.began.wait(PATIENCE)

    def events(self) -> list[str]:
        read = self._read.result(PATIENCE)
        self._pool.shutdown()
        return read

    def _run(self, url: str, body: dict[str, Any]) -> list[str]:
        events = []
        with httpx.stream("POST", url, json=body, timeout=PATIENCE) as reply:
            for line in reply.iter_lines():
                if line.startswith("data:"):
                    events.append(line.removeprefix("data:").strip())
                    self.began.set()
        return events


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", COMPLETION),
        ("/generate_stream", {"inputs": "a"}),
        ("/v1/chat/completions", {**STREAM, "messages": [{"role": "user", "content": "a"}]}),
    ],
)
def test_a_stream_that_is_ended_gets_its_error_event(
    server: Server, path: str, body: dict[str, Any]
) -> None:
    app = server.fresh_app()
    server.driver.hold_after = 2
    reader = Reader(server, path, body)
    drained(server, app, 0.0).result(PATIENCE)
    last = json.loads([event for event in reader.events() if event != "[DONE]"][-1])
    assert "shutting down" in json.dumps(last["error"])
    assert server.driver.cancelled.wait(PATIENCE)


def test_a_whole_reply_that_is_ended_is_a_503(server: Server) -> None:
    app = server.fresh_app()
    server.driver.hold_after = 0
    with ThreadPoolExecutor(1) as pool:
        body = {"model": "tiny", "prompt": "a"}
        future = pool.submit(
            httpx.post, f"{server.url}/v1/completions", json=body, timeout=PATIENCE
        )
        assert server.driver.arrived.wait(PATIENCE)
        drained(server, app, 0.0).result(PATIENCE)
        reply = future.result(PATIENCE)
    assert reply.status_code == 503
    assert reply.headers["retry-after"] == "1"


def test_a_stream_that_ends_in_time_is_not_interrupted(server: Server, http: httpx.Client) -> None:
    app = server.fresh_app()
    server.driver.hold_after = 2
    reader = Reader(server, "/v1/completions", COMPLETION)
    draining = drained(server, app, PATIENCE)
    while not app.state.drain.begun:
        pass
    for method, path in (("GET", "/health"), ("GET", "/v1/models"), ("POST", "/generate")):
        reply = http.request(method, path, json={"inputs": "a"})
        assert reply.status_code == 503, path
        assert reply.headers["connection"] == "close"
    assert not draining.done()
    server.driver.go_on()
    draining.result(PATIENCE)
    events = reader.events()
    assert events[-1] == "[DONE]"
    assert not any("error" in json.loads(event) for event in events[:-1])


def test_a_second_drain_shortens_the_first(server: Server) -> None:
    app = server.fresh_app()
    server.driver.hold_after = 2
    reader = Reader(server, "/v1/completions", COMPLETION)
    patient = drained(server, app, PATIENCE)
    drained(server, app, 0.0).result(PATIENCE)
    patient.result(PATIENCE)
    assert "shutting down" in "".join(reader.events())


def test_a_replica_without_requests_is_drained_at_once(server: Server) -> None:
    drained(server, server.fresh_app(), PATIENCE).result(PATIENCE)
