"""A driver is lost in the middle of answers: clients see what they would have seen."""

import asyncio
import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from configs.wire.templates import TemplateSource
from deployments.contract import ErrorKind, Failed, TokenFrame, TokenRun
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.generation.resubmissions import MOST_RESUBMISSIONS
from deployments.ingress.http.errors import EngineLost, RequestError
from tests.deployments.ingress.conftest import Server
from tests.fakes import FakeDriver, Unreliable

COMPLETION = {"model": "tiny", "prompt": "a", "max_tokens": 40}
WARM = {"temperature": 0.9, "seed": 3}
LORAX = {"max_new_tokens": 40, "details": True, "do_sample": True, "seed": 3}
CASES: Mapping[str, tuple[str, dict[str, Any]]] = {
    "completion": ("/v1/completions", COMPLETION | WARM),
    "choices with stop strings": (
        "/v1/completions",
        COMPLETION | WARM | {"n": 3, "stop": ["END", "jump"], "logprobs": 2},
    ),
    "the best of several": ("/v1/completions", COMPLETION | WARM | {"best_of": 3, "logprobs": 1}),
    "prompt logprobs": ("/v1/completions", COMPLETION | WARM | {"prompt_logprobs": 1}),
    "prompts": ("/v1/completions", COMPLETION | {"prompt": ["a", "the fox"], "temperature": 0}),
    "generate": ("/generate", {"inputs": "a", "parameters": LORAX}),
    "with a stop string": (
        "/generate",
        {"inputs": "a", "parameters": LORAX | {"stop": ["END"], "decoder_input_details": True}},
    ),
    "stream": ("/v1/completions", COMPLETION | WARM | {"stream": True, "n": 2, "logprobs": 2}),
    "stream with stop strings": (
        "/v1/completions",
        COMPLETION | WARM | {"stream": True, "n": 3, "stop": ["END", "jump"]},
    ),
    "chat stream": (
        "/v1/chat/completions",
        WARM
        | {"model": "tiny", "max_tokens": 40, "stream": True, "logprobs": True, "top_logprobs": 1}
        | {"messages": [{"role": "user", "content": "hi"}]},
    ),
    "generate stream": ("/generate_stream", {"inputs": "a", "parameters": LORAX}),
}


def reply_of(http: httpx.Client, path: str, body: object) -> object:
    """What the client gets: of a stream the text, scores and ends of each choice."""
    reply = http.post(path, json=body)
    assert reply.status_code == 200, reply.text
    if not reply.headers["content-type"].startswith("text/event-stream"):
        found = reply.json()
        return [found.get(key) for key in ("choices", "usage", "generated_text", "details")]
    events = [
        json.loads(line[5:])
        for line in reply.text.splitlines()
        if line.startswith("data:") and "[DONE]" not in line
    ]
    assert not any("error" in event for event in events), reply.text
    if path == "/generate_stream":
        return events
    return [joined(events, index) for index in range(3)]


def joined(events: list[dict[str, Any]], index: int) -> tuple[str, list[object], list[object]]:
    """One choice of a stream, however its tokens were cut into events."""
    own = [row for event in events for row in event["choices"] if row["index"] == index]
    text = "".join(row.get("text") or row.get("delta", {}).get("content") or "" for row in own)
    scores: list[object] = []
    for row in own:
        found = row.get("logprobs") or {}
        scores += found.get("token_logprobs") or found.get("content") or []
    return text, scores, [row["finish_reason"] for row in own if row["finish_reason"]]


@pytest.mark.parametrize("name", CASES)
def test_the_answer_is_the_undisturbed_one(http: httpx.Client, server: Server, name: str) -> None:
    path, body = CASES[name]
    expected = reply_of(http, path, body)
    for deaths in ([0], [1], [9, 0, 5], [38]):
        server.driver.deaths, server.driver.requests = list(deaths), []
        assert reply_of(http, path, body) == expected
        ids = [request.id for request in server.driver.requests]
        assert len(set(ids)) == 1 + len(deaths) - len(server.driver.deaths) > 1
        assert len(server.inboxes) == 0


def test_a_stream_goes_on_after_what_arrived_without_the_seed_being_sent(
    http: httpx.Client, server: Server
) -> None:
    """The seed was drawn here; frames are lost, doubled and late."""
    server.driver.link, server.driver.deaths = Unreliable(), [12]
    body = COMPLETION | {"stream": True, "temperature": 0.9}
    text = joined_text(http.post("/v1/completions", json=body))
    first, second = server.driver.requests
    assert first.sequences[0].sampling == second.sequences[0].sampling
    assert 0 < len(second.sequences[0].generated) <= 12
    ids = server.driver.answer(first.sequences[0], None)
    assert text == server.driver.tokenizer.decode(ids, skip_special_tokens=True)


def joined_text(reply: httpx.Response) -> str:
    lines = [line[5:] for line in reply.text.splitlines() if line.startswith('data: {"id"')]
    return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


def test_a_request_that_kills_every_driver_ends_with_the_old_error(
    http: httpx.Client, server: Server
) -> None:
    server.driver.deaths = [0] * 99
    reply = http.post("/v1/completions", json=COMPLETION)
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "send it again" in reply.text
    assert len(server.driver.requests) == 1 + MOST_RESUBMISSIONS
    server.driver.deaths = [2] * 99
    reply = http.post("/v1/completions", json=COMPLETION | {"stream": True})
    assert "send it again" in reply.text
    assert joined_text(reply)


def test_what_the_next_driver_cannot_continue_ends_by_name(
    http: httpx.Client, server: Server
) -> None:
    changed = Failed(ErrorKind.UNAVAILABLE, "the adapter has changed since: send it again", 5.0)
    server.driver.deaths = [3]
    server.driver.faults["red"], server.driver.fail_after = changed, 9
    reply = http.post("/v1/completions", json=COMPLETION | {"model": "red"})
    assert reply.status_code == 503
    assert "has changed since" in reply.text


def test_frames_of_a_lost_driver_come_too_late() -> None:
    """Another driver may continue differently, if its device rounds differently."""

    async def story() -> None:
        inboxes = RequestInboxes()
        inbox = inboxes.open("r", 1)
        inboxes.deliver(TokenFrame([TokenRun("r", 0, 0, [5, 6], origin="a")]))
        inboxes.deliver(TokenFrame([TokenRun("r", 0, 3, [8])]))
        inbox.restart()
        inboxes.rename("r", "r-1")
        inboxes.deliver(TokenFrame([TokenRun("r", 0, 2, [7])]))
        inboxes.deliver(TokenFrame([TokenRun("r-1", 0, 2, [9])]))
        assert (inbox.received(0), inbox.origin) == (([5, 6, 9], None), "a")
        assert [update.tokens for update in await inbox.take()] == [[5, 6, 9]]
        inboxes.close("r-1")
        assert len(inboxes) == 0

    asyncio.run(story())


def test_an_adapters_template_is_read_again(http: httpx.Client, server: Server) -> None:
    lost = [EngineLost(), EngineLost()]

    class Losing(FakeDriver):
        async def chat_template(self, *args: object) -> TemplateSource:
            if lost:
                raise lost.pop()
            return TemplateSource()

    server.driver.__class__ = Losing
    body = {"model": "red", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 3}
    assert http.post("/v1/chat/completions", json=body).status_code == 200
    assert not lost
    assert issubclass(EngineLost, RequestError)
