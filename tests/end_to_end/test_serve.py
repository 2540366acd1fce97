"""The demo through HTTP, word for word: curl's way, the OpenAI client, LoRAX's own client."""

import asyncio

import httpx
import openai
import pytest
from lorax import AsyncClient, Client

from deployments.observability.steps import StepRecord
from tests.end_to_end.clients import (
    MODELS,
    Answers,
    adapter_of,
    ask_driver,
    longest_questions,
    stream_text,
)
from tests.end_to_end.conftest import Served

QUESTION = "What is the capital of France?"
LONGEST = 160

pytestmark = pytest.mark.ray


def model_name(model: str) -> str:
    return "loray-demo" if model == "base" else model


@pytest.mark.parametrize("model", MODELS)
def test_generate(served: Served, answers: Answers, model: str) -> None:
    for question, expected in answers[model].items():
        body = {"inputs": question, "parameters": {"adapter_id": adapter_of(model)}}
        reply = httpx.post(f"{served.url}/generate", json=body, timeout=60)
        assert reply.status_code == 200, reply.text
        assert reply.json() == {"generated_text": expected["raw"]}


@pytest.mark.parametrize("model", MODELS)
def test_lorax_client(served: Served, answers: Answers, model: str) -> None:
    client = Client(served.url, timeout=60)
    expected = answers[model][QUESTION]["raw"]
    whole = client.generate(QUESTION, adapter_id=adapter_of(model), max_new_tokens=LONGEST)
    assert whole.generated_text == expected
    assert whole.details is not None
    assert "".join(token.text for token in whole.details.tokens if not token.special) == expected
    stream = list(
        client.generate_stream(QUESTION, adapter_id=adapter_of(model), max_new_tokens=LONGEST)
    )
    assert stream[-1].generated_text == expected
    assert "".join(part.token.text for part in stream if not part.token.special) == expected


def test_lorax_client_async(served: Served, answers: Answers) -> None:
    async def ask() -> list[str]:
        client = AsyncClient(served.url, timeout=60)
        replies = await asyncio.gather(
            *(client.generate(QUESTION, adapter_id=adapter_of(model)) for model in MODELS)
        )
        return [reply.generated_text for reply in replies]

    assert asyncio.run(ask()) == [answers[model][QUESTION]["raw"] for model in MODELS]


@pytest.mark.parametrize("model", MODELS)
def test_openai_client(served: Served, answers: Answers, model: str) -> None:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=60) as client:
        expected = answers[model][QUESTION]
        whole = client.completions.create(
            model=model_name(model), prompt=QUESTION, temperature=0, max_tokens=LONGEST
        )
        assert whole.choices[0].text == expected["raw"]
        assert whole.choices[0].finish_reason == "stop"
        chat = client.chat.completions.create(
            model=model_name(model),
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
        )
        assert chat.choices[0].message.content == expected["chat"]
        parts = client.chat.completions.create(
            model=model_name(model),
            messages=[{"role": "user", "content": QUESTION}],
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = list(parts)
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == expected["chat"]
        usage = chunks[-1].usage
        assert usage is not None
        assert usage.completion_tokens > 3


def test_models_info_health_tokenize(served: Served) -> None:
    listed = httpx.get(f"{served.url}/v1/models").json()
    assert {model["id"] for model in listed["data"]} == {"loray-demo", *MODELS[1:]}
    info = httpx.get(f"{served.url}/info").json()
    assert info["model_dtype"] == "float32"
    assert httpx.get(f"{served.url}/health").status_code == 200
    tokens = httpx.post(f"{served.url}/tokenize", json={"inputs": "Hello"}).json()
    assert "".join(token["text"] for token in tokens[1:]) == "Hello"


def test_bad_adapters_get_a_clear_4xx_in_both_dialects(served: Served) -> None:
    body = {"inputs": QUESTION, "parameters": {"adapter_id": "nobody"}}
    native = httpx.post(f"{served.url}/generate_stream", json=body)
    assert native.status_code == 424
    assert native.json()["error_type"] == "generation"
    assert native.json()["code"] == "adapter_not_found"
    for stream in (False, True):
        asked = {"model": "../../model", "prompt": "Hi", "stream": stream}
        reply = httpx.post(f"{served.url}/v1/completions", json=asked)
        assert reply.status_code == 404
        assert "was not found" in reply.json()["error"]["message"]


def test_64_streams_over_four_adapters_share_steps(served: Served, answers: Answers) -> None:
    """Each gets the answer that it gets alone, and the log shows that they ran together."""
    questions = longest_questions(answers, 4)
    asked = [(MODELS[i % 5], questions[i % len(questions)]) for i in range(64)]

    async def ask_all() -> list[str]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(timeout=120, limits=limits) as client:
            return await asyncio.gather(
                *(stream_text(client, served.url, model, q) for model, q in asked)
            )

    told = asyncio.run(ask_all())
    assert told == [answers[model][question]["raw"] for model, question in asked]
    records: list[StepRecord] = ask_driver(served, "steps")
    log = [record for record in records if record.num_sampled > 1]
    mean = sum(record.num_sampled for record in log) / len(log)
    assert mean >= 16, f"mean batch {mean:.1f} over {len(log)} steps"
    assert max(record.num_adapters for record in log) >= 3
