"""Bodies of very many small objects are refused before they are parsed."""

import json
import time

import httpx
import pytest

from tests.fakes import FakeDriver

N = 100_000
MESSAGE = {"role": "user", "content": "a"}
TOOL = {"type": "function", "function": {"name": "f"}}
BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "messages": ("/v1/chat/completions", {"messages": [MESSAGE] * N}),
    "content parts": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}] * N}]},
    ),
    "tools": ("/v1/chat/completions", {"messages": [MESSAGE], "tools": [TOOL] * N}),
    "prompts of ids": ("/v1/completions", {"prompt": [[1]] * N}),
    "inputs of ids": ("/v1/embeddings", {"input": [[1]] * N}),
    "items": ("/v1/responses", {"input": [MESSAGE] * N}),
    "native messages": ("/generate", {"inputs": "a", "parameters": {"messages": [MESSAGE] * N}}),
}


@pytest.mark.parametrize("name", BODIES)
def test_very_many_objects_are_refused_unparsed(
    http: httpx.Client, driver: FakeDriver, name: str
) -> None:
    path, body = BODIES[name]
    content = json.dumps({"model": "tiny", **body}).encode()
    headers = {"content-type": "application/json"}
    started = time.process_time()
    reply = http.post(path, content=content, headers=headers)
    # To validate the same messages takes a second.
    assert time.process_time() - started < 0.5
    assert reply.status_code == (422 if path == "/generate" else 400)
    assert "at most 10000 are read" in str(reply.json()["error"])
    assert driver.requests == []


def test_a_long_conversation_is_not_too_many_objects(
    http: httpx.Client, driver: FakeDriver
) -> None:
    brackets = {"role": "user", "content": "[{" * 20}
    body = {"model": "tiny", "messages": [brackets] * 1000, "max_tokens": 1}
    reply = http.post("/v1/chat/completions", json=body)
    # Over the model's context, which is found only when all messages have been read.
    assert "tokens" in reply.text or reply.status_code == 200
    assert "are read" not in reply.text
