"""LoRAX's routes: answers, whole and streamed, and what the driver gets."""

from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from tests.deployments.ingress.lorax.lorax_http import expected_answer, post, stream
from tests.fakes import FakeDriver, Unreliable, deaf


def test_three_routes_have_the_same_answer(http: httpx.Client, driver: FakeDriver) -> None:
    for link in (deaf, Unreliable(), driver.link):
        driver.link = link
        whole = post(http, max_new_tokens=40)
        ids, text = expected_answer(driver)
        assert whole == {"generated_text": text}
        assert post(http, "/", max_new_tokens=40) == [whole]
        events = stream(http, max_new_tokens=40)
        assert [event["token"]["id"] for event in events] == ids
        assert "".join(event["token"]["text"] for event in events) == text
        assert [event["generated_text"] for event in events] == [None] * 39 + [text]
        assert all(event["details"] is None for event in events)
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 40}, "stream": True}
        assert http.post("/", json=body).text.count("data: ") == 40


def test_details(http: httpx.Client, driver: FakeDriver) -> None:
    whole = post(http, max_new_tokens=30, details=True)
    ids, text = expected_answer(driver)
    details = whole["details"]
    tokens = details.pop("tokens")
    num_prompt = len(driver.requests[-1].sequences[0].prompt)
    expected = {
        "finish_reason": "length", "prompt_tokens": num_prompt, "generated_tokens": 30,
        "skipped_tokens": 0, "seed": None,
    }  # fmt: skip
    assert details == {**expected, "prefill": []}
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == text
    assert [token["logprob"] for token in tokens] == [-(id % 8) / 4 for id in ids]
    assert set(tokens[0]) == {"id", "text", "logprob", "special", "skipped"}
    events = stream(http, max_new_tokens=30, details=True)
    assert [event["token"] for event in events] == tokens
    assert events[-1]["details"] == expected
    assert driver.requests[-1].sequences[0].sampling.logprobs == 0


@pytest.mark.parametrize("link", [deaf, Unreliable(), None])
def test_eos_is_a_special_token(http: httpx.Client, driver: FakeDriver, link: Any) -> None:
    driver.link = link or driver.link
    driver.replies[None] = "café"
    events = stream(http, max_new_tokens=50, details=True)
    assert (events[-1]["token"]["text"], events[-1]["token"]["special"]) == ("</s>", True)
    assert events[-1]["generated_text"] == "café"
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert not any(event["token"]["special"] for event in events[:-1])
    assert post(http, details=True)["details"]["tokens"][-1]["text"] == "</s>"
    post(http, ignore_eos_token=True)
    assert driver.requests[-1].sequences[0].stopping.stop_token_ids == ()


@pytest.mark.parametrize("stop", [["END"], ["; caf"], ["never", "é E"], ["🚀 fl"], ["ND"]])
def test_stop_strings_stay_in_the_text(
    http: httpx.Client, driver: FakeDriver, stop: list[str]
) -> None:
    events = stream(http, max_new_tokens=300, stop=stop, details=True)
    [(index, at)] = driver.finishes
    _, full = expected_answer(driver)
    expected = full[: full.index(stop[-1]) + len(stop[-1])]
    assert events[-1]["generated_text"] == expected
    assert "".join(event["token"]["text"] for event in events) == expected
    assert (index, at) == (0, len(events))
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["details"]["generated_tokens"] == at
    assert post(http, max_new_tokens=300, stop=stop)["generated_text"] == expected
    driver.link = deaf
    details = post(http, max_new_tokens=300, stop=stop, details=True)["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (at, "stop_sequence")
    assert len(details["tokens"]) == at


def test_return_full_text_repeats_the_prompt(http: httpx.Client, driver: FakeDriver) -> None:
    whole = post(http, max_new_tokens=5, return_full_text=True)
    text = "hello" + expected_answer(driver)[1]
    assert whole["generated_text"] == text
    events = stream(http, max_new_tokens=5, return_full_text=True)
    assert events[-1]["generated_text"] == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"temperature": 1.0}, (0.0, 0, 1.0)),
        ({"temperature": 0.0, "do_sample": True, "top_k": 5}, (0.0, 0, 1.0)),
        ({"top_p": 1.0}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"temperature": 0.7}, (0.7, 0, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"top_p": 0.5}, (1.0, 0, 0.5)),
        ({"typical_p": 0.5}, (1.0, 0, 1.0)),
        ({"typical_p": 1.0, "repetition_penalty": 1.2}, (0.0, 0, 1.0)),
        ({"temperature": 1.0, "do_sample": True, "top_k": 3, "top_p": 0.9}, (1.0, 3, 0.9)),
    ],
)
def test_which_parameters_make_a_request_sample(
    http: httpx.Client, driver: FakeDriver, given: Any, expected: tuple[float, int, float]
) -> None:
    details = post(http, details=True, max_new_tokens=2, **given)["details"]
    sampling = driver.requests[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
    drawn = expected[0] > 0
    assert details["seed"] == (sampling.seed if drawn else None)
    post(http, seed=11, **given)
    assert driver.requests[-1].sequences[0].sampling.seed == 11


def test_the_default_length_is_all_that_fits(http: httpx.Client, driver: FakeDriver) -> None:
    post(http)
    sequence = driver.requests[-1].sequences[0]
    assert sequence.stopping.max_new_tokens == 512 - len(sequence.prompt)


def test_names_of_adapters(http: httpx.Client, driver: FakeDriver) -> None:
    for given, expected in (
        ({}, None),
        ({"adapter_id": ""}, None),
        ({"adapter_id": "org/tiny-base"}, None),
        ({"adapter_id": "a/b"}, AdapterReference(AdapterSource.HUB, "a/b")),
        ({"adapter_id": "a/b", "adapter_source": "LOCAL"},
         AdapterReference(AdapterSource.LOCAL, "a/b")),
        ({"adapter_id": "a/b@v1"}, AdapterReference(AdapterSource.HUB, "a/b", "v1")),
    ):  # fmt: skip
        post(http, max_new_tokens=1, **given)
        assert driver.requests[-1].adapter == expected


def test_a_token_in_the_body_replaces_the_header(http: httpx.Client, driver: FakeDriver) -> None:
    headers = {"authorization": "Bearer hf_header"}
    for parameters, expected in (({}, "hf_header"), ({"api_token": "hf_body"}, "hf_body")):
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1, **parameters}}
        http.post("/generate", json=body, headers=headers)
        assert driver.requests[-1].api_token == expected
