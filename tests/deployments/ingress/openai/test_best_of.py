"""The best of several sequences, in both dialects."""

from typing import Any

import httpx
import pytest

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason
from deployments.contract import Finished, SequenceOutcome
from deployments.ingress.generation.choices import best_first, spread_seed
from tests.deployments.ingress.conftest import spoken
from tests.deployments.ingress.openai.openai_http import COMPLETIONS, post
from tests.fakes import FakeDriver, deaf, token_logprobs


def outcome(*logprobs: float) -> SequenceOutcome:
    reported = [TokenLogprobs(value, [], []) for value in logprobs]
    return SequenceOutcome([1] * len(reported), Finished(FinishReason.LENGTH), reported)


def mean(driver: FakeDriver, index: int) -> float:
    ids = driver.answer(driver.requests[-1].sequences[index], None)
    return sum(token_logprobs(id, 0).logprob for id in ids) / len(ids)


def test_the_order_is_by_mean_logprob_of_counted_tokens() -> None:
    outcomes = [outcome(-1, -1, -1), outcome(-2), outcome(-0.5, -9), outcome(-1)]
    assert best_first(outcomes, [3, 1, 2, 1]) == [0, 3, 1, 2]
    assert best_first(outcomes, [3, 1, 1, 1]) == [2, 0, 3, 1]


def test_seeds_are_spread() -> None:
    seeds = {spread_seed(seed, choice) for seed in range(100) for choice in range(16)}
    assert len(seeds) == 1600
    assert spread_seed(-1, 0) == 2**64 - 1


@pytest.mark.parametrize("parameters", [{"details": True}, {}, {"stop": ["END"], "details": True}])
def test_lorax_replies_with_the_best_and_the_others_in_details(
    http: httpx.Client, driver: FakeDriver, parameters: dict[str, Any]
) -> None:
    body = {"inputs": "hello", "parameters": {
        "best_of": 2, "do_sample": True, "max_new_tokens": 12, "return_full_text": True,
        **parameters,
    }}  # fmt: skip
    driver.link = deaf
    reply = http.post("/generate", json=body).json()
    sequences = driver.requests[-1].sequences
    assert len({sequence.sampling.seed for sequence in sequences}) == 2
    assert all(sequence.sampling.logprobs == 0 for sequence in sequences)
    if "stop" in parameters:
        return
    best = max(range(2), key=lambda index: mean(driver, index))
    assert reply["generated_text"] == "hello" + spoken(driver, best)
    if not parameters:
        assert set(reply) == {"generated_text"}
        return
    [other] = reply["details"]["best_of_sequences"]
    assert other["generated_text"] == "hello" + spoken(driver, 1 - best)
    assert reply["details"]["seed"] == sequences[best].sampling.seed
    assert other["seed"] == sequences[1 - best].sampling.seed
    assert [token["id"] for token in other["tokens"]] == driver.answer(sequences[1 - best], None)
    assert set(other) == {
        "generated_text", "finish_reason", "generated_tokens", "seed", "tokens", "prefill",
    }  # fmt: skip


def test_openai_has_the_best_of_each_prompt(http: httpx.Client, driver: FakeDriver) -> None:
    fields = {"prompt": ["fox", "dog"], "n": 2, "best_of": 5, "seed": 8, "max_tokens": 10}
    reply = post(http, COMPLETIONS, **fields)
    for prompt in range(2):
        own = range(5 * prompt, 5 * prompt + 5)
        ranked = sorted(own, key=lambda index: -mean(driver, index))
        shown = [choice["text"] for choice in reply["choices"][2 * prompt : 2 * prompt + 2]]
        assert shown == [spoken(driver, index) for index in ranked[:2]]
    assert [choice["index"] for choice in reply["choices"]] == [0, 1, 2, 3]
    assert all(choice["logprobs"] is None for choice in reply["choices"])
    assert reply["usage"]["completion_tokens"] == 100
    sequences = driver.requests[-1].sequences
    prompts = len(sequences[0].prompt) + len(sequences[5].prompt)
    assert reply["usage"]["prompt_tokens"] == prompts
    echoed = post(http, COMPLETIONS, **fields, echo=True)["choices"]
    assert [choice["text"][:3] for choice in echoed] == ["fox", "fox", "dog", "dog"]


def test_best_of_above_n_cannot_be_streamed(http: httpx.Client, driver: FakeDriver) -> None:
    body = {"model": "tiny", "prompt": "a", "best_of": 2, "stream": True}
    reply = http.post(COMPLETIONS, json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, "best_of")
    assert http.post(COMPLETIONS, json={**body, "n": 2}).status_code == 200
    assert len(driver.requests[-1].sequences) == 2
