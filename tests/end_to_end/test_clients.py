"""The demo's exact answers through the clients of OpenAI, Anthropic and LoRAX."""

import asyncio
import json
from typing import Any

import anthropic
import httpx
import openai
import pytest
from lorax import AsyncClient, Client
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample

from tests.end_to_end.clients import MODELS, Answers, adapter_of, wait_for
from tests.end_to_end.serving import PATIENCE_SECONDS, Served
from tests.sweeps import swept

QUESTION = "What is the capital of France?"
LONGEST = 160
FEW = ("base", "pirate")
"""`test_serve.py` asks all of them."""

pytestmark = pytest.mark.ray


def openai_client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", timeout=PATIENCE_SECONDS)


def model_name(model: str) -> str:
    return "loray-demo" if model == "base" else model


@pytest.mark.parametrize("model", swept(MODELS, lambda model: model in FEW))
def test_lorax_client(served: Served, answers: Answers, model: str) -> None:
    client = Client(served.url, timeout=PATIENCE_SECONDS)
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
        client = AsyncClient(served.url, timeout=PATIENCE_SECONDS)
        replies = await asyncio.gather(
            *(client.generate(QUESTION, adapter_id=adapter_of(model)) for model in MODELS)
        )
        return [reply.generated_text for reply in replies]

    assert asyncio.run(ask()) == [answers[model][QUESTION]["raw"] for model in MODELS]


@pytest.mark.parametrize("model", swept(MODELS, lambda model: model in FEW))
def test_openai_client(served: Served, answers: Answers, model: str) -> None:
    with openai_client(served) as client:
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


@pytest.mark.parametrize("model", swept(MODELS, lambda model: model in FEW))
def test_openai_client_scores_and_embeds(served: Served, answers: Answers, model: str) -> None:
    """Each model finds its own answer the likeliest, token by token, and no other's."""
    name = model_name(model)
    with openai_client(served) as client:
        text = QUESTION + answers[model][QUESTION]["raw"]
        body: Any = {"prompt": text, "echo": True, "logprobs": 1, "max_tokens": 0}
        (choice,) = client.completions.create(model=name, **body).choices
        reply = choice.logprobs
        assert choice.text == text
        assert reply is not None
        columns = (reply.text_offset or [], reply.token_logprobs or [], reply.top_logprobs or [])
        own = [(value, top) for at, value, top in zip(*columns, strict=True) if at >= len(QUESTION)]
        assert len(own) > 3
        assert all(value == max(top.values()) for value, top in own)
        vectors = [
            client.embeddings.create(model=each, input=QUESTION).data[0].embedding
            for each in (name, name, model_name(next(one for one in MODELS if one != model)))
        ]
        assert vectors[0] == vectors[1] != vectors[2]
        assert sum(value * value for value in vectors[0]) == pytest.approx(1, abs=1e-5)


UNITS = {"type": "object", "properties": {"unit": {"enum": ["celsius", "kelvin"]}},
         "required": ["unit"]}  # fmt: skip


def test_openai_client_tools(served: Served) -> None:
    """The demo knows no tools; a call that is required fits its function all the same."""
    messages: Any = [{"role": "user", "content": QUESTION}]
    tools: Any = [{"type": "function", "function": {"name": "measure", "parameters": UNITS}}]
    body: Any = {"model": "loray-demo", "messages": messages, "tools": tools, "temperature": 0,
                  "tool_choice": "required", "parallel_tool_calls": False}  # fmt: skip
    with openai_client(served) as client:
        choice = client.chat.completions.create(**body).choices[0]
        assert choice.finish_reason == "tool_calls"
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name == "measure"
        assert json.loads(call.function.arguments)["unit"] in ("celsius", "kelvin")
        with client.chat.completions.stream(**body) as events:
            done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
        assert [event.arguments for event in done] == [call.function.arguments]


@pytest.mark.parametrize("model", swept(MODELS, lambda model: model in FEW))
def test_openai_client_responses(served: Served, answers: Answers, model: str) -> None:
    with openai_client(served) as client:
        body: Any = {"model": model_name(model), "input": QUESTION, "temperature": 0}
        expected = answers[model][QUESTION]["chat"]
        assert client.responses.create(**body).output_text == expected
        with client.responses.stream(**body) as events:
            text = "".join(e.delta for e in events if e.type == "response.output_text.delta")
            assert events.get_final_response().output_text == text == expected


def test_openai_client_choices(served: Served) -> None:
    with openai_client(served) as client:
        for body in ({"guided_choice": ["north", "south"]},
                     {"structured_outputs": {"regex": "(nor|sou)th"}}):  # fmt: skip
            reply = client.completions.create(
                model="loray-demo", prompt=QUESTION, max_tokens=20, temperature=0, extra_body=body
            )
            assert reply.choices[0].text in ("north", "south")
            assert reply.choices[0].finish_reason == "stop"


@pytest.mark.parametrize("model", swept(MODELS, lambda model: model in FEW))
def test_anthropics_client(served: Served, answers: Answers, model: str) -> None:
    expected = answers[model][QUESTION]["chat"]
    client = anthropic.Anthropic(base_url=served.url, api_key="none", timeout=PATIENCE_SECONDS)
    with (
        client,
        client.messages.stream(
            model=model_name(model),
            max_tokens=LONGEST,
            messages=[{"role": "user", "content": QUESTION}],
            extra_body={"temperature": 0},
        ) as stream,
    ):
        assert "".join(stream.text_stream) == expected
        assert stream.get_final_message().stop_reason == "end_turn"


def test_a_batch_answers_as_the_routes_do(served: Served, answers: Answers) -> None:
    lines = [
        {"custom_id": model, "method": "POST", "url": "/v1/chat/completions", "body": {
            "model": model_name(model), "max_tokens": LONGEST, "temperature": 0,
            "messages": [{"role": "user", "content": QUESTION}]}}
        for model in MODELS
    ]  # fmt: skip
    text = "\n".join(map(json.dumps, lines)).encode()
    with openai_client(served) as client:
        file = client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        wait_for(lambda: client.batches.retrieve(batch.id).status == "completed")
        output = client.batches.retrieve(batch.id).output_file_id
        assert output is not None
        results = [json.loads(line) for line in client.files.content(output).text.splitlines()]
    found = {
        each["custom_id"]: each["response"]["body"]["choices"][0]["message"]["content"]
        for each in results
    }
    assert found == {model: answers[model][QUESTION]["chat"] for model in MODELS}


def test_gateways_read_load_and_adapters(served: Served) -> None:
    """Through the front, an ingress and the driver's handle, by vLLM's names."""

    def found() -> dict[str, Sample]:
        text = httpx.get(f"{served.url}/metrics", timeout=PATIENCE_SECONDS).text
        families = text_string_to_metric_families(text)
        return {family.name: family.samples[0] for family in families if family.samples}

    def is_there() -> bool:
        labels = found()["vllm:lora_requests_info"].labels
        return "pirate" in labels["running_lora_adapters"].split(",")

    body = {"inputs": QUESTION, "parameters": {"adapter_id": "pirate"}}
    httpx.post(f"{served.url}/generate", json=body, timeout=PATIENCE_SECONDS)
    wait_for(is_there)  # a look at the drivers is used again for a moment
    assert found()["vllm:num_requests_waiting"].value == 0
    assert found()["vllm:cache_config_info"].labels["num_gpu_blocks"] == "2048"
