"""How the tests speak OpenAI's dialect without OpenAI's client."""

import json
from typing import Any

import httpx

COMPLETIONS, CHAT = "/v1/completions", "/v1/chat/completions"
HELLO = [{"role": "user", "content": "hello"}]


def post(http: httpx.Client, path: str, **body: object) -> dict[str, Any]:
    reply = http.post(path, json={"model": "tiny", **body})
    assert reply.status_code == 200, reply.text
    value: dict[str, Any] = reply.json()
    return value


def stream(http: httpx.Client, path: str, **body: object) -> list[dict[str, Any]]:
    """All events of a stream that ends well."""
    reply = http.post(path, json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    *events, last, nothing = reply.text.split("\n\n")
    assert (last, nothing) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in events]


def texts_of(chunks: list[dict[str, Any]]) -> dict[int, str]:
    """Text of each choice, put together from chunks of either route."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk["choices"]:
            new = choice["text"] if "text" in choice else choice["delta"].get("content", "")
            texts[choice["index"]] = texts.get(choice["index"], "") + new
    return texts


def refused(http: httpx.Client, path: str, status: int, **body: object) -> dict[str, Any]:
    """The error of a request that is refused, the same whether it streams or not."""
    whole = http.post(path, json={"model": "tiny", **body})
    streamed = http.post(path, json={"model": "tiny", **body, "stream": True})
    assert (whole.status_code, streamed.status_code) == (status, status), whole.text
    assert whole.json() == streamed.json()
    error: dict[str, Any] = whole.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error
