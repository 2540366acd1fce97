"""Requests of LoRAX's routes for tests, without LoRAX's client."""

import json
from typing import Any

import httpx

from tests.deployments.ingress.conftest import spoken
from tests.fakes import FakeDriver


def post(http: httpx.Client, path: str = "/generate", **parameters: object) -> Any:
    reply = http.post(path, json={"inputs": "hello", "parameters": parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()


def stream(http: httpx.Client, **parameters: object) -> list[dict[str, Any]]:
    body = {"inputs": "hello", "parameters": parameters}
    reply = http.post("/generate_stream", json=body)
    assert reply.status_code == 200, reply.text
    assert "[DONE]" not in reply.text
    *events, nothing = reply.text.split("\n\n")
    assert nothing == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def refused(http: httpx.Client, status: int, **parameters: object) -> dict[str, str]:
    """The error of a request that is refused, the same on all three routes."""
    body = {"inputs": "hello", "parameters": parameters}
    replies = [http.post(path, json=body) for path in ("/generate", "/generate_stream", "/")]
    assert [reply.status_code for reply in replies] == [status] * 3, replies[0].text
    assert replies[0].json() == replies[1].json() == replies[2].json()
    error: dict[str, str] = replies[0].json()
    assert set(error) == {"error", "error_type", "code"}
    return error


def expected_answer(driver: FakeDriver) -> tuple[list[int], str]:
    request = driver.requests[-1]
    ids = driver.answer(request.sequences[0], request.adapter)
    return ids, spoken(driver)
