"""How the tests speak Anthropic's dialect without Anthropic's client."""

import json
from typing import Any

import httpx

PATH = "/v1/messages"
HELLO = [{"role": "user", "content": "hello"}]
BODY: dict[str, Any] = {"model": "tiny", "max_tokens": 24, "temperature": 0, "messages": HELLO}


def post(http: httpx.Client, **body: object) -> dict[str, Any]:
    reply = http.post(PATH, json={**BODY, **body})
    assert reply.status_code == 200, reply.text
    value: dict[str, Any] = reply.json()
    return value


def events_of(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    """All events of a stream, each named by its type."""
    reply = http.post(PATH, json={**BODY, **body, "stream": True})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *blocks, nothing = reply.text.split("\n\n")
    assert nothing == ""
    events = []
    for block in blocks:
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        events.append(event)
    return events


def in_order(events: list[dict[str, Any]]) -> list[str]:
    """The types of the events, each run of deltas once; checks the indices of blocks."""
    kinds: list[str] = []
    blocks = 0
    for event in events:
        kind = event["type"]
        blocks += kind == "content_block_start"
        assert event.get("index", blocks - 1) == blocks - 1, event
        if kind != "content_block_delta" or kinds[-1] != kind:
            kinds.append(kind)
    return kinds


def refused(http: httpx.Client, status: int = 400, **body: object) -> str:
    """The message of a request that is refused, the same whether it streams or not."""
    whole = http.post(PATH, json={**BODY, **body})
    streamed = http.post(PATH, json={**BODY, **body, "stream": True})
    assert (whole.status_code, streamed.status_code) == (status, status), whole.text
    assert whole.json() == streamed.json()
    assert set(whole.json()) == {"type", "error"}
    assert whole.json()["type"] == "error"
    assert set(whole.json()["error"]) - {"details"} == {"type", "message"}
    return str(whole.json()["error"]["message"])
