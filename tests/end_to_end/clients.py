"""How the end-to-end tests talk to a served demo: streams by HTTP, the driver by its handle."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Collection
from contextlib import suppress
from typing import Any

import httpx
import pytest

from tests.end_to_end.serving import PATIENCE_SECONDS, POLL_SECONDS, Served

Answers = dict[str, dict[str, dict[str, str]]]

MODELS = ["base", "pirate", "french", "json", "shout"]


class StreamError(Exception):
    """The stream ended in an error event, or broke off."""


def adapter_of(model: str) -> str | None:
    return None if model == "base" else model


def longest_questions(answers: Answers, count: int) -> list[str]:
    """The showcase questions with the longest answers."""
    return sorted(answers["base"], key=lambda q: -len(answers["base"][q]["raw"]))[:count]


async def stream_text(
    client: httpx.AsyncClient,
    url: str,
    model: str,
    question: str,
    heard: Callable[[], None] | None = None,
) -> str:
    """Read one stream to its end; `heard` is called with every token."""
    body = {"inputs": question, "parameters": {"adapter_id": adapter_of(model)}}
    text, ended = "", False
    try:
        async with client.stream("POST", f"{url}/generate_stream", json=body) as reply:
            if reply.status_code != 200:
                raise StreamError(f"{reply.status_code} {(await reply.aread()).decode()}")
            async for event in events(reply):
                if "error" in event:
                    raise StreamError(json.dumps(event))
                text += "" if event["token"]["special"] else event["token"]["text"]
                ended = event["generated_text"] is not None
                if heard is not None:
                    heard()
    except httpx.HTTPError as error:
        raise StreamError(repr(error)) from error
    if not ended:
        raise StreamError("the stream broke off")
    return text


async def events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """The data of each SSE event."""
    async for line in reply.aiter_lines():
        if line.startswith("data:"):
            yield json.loads(line[5:])


async def until_open(
    client: httpx.AsyncClient, url: str, adapter: str, count: int = 1, at: Collection[str] = ()
) -> None:
    """Wait until so many requests over an adapter are open, and one at each of these replicas."""
    async with asyncio.timeout(PATIENCE_SECONDS):
        while True:
            num_open = await _num_open(client, url, adapter)
            if sum(num_open.values()) >= count and all(num_open.get(name) for name in at):
                return
            await asyncio.sleep(POLL_SECONDS)


async def _num_open(client: httpx.AsyncClient, url: str, adapter: str) -> dict[str, int]:
    reply = await client.get(f"{url}/v1/adapters/{adapter}")
    assert reply.status_code == 200, reply.text
    rows = reply.json()["replicas"]
    return {name: row["running"] + row["waiting"] for name, row in rows.items()}


def wait_for(condition: Callable[[], bool]) -> None:
    """Poll until it holds; a request that fails does not say that it does."""
    polls, end = threading.Event(), time.monotonic() + PATIENCE_SECONDS
    while time.monotonic() < end:
        with suppress(httpx.HTTPError):
            if condition():
                return
        polls.wait(POLL_SECONDS)
    pytest.fail("it did not come to that")


def is_healthy(served: Served) -> bool:
    """Whether /health says so."""
    return httpx.get(f"{served.url}/health", timeout=30).status_code == 200


def ask_driver(served: Served, method: str) -> Any:
    """Call a method of the driver deployment through its Serve handle."""
    return served.asker.ask(method)


def ray_metrics_url(served: Served) -> str:
    """Ray's metrics endpoint of the head node, in Prometheus' text form."""
    [node] = ask_driver(served, "nodes")
    return f"http://{node['NodeManagerAddress']}:{node['MetricsExportPort']}/metrics"
