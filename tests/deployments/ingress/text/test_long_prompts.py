"""Prompts that cannot fit are refused before a tokenizer sees them, on every route."""

from typing import Any

import httpx
import pytest

from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver

HUGE = "lorem ipsum " * 600_000
MESSAGES = [{"role": "user", "content": HUGE}]
TOOL = {"type": "function", "function": {"name": "f", "description": HUGE}}

REQUESTS: list[tuple[str, dict[str, Any]]] = [
    ("/generate", {"inputs": HUGE}),
    ("/generate_stream", {"inputs": HUGE}),
    ("/", {"inputs": HUGE}),
    ("/generate", {"inputs": HUGE, "parameters": {"truncate": 10}}),
    ("/tokenize", {"inputs": HUGE}),
    ("/embed", {"inputs": HUGE}),
    ("/v1/completions", {"prompt": HUGE}),
    ("/v1/completions", {"prompt": ["short"] * 20 + [HUGE]}),
    ("/v1/completions", {"prompt": HUGE, "echo": True, "logprobs": 1, "max_tokens": 0}),
    ("/v1/completions", {"prompt": HUGE, "stream": True}),
    ("/v1/chat/completions", {"messages": MESSAGES}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "tools": [TOOL]}),
    ("/v1/responses", {"input": HUGE}),
    ("/v1/embeddings", {"input": ["short", HUGE]}),
]


@pytest.mark.parametrize(("path", "body"), REQUESTS)
def test_texts_that_cannot_fit_are_not_encoded(
    http: httpx.Client,
    driver: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    path: str,
    body: dict[str, Any],
) -> None:
    read: list[int] = []
    encoding = ModelTokenizer._encoding

    def counting(self: ModelTokenizer, encode: Any, text: str, special: bool) -> Any:
        read.append(len(text))
        return encoding(self, encode, text, special)

    monkeypatch.setattr(ModelTokenizer, "_encoding", counting)
    reply = http.post(path, json={"model": "tiny", **body})
    assert reply.status_code in (400, 422), reply.text[:300]
    assert "characters" in reply.text
    assert str(len(HUGE))[:3] in reply.text
    assert read == []
    assert driver.requests == []


def test_the_longest_possible_text_is_encoded(server: Server, http: httpx.Client) -> None:
    """Its tokens are counted then, as of any other."""
    most = server.text._extents.most_characters(500)
    reply = http.post("/v1/completions", json={"model": "tiny", "prompt": "x" * most})
    assert "you requested" in reply.text
    assert reply.json()["error"]["code"] == "context_length_exceeded"
