"""Clients, unmodified, against the demo; docs/compatibility.md lists the routes that each calls."""

import asyncio
import importlib
import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import anthropic
import httpx
import lorax
import openai
import pytest
from pydantic import BaseModel, Field
from starlette.types import Receive, Scope, Send
from transformers import AutoModelForCausalLM, AutoTokenizer

from configs.batches import BatchesConfig
from configs.wire.adapters import AdapterSource
from deployments.ingress.generation.engine import IngressSettings
from scheduler import speculation
from tests.served import demo_app, demo_config, served

PAGE = Path(__file__).resolve().parents[3] / "docs/compatibility.md"
QUESTION = "What is the capital of France?"
ANSWER = "Arr! The capital of France be Paris, matey!"
CHAT: Any = [{"role": "user", "content": QUESTION}]
SHORT: dict[str, Any] = {"model": "pirate", "temperature": 0, "max_tokens": 60}


class Town(BaseModel):
    """What structured answers are."""

    country: Literal["France", "Spain"]
    people: int = Field(ge=1, le=9)


class Recorder:
    """The demo's application, and the routes that were called."""

    def __init__(self, folder: Path) -> None:
        settings = IngressSettings(
            default_source=AdapterSource.LOCAL,
            loopback=True,
            batches=BatchesConfig(storage=str(folder)),
        )
        config = demo_config(speculation={"kind": "prompt_lookup"})
        self.app = demo_app(config, settings)
        self.called: set[str] = set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            self.called.add(f"{scope['method']} {scope['path']}")
        await self.app(scope, receive, send)


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def url(recorder: Recorder) -> Iterator[str]:
    with served(recorder) as url:  # type: ignore[arg-type]
        yield url


@pytest.fixture(scope="module")
def document(url: str) -> set[str]:
    """All routes, as "METHOD /path"."""
    paths = httpx.get(f"{url}/openapi.json", timeout=300).json()["paths"]
    return {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}


def test_guessed_tokens_are_the_models_and_are_marked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The prompt repeats itself, and so does the answer."""
    # Whether drafts pay is measured, beside whatever else this machine does.
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    prompt = "What is your name? What is your name? What is"
    model: Any = AutoModelForCausalLM.from_pretrained("configs/demo/model", dtype="float32")
    tokenizer = AutoTokenizer.from_pretrained("configs/demo/model")
    inputs = tokenizer(prompt, return_tensors="pt")
    model.generation_config.eos_token_id = None
    own = model.generate(**inputs, max_new_tokens=40, do_sample=False)
    expected = own[0, inputs["input_ids"].shape[1] :].tolist()
    parameters = {"max_new_tokens": 40, "details": True, "ignore_eos_token": True}
    body = {"inputs": prompt, "parameters": parameters}
    whole = httpx.post(f"{url}/generate", json=body, timeout=300)
    details = whole.json()["details"]
    assert [token["id"] for token in details["tokens"]] == expected
    marks = [token["skipped"] for token in details["tokens"]]
    assert details["skipped_tokens"] == sum(marks) > 5
    assert whole.headers["x-skipped-tokens"] == str(sum(marks))
    lines = httpx.post(f"{url}/generate_stream", json=body, timeout=300).text.splitlines()
    events = [json.loads(line.removeprefix("data:")) for line in lines if line]
    assert [event["token"]["id"] for event in events] == expected, "one event a token"
    assert events[-1]["details"]["skipped_tokens"] == sum(e["token"]["skipped"] for e in events) > 5
    assert "prompt_lookup" in httpx.get(f"{url}/info").json()["chosen"]["speculation"]


def _table() -> dict[str, dict[str, str]]:
    """The cells by route and client."""
    part = PAGE.read_text("utf-8").partition("\n## Clients\n")[2].partition("\n## ")[0]
    lines = part[part.index("|") :].partition("\n\n")[0].splitlines()
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    head, _, *body = rows
    routes = {re.sub("`", "", row[0]): row[1:] for row in body}
    assert len(routes) == len(body)
    return {route: dict(zip(head[1:], cells, strict=True)) for route, cells in routes.items()}


def _openai(url: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        assert client.chat.completions.create(messages=CHAT, **SHORT).choices[0].message.content
        client.completions.create(prompt=QUESTION, **SHORT)
        response = client.responses.create(
            model="pirate", input=QUESTION, temperature=0, max_output_tokens=60
        )
        assert response.output_text == ANSWER
        client.embeddings.create(model="", input="a")
        first = client.models.list().data[0]
        assert client.models.retrieve(first.id) == first
        line = b'{"custom_id":"a","url":"/v1/completions","body":{"prompt":"a"}}'
        file = client.files.create(file=("in.jsonl", line), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/completions", completion_window="24h"
        )
        assert [each.id for each in client.batches.list()] == [batch.id]
        client.batches.retrieve(batch.id)
        client.batches.cancel(batch.id)
        assert [each.id for each in client.files.list()] == [file.id]
        client.files.retrieve(file.id)
        assert client.files.content(file.id).read() == line
        client.files.delete(file.id)


def _anthropic(url: str) -> None:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        with client.messages.stream(
            model="pirate", max_tokens=60, messages=CHAT, extra_body={"temperature": 0}
        ) as stream:
            assert "".join(stream.text_stream) == ANSWER
        assert client.messages.count_tokens(model="pirate", messages=CHAT).input_tokens
        assert [model.id for model in client.models.list()]
        client.models.retrieve("pirate")


def _lorax(url: str) -> None:
    client = lorax.Client(url, timeout=300)
    whole = client.generate(QUESTION, adapter_id="pirate", max_new_tokens=60)
    assert whole.generated_text == " " + ANSWER
    *_, last = client.generate_stream(QUESTION, adapter_id="pirate", max_new_tokens=60)
    assert last.generated_text == " " + ANSWER
    assert client.embed("a").embeddings


def _langchain_openai(url: str) -> None:
    library = importlib.import_module("langchain_openai")
    shared: dict[str, Any] = {"base_url": f"{url}/v1", "api_key": "none", "max_retries": 0}
    chat = library.ChatOpenAI(**SHORT, **shared)
    assert chat.invoke(QUESTION).content == ANSWER
    assert "".join(part.content for part in chat.stream(QUESTION)) == ANSWER
    assert isinstance(chat.with_structured_output(Town).invoke("Paris"), Town)
    items = library.ChatOpenAI(**SHORT, **shared, use_responses_api=True)
    assert items.invoke(QUESTION).text == ANSWER
    assert library.OpenAI(**SHORT, **shared).invoke(QUESTION) == " " + ANSWER
    vectors = library.OpenAIEmbeddings(model="", check_embedding_ctx_length=False, **shared)
    assert vectors.embed_query("a")


def _langchain_anthropic(url: str) -> None:
    library = importlib.import_module("langchain_anthropic")
    messages = importlib.import_module("langchain_core.messages")
    chat = library.ChatAnthropic(**SHORT, base_url=url, api_key="none", max_retries=0)
    assert chat.invoke(QUESTION).content == ANSWER
    assert chat.get_num_tokens_from_messages([messages.HumanMessage(QUESTION)]) > 0
    assert isinstance(chat.with_structured_output(Town).invoke("Paris"), Town)


def _instructor(url: str) -> None:
    library = importlib.import_module("instructor")
    request = {"model": "loray-demo", "response_model": Town, "messages": CHAT, "max_tokens": 100}
    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
    made = library.from_openai(client).chat.completions.create(
        max_retries=0, temperature=0, **request
    )
    assert isinstance(made, Town)
    other = anthropic.Anthropic(base_url=url, api_key="none", max_retries=0)
    made = library.from_anthropic(other).messages.create(max_retries=0, **request)
    assert isinstance(made, Town)


def _agents(url: str) -> None:
    library = importlib.import_module("agents")
    library.set_tracing_disabled(True)

    async def ask() -> None:
        client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0)
        settings = library.ModelSettings(temperature=0, max_tokens=60)
        for kind in (library.OpenAIChatCompletionsModel, library.OpenAIResponsesModel):
            model = kind(model="pirate", openai_client=client)
            agent = library.Agent(name="A", model=model, model_settings=settings)
            assert (await library.Runner.run(agent, QUESTION)).final_output == ANSWER

    asyncio.run(ask())


CLIENTS: dict[str, tuple[str, Callable[[str], None]]] = {
    "openai": ("openai", _openai),
    "anthropic": ("anthropic", _anthropic),
    "lorax-client": ("lorax", _lorax),
    "langchain-openai": ("langchain_openai", _langchain_openai),
    "langchain-anthropic": ("langchain_anthropic", _langchain_anthropic),
    "instructor": ("instructor", _instructor),
    "openai-agents": ("agents", _agents),
}


def test_the_table_has_every_route_and_every_client(document: set[str]) -> None:
    table = _table()
    assert set(table) == document
    for route, cells in table.items():
        assert list(cells) == list(CLIENTS), route
        assert set(cells.values()) <= {"yes", ""}, route


@pytest.mark.filterwarnings("ignore")  # The clients' own.
@pytest.mark.parametrize("client", CLIENTS)
def test_a_client_calls_the_routes_of_its_column(
    client: str, recorder: Recorder, url: str, document: set[str]
) -> None:
    package, run = CLIENTS[client]
    pytest.importorskip(package)
    recorder.called.clear()
    run(url)
    called = {_route(each, document) for each in recorder.called}
    assert called == {route for route, cells in _table().items() if cells[client] == "yes"}


def _route(called: str, document: set[str]) -> str:
    """The route of a call: the same path, or the one with a parameter that fits."""
    if called in document:
        return called
    patterns = ((route, re.sub(r"\{\w+\}", "[^/]+", route)) for route in document)
    return next((route for route, pattern in patterns if re.fullmatch(pattern, called)), called)
