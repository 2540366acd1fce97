"""A cache smaller than the model's longest sequence: what the client leaves out fits into it."""

from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from tests.served import demo_app, demo_config, served

QUESTION = "What is the capital of France?"
GREEDY: dict[str, Any] = {"temperature": 0}
CHAT = [{"role": "user", "content": QUESTION}]
SETTINGS = IngressSettings(default_source=AdapterSource.LOCAL, loopback=True)


def test_requests_without_a_length_fit_the_cache() -> None:
    app = demo_app(demo_config(cache={"num_blocks": 8}), SETTINGS)
    with served(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        info = client.get("/info").json()
        assert (info["max_total_tokens"], info["max_input_length"]) == (128, 127)
        for path, body in {
            "/v1/chat/completions": {"model": "", "messages": CHAT, **GREEDY},
            "/v1/messages": {"model": "", "messages": CHAT, "max_tokens": 900, **GREEDY},
            "/v1/responses": {"model": "", "input": QUESTION, **GREEDY},
            "/generate": {"inputs": QUESTION},
        }.items():
            reply = client.post(path, json=body)
            assert reply.status_code == 200, (path, reply.text)
            assert "Paris" in reply.text
        body = {"inputs": QUESTION, "parameters": {"max_new_tokens": 500}}
        refusal = client.post("/generate", json=body)
        assert refusal.status_code == 422
        assert "must be <= 128" in refusal.json()["error"]


@pytest.mark.parametrize("enabled", [True, False])
def test_a_server_without_adapters_lists_none(enabled: bool) -> None:
    adapters = demo_config().adapters.model_dump() | {"enabled": enabled}
    with served(demo_app(demo_config(adapters=adapters), SETTINGS)) as url:
        listed = httpx.get(f"{url}/v1/models", timeout=300).json()["data"]
    assert any(row["id"] == "pirate" for row in listed) is enabled
