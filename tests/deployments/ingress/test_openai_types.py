"""Every object and event of OpenAI's routes, by the models of OpenAI's own client."""

import json
from typing import Any

import httpx
import pytest
from anthropic.types import ModelInfo
from openai.types import (
    Completion,
    CompletionUsage,
    CreateEmbeddingResponse,
    Embedding,
    ErrorObject,
    Model,
)
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO
from tests.fakes import FakeDriver, Unreliable
from tests.sweeps import swept

pytestmark = pytest.mark.usefixtures("room_for_tools")

RESPONSES = "/v1/responses"
CALL = {"name": "get_weather", "arguments": {"town": "Paris"}}
CALLS = f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
FUNCTION = {"name": "get_weather", "parameters": {"type": "object", "properties": {}}}
TOOLS = [{"type": "function", "function": FUNCTION}]
FLAT = [{"type": "function", **FUNCTION, "strict": True}, {"type": "function", "name": "f"}]
FORMAT = {"type": "json_schema", "name": "x", "schema": {"type": "object"}}

WHOLE: dict[str, type[BaseModel]] = {
    COMPLETIONS: Completion, CHAT: ChatCompletion, RESPONSES: Response,
}  # fmt: skip
EVENTS: dict[str, TypeAdapter[Any]] = {
    COMPLETIONS: TypeAdapter(Completion), CHAT: TypeAdapter(ChatCompletionChunk),
    RESPONSES: TypeAdapter(ResponseStreamEvent),
}  # fmt: skip

CASES: list[tuple[str, dict[str, Any]]] = [
    (COMPLETIONS, {"prompt": "a", "max_tokens": 5}),
    (COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "logprobs": 2, "echo": True, "max_tokens": 3}),
    (COMPLETIONS, {"prompt": "a", "stop": "END", "stream_options": {"include_usage": True}}),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 2, "prompt_logprobs": 1}),
    (CHAT, {"messages": HELLO, "max_tokens": 5}),
    (CHAT, {"messages": HELLO, "n": 2, "logprobs": True, "top_logprobs": 2, "max_tokens": 5}),
    (CHAT, {"messages": HELLO, "stop": "END", "stream_options": {"include_usage": True}}),
    (CHAT, {"messages": HELLO, "tools": TOOLS}),
    (CHAT, {"messages": HELLO, "tools": TOOLS, "logprobs": True}),
    (CHAT, {"messages": HELLO, "tools": TOOLS, "max_tokens": 20}),
    (CHAT, {"messages": HELLO, "functions": [FUNCTION]}),
    (RESPONSES, {"input": "a", "max_output_tokens": 5}),
    (RESPONSES, {"input": "a"}),
    (RESPONSES, {"input": "a", "instructions": "b", "metadata": {"a": "b"}, "temperature": 0}),
    (RESPONSES, {"input": "a", "tools": FLAT}),
    (RESPONSES, {"input": "a", "tools": FLAT, "tool_choice": "get_weather"}),
    (RESPONSES, {"input": "a", "tools": TOOLS, "tool_choice": {"type": "function", "function": {
        "name": "get_weather"}}}),
    (RESPONSES, {"input": "a", "tools": FLAT, "tool_choice": {
        "type": "function", "name": "get_weather"}}),
    (RESPONSES, {"input": "a", "tools": FLAT, "tool_choice": {
        "type": "allowed_tools", "mode": "auto",
        "tools": [{"type": "function", "name": "get_weather"}]}}),
    (RESPONSES, {"input": "a", "text": {"format": FORMAT, "verbosity": "medium"}}),
    (RESPONSES, {"input": "a", "text": {"format": {"type": "json_object"}}}),
    (RESPONSES, {"input": "a", "include": ["message.output_text.logprobs"], "top_logprobs": 2}),
    (RESPONSES, {"input": "a", "reasoning": {"effort": None, "summary": "auto"}, "store": True}),
]  # fmt: skip


def events(http: httpx.Client, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The data of all events of a stream, without the end mark."""
    reply = http.post(path, json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    lines = [line for line in reply.text.splitlines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def as_typed(reply: dict[str, Any]) -> dict[str, Any]:
    """A text_completion without the nulls that OpenAI sends too and its client's types leave out.

    They are those of a chunk's finish_reason, and of the logprobs of a prompt's first token.
    """
    for choice in reply["choices"] if reply.get("object") == "text_completion" else ():
        choice["finish_reason"] = choice["finish_reason"] or "stop"
        logprobs = choice["logprobs"]
        if logprobs is not None and logprobs["tokens"] and logprobs["token_logprobs"][0] is None:
            assert logprobs["top_logprobs"][0] is None
            logprobs["token_logprobs"][0], logprobs["top_logprobs"][0] = 0.0, {}
    return reply


@pytest.mark.parametrize("answer", swept([CALLS, "plain END text", ""], bool))
@pytest.mark.parametrize(("path", "body"), CASES)
def test_objects_and_events_are_the_clients_own(
    http: httpx.Client, driver: FakeDriver, path: str, body: dict[str, Any], answer: str
) -> None:
    driver.replies[None] = answer
    driver.link = Unreliable()
    plain = {name: value for name, value in body.items() if name != "stream_options"}
    whole = http.post(path, json={"model": "tiny", **plain})
    assert whole.status_code == 200, whole.text
    WHOLE[path].model_validate(as_typed(whole.json()))
    if body.get("prompt_logprobs") is not None or body.get("echo"):
        return
    for event in events(http, path, body):
        EVENTS[path].validate_python(as_typed(event))
        if event.get("usage"):
            CompletionUsage.model_validate(event["usage"])


def test_a_response_that_fails_ends_with_the_clients_event(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.fail_after = 3
    for kind in (ErrorKind.GENERATION, ErrorKind.OVERLOADED):
        driver.faults["bad"] = Failed(kind, "broken")
        logprobs = events(http, RESPONSES, {"model": "bad", "input": "a"})
        assert logprobs[-1]["type"] == "response.failed"
        for event in logprobs:
            EVENTS[RESPONSES].validate_python(event)


def test_models_embeddings_and_errors(http: httpx.Client) -> None:
    listing = http.get("/v1/models").json()
    assert (listing["first_id"], listing["last_id"]) == ("tiny", listing["data"][-1]["id"])
    for model in listing["data"]:
        Model.model_validate(model)
        ModelInfo.model_validate(model)
        Model.model_validate(http.get(f"/v1/models/{model['id']}").json())
    for form in ("float", "base64"):
        body = {"model": "tiny", "input": ["a", "b"], "encoding_format": form}
        reply = http.post("/v1/embeddings", json=body).json()
        if form == "float":
            CreateEmbeddingResponse.model_validate(reply)
        else:  # The client itself converts them to numbers.
            assert {*reply["data"][0]} == {*Embedding.model_fields}
    for path in (COMPLETIONS, CHAT, RESPONSES, "/v1/embeddings", "/v1/nowhere"):
        error = http.post(path, json={}).json()["error"]
        ErrorObject.model_validate(error)
