"""The OpenAI client, unmodified, against a real server."""

import openai
import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import spoken
from tests.fakes import FakeDriver, Unreliable


def test_completions(client: openai.OpenAI, driver: FakeDriver) -> None:
    reply = client.completions.create(
        model="org/pirate", prompt=["a", "b"], max_tokens=20, logprobs=1, seed=3
    )
    assert [choice.text for choice in reply.choices] == [spoken(driver, 0), spoken(driver, 1)]
    assert reply.choices[1].index == 1
    assert reply.usage is not None
    assert reply.usage.completion_tokens == 40
    assert reply.choices[0].logprobs is not None
    assert len(reply.choices[0].logprobs.tokens or []) == 20


def test_completions_stream(client: openai.OpenAI, driver: FakeDriver) -> None:
    driver.link = Unreliable()
    stream = client.completions.create(model="tiny", prompt="a", max_tokens=30, stream=True)
    chunks = list(stream)
    assert "".join(chunk.choices[0].text for chunk in chunks) == spoken(driver)
    assert chunks[-1].choices[0].finish_reason == "length"


def test_chat(client: openai.OpenAI, driver: FakeDriver) -> None:
    driver.replies["poet"] = "a rose is a rose"
    reply = client.chat.completions.create(
        model="local:poet",
        messages=[
            {"role": "developer", "content": "rhyme"},
            {"role": "user", "content": [{"type": "text", "text": "go"}]},
        ],
        logprobs=True,
        top_logprobs=2,
    )
    assert reply.choices[0].message.content == "a rose is a rose"
    assert reply.choices[0].finish_reason == "stop"
    assert reply.usage is not None
    assert reply.usage.prompt_tokens_details is not None
    assert reply.usage.prompt_tokens_details.cached_tokens == 4
    assert reply.choices[0].logprobs is not None
    content = reply.choices[0].logprobs.content or []
    assert content[-1].token == "</s>"
    assert len(content[0].top_logprobs) == 2


def test_chat_stream(client: openai.OpenAI, driver: FakeDriver) -> None:
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "hello"}],
            max_completion_tokens=25,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    text = "".join(c.delta.content or "" for chunk in chunks for c in chunk.choices)
    assert text == spoken(driver)
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 25


def test_sampling_parameters(client: openai.OpenAI, driver: FakeDriver) -> None:
    reply = client.completions.create(
        model="tiny", prompt="hello", n=2, best_of=3, presence_penalty=0.5, max_tokens=9,
        frequency_penalty=-1, logit_bias={"7": -100}, extra_body={"min_p": 0.1, "min_tokens": 4},
    )  # fmt: skip
    assert len(reply.choices) == 2
    sampling = driver.requests[-1].sequences[2].sampling
    assert (sampling.presence_penalty, sampling.frequency_penalty) == (0.5, -1.0)
    assert (sampling.logit_bias, sampling.min_p) == (((7, -100.0),), 0.1)
    assert sampling.masked_tokens == 4
    client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hello"}],
        presence_penalty=0.5,
        logit_bias={"7": 1},
        extra_body={"repetition_penalty": 1.1, "top_k": 4, "ignore_eos_token": True},
    )
    sampling = driver.requests[-1].sequences[0].sampling
    assert (sampling.repetition_penalty, sampling.top_k) == (1.1, 4)


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny", "org/pirate", "local:poet"]
    assert client.models.retrieve("org/pirate").id == "org/pirate"


def test_errors_are_the_clients_own(client: openai.OpenAI, driver: FakeDriver) -> None:
    driver.faults["bad"] = Failed(ErrorKind.ADAPTER_NOT_FOUND, "no such adapter")
    driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full")
    with pytest.raises(openai.NotFoundError, match="no such adapter") as missing:
        client.completions.create(model="bad", prompt="a", stream=True)
    assert missing.value.code == "model_not_found"
    with pytest.raises(openai.RateLimitError):
        client.completions.create(model="tiny", prompt="a")
    with pytest.raises(openai.BadRequestError, match="not supported"):
        client.completions.create(model="tiny", prompt="a", suffix="b")


def test_a_failure_in_a_stream_raises(client: openai.OpenAI, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.GENERATION, "the ranks are gone")
    driver.fail_after = 4
    stream = client.completions.create(model="tiny", prompt="a", stream=True)
    with pytest.raises(openai.APIError, match="the ranks are gone"):
        list(stream)
