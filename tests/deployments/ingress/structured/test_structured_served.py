"""Structured and other answers over HTTP: alone, together, streamed, with drafts, on two ranks."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterSource
from configs.wire.plan import StepPlan
from deployments.ingress.generation.engine import IngressSettings
from scheduler import speculation
from scheduler.draft_costs import DraftCosts
from scheduler.drafts import Drafter
from scheduler.events import Ended, Ending
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.modeling.parity.test_speculation import informed
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
    "cut": {"stop": ["capital"]},
    "pair": {"temperature": 1.0, "seed": 7, "n": 2, "frequency_penalty": 0.3},
}
MOST = 48
"""Tokens of an answer."""

CASES = [(model, format) for model in ("loray-demo", "pirate", "french") for format in FORMATS]
NUM_REQUESTS = sum(FORMATS[format].get("n", 1) for _, format in CASES)


def body(model: str, format: str, stream: bool) -> dict[str, Any]:
    messages = [{"role": "user", "content": f"What is the capital of France? {model}"}]
    shared = {"model": model, "messages": messages, "max_tokens": MOST, "temperature": 0}
    return {**shared, **FORMATS[format], "stream": stream}


def texts_of(reply: httpx.Response, stream: bool) -> list[str]:
    """The choices."""
    assert reply.status_code == 200, reply.text
    if not stream:
        return [choice["message"]["content"] for choice in reply.json()["choices"]]
    found: defaultdict[int, str] = defaultdict(str)
    for line in reply.text.splitlines():
        for choice in json.loads(line[6:])["choices"] if line.startswith("data: {") else ():
            found[choice["index"]] += choice["delta"].get("content") or ""
    return [found[index] for index in sorted(found)]


async def together(url: str) -> list[list[str]]:
    """Every second one is streamed; all run at once."""
    async with httpx.AsyncClient(base_url=url, timeout=300) as client:
        bodies = [body(*each, stream=index % 2 == 0) for index, each in enumerate(CASES)]
        calls = [client.post("/v1/chat/completions", json=each) for each in bodies]
        replies = await asyncio.gather(*calls)
    return [texts_of(reply, index % 2 == 0) for index, reply in enumerate(replies)]


def engine_url(**changes: object) -> Any:
    limits = {"max_total_tokens": 160, "max_step_tokens": 24, "max_running": 16}
    config = demo_config(**{"limits": limits, "speculation": {"kind": "none"}, **changes})
    return served(demo_app(config, IngressSettings(default_source=AdapterSource.LOCAL)))


@dataclass
class Kept:
    """What was answered.

    tokens: of each request, with its prompt. skipped: how many of them came as drafts, for
    requests without a constraint and with one.
    """

    texts: list[list[str]] = field(default_factory=list)
    tokens: list[list[int]] = field(default_factory=list)
    skipped: Counter[bool] = field(default_factory=Counter)


@contextmanager
def kept() -> Iterator[Kept]:
    """Keep what requests end with."""
    found, ended = Kept(), Request.ended

    def end(self: Request, ending: Ending) -> Ended:
        found.tokens.append(list(self.tokens))
        found.skipped[bool(self.sampling.constraint)] += len(self.skipped)
        return ended(self, ending)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Request, "ended", end)
        yield found


@pytest.fixture(scope="module")
def alone() -> Kept:
    """One after the other, with room for all."""
    with kept() as found, engine_url() as url, httpx.Client(base_url=url, timeout=300) as client:
        replies = [client.post("/v1/chat/completions", json=body(*e, False)) for e in CASES]
    found.texts = [texts_of(reply, False) for reply in replies]
    assert not found.skipped.total()
    return found


@pytest.mark.parametrize(
    ("ranks", "drafts"),
    [*(pytest.param(1, most, marks=pytest.mark.sweep) for most in (0, 5)), (2, 5)],
)
def test_answers_do_not_depend_on_the_batch(
    alone: Kept, ranks: int, drafts: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prompts come in chunks of 24 tokens, and blocks run out, so requests are preempted.

    No step is made before all have come: one after the other they would find room. Every sixth
    token of a draft is wrong, and every step has drafts.
    """
    come: list[Request] = []
    preempted: set[Any] = set()
    add, schedule, rewind = Scheduler.add, Scheduler.schedule, Request.rewind

    def arrive(self: Scheduler, request: Request, now: float) -> None:
        come.append(request)
        if len(come) == NUM_REQUESTS:
            # In an order of their own, not of arrival: the order decides which are preempted.
            for each in sorted(come, key=lambda own: own.sampling.constraint is None):
                add(self, each, now)

    def await_all(self: Scheduler, now: float) -> StepPlan:
        if len(come) < NUM_REQUESTS:
            return StepPlan(self.epoch, 0, [], [], [], [])
        return schedule(self, now)

    def count(self: Request) -> None:
        if self.num_generated:
            preempted.add(self.id)
        rewind(self)

    monkeypatch.setattr(Scheduler, "add", arrive)
    monkeypatch.setattr(Scheduler, "schedule", await_all)
    monkeypatch.setattr(Request, "rewind", count)
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(DraftCosts, "applied", lambda *_: None)
    monkeypatch.setattr(Drafter, "find", informed(alone.tokens))
    changes: dict[str, Any] = {"cache": {"num_blocks": 26, "block_size": 4}}
    if drafts:
        changes["speculation"] = {"kind": "prompt_lookup", "max_tokens": drafts}
    with kept() as found, engine_url(tensor_parallel=ranks, **changes) as url:
        assert asyncio.run(together(url)) == alone.texts
    assert preempted
    assert all(
        (found.skipped[constrained] >= len(CASES)) == (drafts > 0) for constrained in (False, True)
    )


def test_answers_fit(alone: Kept) -> None:
    for (_, format), [text, *_] in zip(CASES, alone.texts, strict=True):
        if format in ("town", "drawn"):
            assert json.loads(text).keys() == {"town", "big"}, text
