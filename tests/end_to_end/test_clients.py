"""The demo word for word through clients as users have them: OpenAI's and LoRAX's own."""

import asyncio

import openai
import pytest
from lorax import AsyncClient, Client

from tests.end_to_end.clients import MODELS, Answers, adapter_of
from tests.end_to_end.conftest import Served

QUESTION = "What is the capital of France?"
LONGEST = 160

pytestmark = pytest.mark.ray


def model_name(model: str) -> str:
    return "loray-demo" if model == "base" else model


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
