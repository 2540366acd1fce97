"""Structured answers of the real engine over HTTP: alone, together, streamed, on two ranks."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterSource
from configs.wire.plan import StepPlan
from deployments.ingress.generation.engine import IngressSettings
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.served import demo_app, demo_config, served

pytest.importorskip("llguidance")

TOWN = {
    "type": "object",
    "properties": {"town": {"type": "string", "maxLength": 12}, "big": {"type": "boolean"}},
    "required": ["town", "big"],
    "additionalProperties": False,
}
AS_TOWN = {"response_format": {"type": "json_schema", "json_schema": {"name": "t", "schema": TOWN}}}
FORMATS: dict[str, dict[str, Any]] = {
    "town": AS_TOWN,
    "drawn": {**AS_TOWN, "temperature": 1.0, "seed": 4},
    "words": {"guided_regex": "(Paris|Rome|[0-9]{2} ){30}"},
    "free": {},
}
CASES = [(model, format) for model in ("loray-demo", "pirate", "french") for format in FORMATS]


def body(model: str, format: str, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the capital of France? {model}"}]
    shared = {"model": model, "messages": messages, "max_tokens": 48, "temperature": 0}
    return {**shared, **FORMATS[format], "stream": stream}


def text_of(reply: httpx.Response, stream: bool) -> str:
    assert reply.status_code == 200, reply.text
    if not stream:
        return str(reply.json()["choices"][0]["message"]["content"])
    lines = [line[6:] for line in reply.text.splitlines() if line.startswith("data: {")]
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


async def together(url: str) -> list[str]:
    """Every second one is streamed; all run at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        bodies = [body(*each, stream=index % 2 == 0) for index, each in enumerate(CASES)]
        calls = [client.post("/v1/chat/completions", json=each) for each in bodies]
        replies = await asyncio.gather(*calls)
    return [text_of(reply, index % 2 == 0) for index, reply in enumerate(replies)]


def engine_url(**changes: object) -> Any:
    limits = {"max_total_tokens": 160, "max_step_tokens": 24, "max_running": 16}
    config = demo_config(limits=limits, **changes)
    return served(demo_app(config, IngressSettings(default_source=AdapterSource.LOCAL)))


@pytest.fixture(scope="module")
def alone() -> Iterator[list[str]]:
    """One after the other, with room for all."""
    with engine_url() as url, httpx.Client(base_url=url, timeout=300) as client:
        replies = [client.post("/v1/chat/completions", json=body(*e, False)) for e in CASES]
        yield [text_of(reply, False) for reply in replies]


@pytest.mark.parametrize("ranks", [1, 2])
def test_answers_do_not_depend_on_the_batch(
    alone: list[str], ranks: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks of 24 tokens, and blocks run out, so requests are preempted.

    No step is made before all have come: one after the other they would find room.
    """
    come: set[Any] = set()
    preempted: set[Any] = set()
    add, schedule, rewind = Scheduler.add, Scheduler.schedule, Request.rewind

    def arrive(self: Scheduler, request: Request, now: float) -> None:
        come.add(request.id)
        add(self, request, now)

    def await_all(self: Scheduler, now: float) -> StepPlan:
        if len(come) < len(CASES):
            return StepPlan(self.epoch, 0, [], [], [], [])
        return schedule(self, now)

    def count(self: Request) -> None:
        if self.num_generated and self.sampling.constraint:
            preempted.add(self.id)
        rewind(self)

    monkeypatch.setattr(Scheduler, "add", arrive)
    monkeypatch.setattr(Scheduler, "schedule", await_all)
    monkeypatch.setattr(Request, "rewind", count)
    with engine_url(tensor_parallel=ranks, cache={"num_blocks": 44, "block_size": 4}) as url:
        assert asyncio.run(together(url)) == alone
    assert preempted


def test_answers_fit(alone: list[str]) -> None:
    for (_, format), text in zip(CASES, alone, strict=True):
        if format in ("town", "drawn"):
            assert json.loads(text).keys() == {"town", "big"}, text
