"""A stop string may be, or hold, a special token, which is not in the text."""

import json
from typing import Any

import httpx
import pytest

from tests.fakes import BOS, EOS, FakeDriver

ANSWER = f"the fox{BOS}\nthe dog"


def _completion(http: httpx.Client, path: str, **fields: object) -> tuple[str, str]:
    """Text and reason, whole and streamed, which must be the same."""
    body = {"model": "tiny", "max_tokens": 50, "temperature": 0, "ignore_eos": True, **fields}
    whole = http.post(path, json=body).json()["choices"][0]
    reply = http.post(path, json={**body, "stream": True})
    events = [json.loads(line[6:]) for line in reply.text.split("\n\n") if line[6:7] == "{"]
    choices = [choice for event in events for choice in event["choices"]]
    streamed = "".join(_text(choice) for choice in choices)
    assert (streamed, choices[-1]["finish_reason"]) == (_text(whole), whole["finish_reason"])
    return streamed, whole["finish_reason"]


def _text(choice: dict[str, Any]) -> str:
    message = choice.get("message") or choice.get("delta") or choice
    return str(message.get("content", message.get("text", "")) or "")


def _generated(http: httpx.Client, stop: str) -> tuple[str, str]:
    """The same of LoRAX's routes."""
    given = {"max_new_tokens": 50, "stop": [stop], "details": True, "ignore_eos_token": True}
    body = {"inputs": "hello", "parameters": given}
    whole = http.post("/generate", json=body).json()
    assert http.post("/", json=body).json() == [whole]
    reply = http.post("/generate_stream", json=body)
    last = json.loads(reply.text.strip().split("\n\n")[-1].removeprefix("data: "))
    reason = whole["details"]["finish_reason"]
    assert last["generated_text"] == whole["generated_text"]
    assert last["details"]["finish_reason"] == reason
    assert last["details"]["generated_tokens"] == whole["details"]["generated_tokens"]
    return whole["generated_text"], reason


CASES = [
    (BOS, "the fox"),
    (f"fox{BOS}", "the "),
    (f"{BOS}\n", "the fox"),
    (f"{BOS}\nthe d", "the fox"),
    (EOS, "the fox\nthe dog"),
    ("fox\n", "the "),
]


@pytest.mark.parametrize(("stop", "expected"), CASES)
def test_openais_routes_remove_it(
    http: httpx.Client, driver: FakeDriver, stop: str, expected: str
) -> None:
    driver.replies[None] = ANSWER
    messages = [{"role": "user", "content": "hello"}]
    for path, fields in (
        ("/v1/completions", {"prompt": "hello"}),
        ("/v1/completions", {"prompt": "hello", "logprobs": 1}),
        ("/v1/chat/completions", {"messages": messages}),
    ):
        assert _completion(http, path, stop=stop, **fields) == (expected, "stop")
    assert driver.finishes or stop == EOS


@pytest.mark.parametrize(("stop", "expected"), CASES)
def test_loraxs_routes_keep_its_visible_text(
    http: httpx.Client, driver: FakeDriver, stop: str, expected: str
) -> None:
    driver.replies[None] = ANSWER
    shown = stop.replace(BOS, "").replace(EOS, "")
    assert _generated(http, stop) == (expected + shown, "stop_sequence")
