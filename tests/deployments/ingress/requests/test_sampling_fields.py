"""Every sampling field, from both dialects to the driver's request."""

from typing import Any

import httpx
import msgspec
import pytest

from configs.wire.sampling import Sampling
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post
from tests.fakes import EOS, FakeDriver, token_id

PENALTIES = {"repetition_penalty": 1.2, "frequency_penalty": -0.5, "presence_penalty": 1.5}


def last(driver: FakeDriver) -> Sampling:
    return driver.requests[-1].sequences[0].sampling


def recommend(driver: FakeDriver, **defaults: float) -> None:
    driver.info = msgspec.structs.replace(driver.info, sampling_defaults=defaults)


def penalised(sampling: Sampling) -> Sampling:
    return msgspec.structs.replace(sampling, **PENALTIES)


def generate(http: httpx.Client, **parameters: object) -> dict[str, Any]:
    reply = http.post("/generate", json={"inputs": "the fox", "parameters": parameters})
    assert reply.status_code == 200, reply.text
    value: dict[str, Any] = reply.json()
    return value


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hello"}),
                                              (CHAT, {"messages": HELLO})])  # fmt: skip
class TestOpenAI:
    def test_fields_reach_the_driver(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        post(
            http, path, **prompt, **PENALTIES, min_p=0.1, typical_p=0.8, watermark=True,
            logit_bias={"5": -100, "7": 2.5}, seed=3,
        )  # fmt: skip
        assert last(driver) == penalised(Sampling(
            temperature=1.0, min_p=0.1, typical_p=0.8, watermark=True, seed=3,
            logit_bias=((5, -100.0), (7, 2.5)),
        ))  # fmt: skip

    def test_what_a_request_leaves_out_is_the_servers(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        recommend(driver, temperature=0.6, top_p=0.9, top_k=20, repetition_penalty=1.1)
        post(http, path, **prompt, seed=3)
        assert last(driver) == Sampling(
            temperature=0.6, top_k=20, top_p=0.9, repetition_penalty=1.1, seed=3
        )
        post(http, path, **prompt, seed=3, top_k=-1, top_p=1, repetition_penalty=1)
        assert last(driver) == Sampling(seed=3, temperature=0.6)
        post(http, path, **prompt, seed=3, temperature=0)
        assert last(driver) == Sampling(repetition_penalty=1.1, seed=3)

    def test_greedy_requests_keep_fields_that_change_logits(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        post(http, path, **prompt, **PENALTIES, temperature=0, min_p=0.1, typical_p=0.8, seed=0)
        assert last(driver) == penalised(Sampling())

    def test_stop_token_ids_join_the_models(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        eos = token_id(driver.tokenizer, EOS)
        fields = {**prompt, "stop_token_ids": [9, eos], "max_tokens": 4}
        post(http, path, **fields)
        assert driver.requests[-1].sequences[0].stopping.stop_token_ids == (eos, 9)
        assert last(driver).masked_ids == ()
        for spelling in ("ignore_eos", "ignore_eos_token"):
            post(http, path, **fields, **{spelling: True}, min_tokens=2)
            assert driver.requests[-1].sequences[0].stopping.stop_token_ids == (9, eos)
            assert last(driver).masked_ids == (9, eos)
        post(http, path, **prompt, ignore_eos_token=True, min_tokens=2)
        assert last(driver).masked_ids == ()

    def test_unknown_fields_are_ignored(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        post(http, path, **prompt, seed=1, verbose="x", guideline=None, something_new=3)
        assert last(driver) == Sampling(temperature=1.0, seed=1)


def test_loraxs_fields_reach_the_driver(http: httpx.Client, driver: FakeDriver) -> None:
    generate(http, **PENALTIES, typical_p=0.7, watermark=True, seed=4)
    drawn = Sampling(temperature=1.0, typical_p=0.7, watermark=True, seed=4)
    assert last(driver) == penalised(drawn)
    generate(http, **PENALTIES, seed=4)
    assert last(driver) == penalised(Sampling(seed=4))


def test_truncate_keeps_the_last_ids_before_lengths_are_checked(
    http: httpx.Client, driver: FakeDriver
) -> None:
    ids = driver.tokenizer.encode("the fox").ids
    generate(http, truncate=2, max_new_tokens=510)
    assert driver.requests[-1].sequences[0].prompt == ids[-2:]
    generate(http, truncate=500)
    assert driver.requests[-1].sequences[0].prompt == ids
    body = {"inputs": "x " * 900, "parameters": {"truncate": 7, "details": True}}
    details = http.post("/generate", json=body).json()["details"]
    assert details["prompt_tokens"] == 7


def test_alternatives(http: httpx.Client, driver: FakeDriver) -> None:
    fields = {"return_k_alternatives": 3, "details": True, "max_new_tokens": 6}
    tokens = generate(http, **fields)["details"]["tokens"]
    assert last(driver).logprobs == 3
    for token in tokens:
        own, *others = token["alternative_tokens"]
        assert (own["id"], own["logprob"]) == (token["id"], token["logprob"])
        assert [other["id"] for other in others] == [token["id"] + 1, token["id"] + 2]
        assert all(set(other) == {"id", "text", "logprob"} for other in others)
    body = {"inputs": "the fox", "parameters": fields}
    events = http.post("/generate_stream", json=body).text.split("\n\n")[:-1]
    assert all('"alternative_tokens":[{' in event for event in events)
    generate(http, return_k_alternatives=3)
    assert last(driver).logprobs == -1


def test_other_dialects_have_the_servers_sampling_by_their_own_rules(
    http: httpx.Client, driver: FakeDriver
) -> None:
    recommend(driver, temperature=0.6, top_p=0.9)
    reply = http.post("/v1/responses", json={"model": "tiny", "input": "hello", "top_p": 0.5})
    assert (reply.json()["temperature"], reply.json()["top_p"]) == (0.6, 0.5)
    assert (last(driver).temperature, last(driver).top_p) == (0.6, 0.5)
    messages = {"model": "tiny", "messages": HELLO, "max_tokens": 4}
    assert http.post("/v1/messages", json=messages).status_code == 200
    assert (last(driver).temperature, last(driver).top_p) == (0.6, 0.9)
    generate(http, max_new_tokens=4)
    assert last(driver).temperature == 0  # LoRAX's routes: greedy by themselves.
