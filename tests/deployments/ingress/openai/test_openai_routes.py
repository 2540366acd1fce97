"""What belongs to one of OpenAI's routes."""

from typing import Any

import httpx
import pytest

from tests.deployments.ingress.conftest import spoken
from tests.deployments.ingress.openai.openai_http import (
    CHAT,
    COMPLETIONS,
    HELLO,
    post,
    refused,
    stream,
    texts_of,
)
from tests.fakes import FakeDriver


def test_prompts_come_in_four_forms(http: httpx.Client, driver: FakeDriver) -> None:
    encode = driver.tokenizer.encode
    forms: list[tuple[object, list[list[int]]]] = [
        ("hello", [encode("hello").ids]),
        (["hello", "dog"], [encode("hello").ids, encode("dog").ids]),
        ([5, 6, 7], [[5, 6, 7]]),
        ([[5, 6], [7]], [[5, 6], [7]]),
    ]
    for prompt, expected in forms:
        reply = post(http, COMPLETIONS, prompt=prompt, max_tokens=2)
        assert [sequence.prompt for sequence in driver.requests[-1].sequences] == expected
        assert len(reply["choices"]) == len(expected)


def test_prompts_times_choices(http: httpx.Client, driver: FakeDriver) -> None:
    fields = {"prompt": ["fox", "dog"], "n": 2, "seed": 1, "max_tokens": 6}
    texts = texts_of(stream(http, COMPLETIONS, **fields))
    assert texts == {index: spoken(driver, index) for index in range(4)}
    sequences = driver.requests[-1].sequences
    assert sequences[0].prompt == sequences[1].prompt != sequences[2].prompt
    assert sequences[0].sampling.seed == sequences[2].sampling.seed
    usage = post(http, COMPLETIONS, **fields)["usage"]
    assert usage["prompt_tokens"] == len(sequences[0].prompt) + len(sequences[2].prompt)


def test_echo_repeats_the_prompt(http: httpx.Client, driver: FakeDriver) -> None:
    prompts = ["the fox", "dog: "]
    whole = post(http, COMPLETIONS, prompt=prompts, echo=True, max_tokens=4, temperature=0)
    expected = {index: prompt + spoken(driver, index) for index, prompt in enumerate(prompts)}
    assert {choice["index"]: choice["text"] for choice in whole["choices"]} == expected
    chunks = stream(http, COMPLETIONS, prompt=prompts, echo=True, max_tokens=4, temperature=0)
    assert texts_of(chunks) == expected
    ids = driver.tokenizer.encode("fox", add_special_tokens=False).ids
    whole = post(http, COMPLETIONS, prompt=ids, echo=True, max_tokens=1)
    assert whole["choices"][0]["text"].startswith("fox")


@pytest.mark.parametrize(
    "prompt", ["", [], [""], ["a", 1], [True], [[]], {"a": 1}, None, [1.5], [-1], [999]]
)
def test_invalid_prompts(http: httpx.Client, driver: FakeDriver, prompt: object) -> None:
    error = refused(http, COMPLETIONS, 400, prompt=prompt)
    assert error["param"] == "prompt"
    assert driver.requests == []


@pytest.mark.parametrize("prompt", [[-1], [10**30], [[5], [99999]], [1] * 100_000])
def test_invalid_ids_are_refused_with_echo_too(
    http: httpx.Client, driver: FakeDriver, prompt: list[Any]
) -> None:
    for others in ({}, {"echo": True}, {"echo": True, "logprobs": 1, "max_tokens": 0}):
        reply = http.post(COMPLETIONS, json={"model": "tiny", "prompt": prompt, **others})
        assert (reply.status_code, reply.json()["error"]["param"]) == (400, "prompt")
    assert driver.requests == []


def test_limits_have_their_numbers(http: httpx.Client, driver: FakeDriver) -> None:
    error = refused(http, COMPLETIONS, 400, prompt=[5] * 510, max_tokens=3)
    assert error["code"] == "context_length_exceeded"
    assert "513 tokens (510 in the prompt, 3 in the completion)" in error["message"]
    error = refused(http, COMPLETIONS, 400, prompt=[5] * 505, max_tokens=3)
    assert "505 tokens; at most 500" in error["message"]
    error = refused(http, COMPLETIONS, 400, prompt=["a"] * 200, n=2)
    assert "200 prompts times 2 choices" in error["message"]
    assert driver.requests == []


def test_defaults_of_max_tokens(http: httpx.Client, driver: FakeDriver) -> None:
    limits = []
    for path, prompt in (
        (COMPLETIONS, {"prompt": "hello"}),
        (COMPLETIONS, {"prompt": [5] * 500}),
        (CHAT, {"messages": HELLO}),
        (CHAT, {"messages": HELLO, "max_tokens": 9}),
        (CHAT, {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 7}),
    ):
        post(http, path, **prompt)
        sequence = driver.requests[-1].sequences[0]
        limits.append(sequence.stopping.max_new_tokens)
        left = 512 - len(sequence.prompt)
        if limits[-1] > 16:
            assert limits[-1] == left
            limits[-1] = -1
    assert limits == [16, 12, -1, 9, 7]


@pytest.mark.parametrize("num_top", [0, 2])
def test_completion_logprobs(http: httpx.Client, driver: FakeDriver, num_top: int) -> None:
    fields = {"prompt": "hello", "max_tokens": 40, "temperature": 0, "logprobs": num_top}
    choice = post(http, COMPLETIONS, **fields)["choices"][0]
    logprobs = choice["logprobs"]
    ids = driver.answer(driver.requests[-1].sequences[0], None)
    assert driver.requests[-1].sequences[0].sampling.logprobs == num_top
    assert logprobs["token_logprobs"] == [-(id % 8) / 4 for id in ids]
    for token, offset in zip(logprobs["tokens"], logprobs["text_offset"], strict=True):
        assert token.startswith("bytes:") or choice["text"][offset:].startswith(token)
    assert any(token.startswith("bytes:\\x") for token in logprobs["tokens"])
    if num_top:
        assert all(
            top[token] == own and 2 <= len(top) <= 3
            for top, token, own in zip(
                logprobs["top_logprobs"], logprobs["tokens"], logprobs["token_logprobs"],
                strict=True,
            )
        )  # fmt: skip
    else:
        assert logprobs["top_logprobs"] is None
    chunks = stream(http, COMPLETIONS, **fields)
    streamed = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    for part in ("tokens", "token_logprobs", "text_offset"):
        assert [entry for chunk in streamed for entry in chunk[part]] == logprobs[part]


def test_chat_logprobs(http: httpx.Client, driver: FakeDriver) -> None:
    fields = {"messages": HELLO, "max_tokens": 40, "temperature": 0, "logprobs": True}
    choice = post(http, CHAT, **fields, top_logprobs=2)["choices"][0]
    content = choice["logprobs"]["content"]
    joined = b"".join(bytes(entry["bytes"]) for entry in content)
    assert joined.decode("utf-8", "replace") == choice["message"]["content"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in content)
    assert content[0]["top_logprobs"][0]["logprob"] == content[0]["logprob"]
    chunks = stream(http, CHAT, **fields, top_logprobs=2)
    logprobs = [c["logprobs"] for chunk in chunks for c in chunk["choices"] if c["logprobs"]]
    assert [entry for chunk in logprobs for entry in chunk["content"]] == content
    assert post(http, CHAT, **fields)["choices"][0]["logprobs"]["content"][0]["top_logprobs"] == []


@pytest.mark.parametrize(
    ("path", "extra", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "logprobs": 21}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "logprobs": 21, "echo": True}, "logprobs"),
        (COMPLETIONS, {"prompt": "a", "best_of": 2, "n": 3}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "best_of": 17}, "best_of"),
        (COMPLETIONS, {"prompt": "a", "suffix": "b"}, "suffix"),
        (CHAT, {"messages": HELLO, "top_logprobs": 2}, "top_logprobs"),
        (CHAT, {"messages": HELLO, "logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        (CHAT, {"messages": []}, "messages"),
        (CHAT, {"messages": [{"role": "alien", "content": "x"}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages"),
    ],
)
def test_refusals_of_one_route(
    http: httpx.Client, driver: FakeDriver, path: str, extra: dict[str, Any], param: str
) -> None:
    assert refused(http, path, 400, **extra)["param"] == param
    assert driver.requests == []


def test_stream_options_are_for_streams(http: httpx.Client) -> None:
    body = {"model": "tiny", "prompt": "a", "stream_options": {"include_usage": True}}
    reply = http.post(COMPLETIONS, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "stream_options")


def test_messages_are_rendered_once(http: httpx.Client, driver: FakeDriver) -> None:
    messages = [
        {"role": "developer", "content": "be brief"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]},
        {"role": "assistant", "content": None},
    ]
    post(http, CHAT, messages=messages)
    prompt = driver.tokenizer.decode(
        driver.requests[-1].sequences[0].prompt, skip_special_tokens=False
    )
    assert prompt == (
        "<s><|system|>be brief</s>\n<|user|>a\nb</s>\n<|assistant|></s>\n<|assistant|>"
    )
    post(http, CHAT, messages=messages, add_generation_prompt=False)
    shorter = driver.requests[-1].sequences[0].prompt
    assert prompt.startswith(driver.tokenizer.decode(shorter, skip_special_tokens=False))


def test_a_chat_stream_begins_with_the_role(http: httpx.Client) -> None:
    first, *others = stream(http, CHAT, messages=HELLO, n=2, max_tokens=4)
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": "", "refusal": None}
    assert others[0]["choices"][0]["delta"]["role"] == "assistant"
    assert all("role" not in c["delta"] for chunk in others[1:] for c in chunk["choices"])


def test_the_callers_token_reaches_the_driver(http: httpx.Client, driver: FakeDriver) -> None:
    for header, expected in (
        ("Bearer hf_secret", "hf_secret"),
        ("bearer  hf_secret", "hf_secret"),
        ("Bearer EMPTY", None),
        ("Bearer", None),
        ("Basic abc", None),
    ):
        body = {"model": "tiny", "prompt": "a"}
        http.post(COMPLETIONS, json=body, headers={"authorization": header})
        assert driver.requests[-1].api_token == expected


def test_models_are_listed(http: httpx.Client, driver: FakeDriver) -> None:
    listing = http.get("/v1/models").json()
    assert listing["object"] == "list"
    assert [(model["id"], model["parent"]) for model in listing["data"]] == [
        ("tiny", None), ("org/pirate", "tiny"), ("local:poet", "tiny"),
    ]  # fmt: skip
    assert http.get("/v1/models/org/pirate").json()["root"] == "org/pirate"
    assert http.get("/v1/models/org/tiny-base").json()["id"] == "tiny"
    missing = http.get("/v1/models/unknown")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [b"{", b"", b"[1]", b'"x"', b"null", b"\xff\xfe", b"[" * 100_000])
def test_malformed_bodies(http: httpx.Client, body: bytes) -> None:
    reply = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code == 400
    assert reply.json()["error"]["type"] == "invalid_request_error"


def test_half_surrogate_pairs_and_strange_numbers_break_nothing(http: httpx.Client) -> None:
    for body in (
        b'{"model": "\\ud800", "prompt": "a"}',
        b'{"model": "tiny", "prompt": "a", "temperature": NaN}',
        b'{"model": "tiny", "prompt": "a", "temperature": 1e999}',
        b'{"model": "tiny", "prompt": "a", "seed": 1' + b"0" * 5000 + b"}",
        b'{"model": "tiny", "prompt": "a", "stop": "\\ud800"}',
    ):
        reply = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert reply.status_code == 400, body[:60]
    for prompt in (b'"\\ud800"', b'["a", "\\ud800"]'):
        body = b'{"model": "tiny", "prompt": ' + prompt + b"}"
        reply = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
        assert reply.json()["error"]["message"] == "`prompt`: must be valid Unicode"
    extra = b'{"model": "tiny", "messages": [{"role": "user", "content": "a", "x": "\\ud800"}]}'
    reply = http.post(CHAT, content=extra, headers={"content-type": "application/json"})
    assert reply.status_code == 200


def test_unknown_routes_and_methods_have_the_routes_dialect(http: httpx.Client) -> None:
    assert http.post("/v1/unknown").json()["error"]["message"] == "Not Found"
    reply = http.delete("/v1/models")
    assert (reply.status_code, reply.json()["error"]["message"]) == (405, "Method Not Allowed")
