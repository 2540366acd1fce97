"""POST /v1/responses: items in, items out, the same whole and streamed."""

import json
from typing import Any

import httpx
import openai
import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import spoken
from tests.deployments.ingress.openai.openai_http import post, refused
from tests.fakes import FakeDriver, Unreliable

pytestmark = pytest.mark.usefixtures("room_for_tools")

PATH = "/v1/responses"
CALL = {"name": "get_weather", "arguments": {"town": "Paris"}}
HERMES = f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TOOLS = [{"type": "function", "name": "get_weather", "strict": True, "parameters": {
    "type": "object", "properties": {"town": {"type": "string"}}, "required": ["town"],
    "additionalProperties": False}}]  # fmt: skip
FORMAT = {"type": "json_schema", "name": "x", "strict": True,
          "schema": {"type": "object", "properties": {"a": {"type": "integer"}}}}  # fmt: skip


def events_of(http: httpx.Client, **body: object) -> list[dict[str, Any]]:
    """All events of a stream, checked to have their type as name and a rising number."""
    reply = http.post(PATH, json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 200, reply.text
    *blocks, nothing = reply.text.split("\n\n")
    assert nothing == ""
    events = []
    for number, block in enumerate(blocks):
        name, data = block.split("\n")
        event = json.loads(data.removeprefix("data: "))
        assert name == f"event: {event['type']}"
        assert event["sequence_number"] == number
        events.append(event)
    return events


def plain(value: Any) -> Any:
    """A response without what is new each time."""
    if isinstance(value, list):
        return [plain(one) for one in value]
    if isinstance(value, dict):
        fresh = ("id", "call_id", "created_at", "item_id")
        return {name: plain(one) for name, one in value.items() if name not in fresh}
    return value


def rebuilt(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The output as a client puts it together from deltas, checked against what is done."""
    items: list[dict[str, Any]] = []
    for event in events:
        kind = event["type"].removeprefix("response.")
        if kind == "output_item.added":
            assert event["output_index"] == len(items)
            items.append(event["item"])
        elif kind == "content_part.added":
            items[event["output_index"]]["content"].append(event["part"])
        elif kind == "output_text.delta":
            part = items[event["output_index"]]["content"][event["content_index"]]
            part["text"] += event["delta"]
            part["logprobs"] += event["logprobs"]
        elif kind == "function_call_arguments.delta":
            items[event["output_index"]]["arguments"] += event["delta"]
        elif kind == "output_item.done":
            item = items[event["output_index"]]
            assert {**item, "status": event["item"]["status"]} == event["item"]
            items[event["output_index"]] = event["item"]
        if "item_id" in event:
            assert event["item_id"] == items[event["output_index"]]["id"]
    return items


def both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The response to a request, the same whole and streamed."""
    whole = post(http, PATH, **body)
    events = events_of(http, **body)
    assert [event["type"] for event in events[:2]] == ["response.created", "response.in_progress"]
    assert events[0]["response"]["status"] == "in_progress"
    last = events[-1]
    assert last["type"] == f"response.{whole['status']}"
    assert plain(last["response"]) == plain(whole)
    assert rebuilt(events) == last["response"]["output"]
    return whole


def test_text(http: httpx.Client, driver: FakeDriver) -> None:
    for link in (driver.link, Unreliable()):
        driver.link = link
        got = both(http, input="hello", temperature=0, max_output_tokens=40, instructions="Rhyme.")
        assert got["object"] == "response"
        assert (got["status"], got["incomplete_details"]) == (
            "incomplete", {"reason": "max_output_tokens"},
        )  # fmt: skip
        [item] = got["output"]
        assert (item["type"], item["role"], item["status"]) == (
            "message",
            "assistant",
            "incomplete",
        )
        assert [part["text"] for part in item["content"]] == [spoken(driver)]
        assert got["usage"]["output_tokens"] == 40
        assert got["usage"]["total_tokens"] == got["usage"]["input_tokens"] + 40
        assert (got["store"], got["instructions"], got["temperature"]) == (False, "Rhyme.", 0)
    ids = driver.requests[-1].sequences[0].prompt
    prompt = driver.tokenizer.decode(ids, skip_special_tokens=False)
    assert prompt == "<s><|system|>Rhyme.</s>\n<|user|>hello</s>\n<|assistant|>"
    driver.replies[None] = "short"
    got = both(http, input="hello", extra="ignored", user="me", store=True, top_logprobs=0)
    assert (got["status"], got["store"]) == ("completed", False)
    driver.replies[None] = ""
    assert both(http, input="hello")["output"][0]["content"][0]["text"] == ""


def test_calls(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    got = both(http, input="hello", tools=TOOLS)
    message, called = got["output"]
    assert message["content"][0]["text"] == "Let me see."
    assert (called["type"], called["name"]) == ("function_call", "get_weather")
    assert json.loads(called["arguments"]) == {"town": "Paris"}
    assert called["call_id"] != called["id"]
    assert called["status"] == "completed"
    cut = both(http, input="hello", tools=TOOLS, stop=["Par"])
    assert (cut["status"], cut["output"][-1]["status"]) == ("completed", "incomplete")
    assert got["tools"] == TOOLS
    driver.replies[None] = json.dumps([CALL])
    for choice in ("required", {"type": "function", "name": "get_weather"},
                   {"type": "allowed_tools", "mode": "required",
                    "tools": [{"type": "function", "name": "get_weather"}]}):  # fmt: skip
        [called] = both(http, input="hello", tools=TOOLS, tool_choice=choice)["output"]
        assert json.loads(called["arguments"]) == {"town": "Paris"}
        assert "%json" in driver.requests[-1].sequences[0].sampling.grammar


def test_a_conversation_goes_on(http: httpx.Client, driver: FakeDriver) -> None:
    """The output of a response is the input of the next one, in the right order."""
    driver.replies[None] = HERMES
    conversation: list[dict[str, Any]] = [{"role": "user", "content": [
        {"type": "input_text", "text": "a"}, {"type": "input_text", "text": "b"}]}]  # fmt: skip
    first = post(http, PATH, input=conversation, tools=TOOLS)
    conversation += first["output"]
    conversation += [{"type": "reasoning", "id": "rs_1", "summary": []}]
    conversation += [{"type": "function_call_output", "call_id": first["output"][1]["call_id"],
               "output": "rain"}, {"role": "developer", "content": "hurry"}]  # fmt: skip
    both(http, input=conversation)
    ids = driver.requests[-1].sequences[0].prompt
    assert driver.tokenizer.decode(ids, skip_special_tokens=False) == (
        "<s><|user|>a\nb</s>\n"
        f"<|assistant|>Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call></s>\n"
        "<|user|><tool_response>\nrain\n</tool_response></s>\n<|system|>hurry</s>\n<|assistant|>"
    )


def test_formats_and_other_fields(http: httpx.Client, driver: FakeDriver) -> None:
    got = both(http, input="a", text={"format": FORMAT}, seed=5, top_k=3, top_p=0.5, stop=["q"])
    sampling = driver.requests[-1].sequences[0].sampling
    assert json.loads(sampling.json_schema)["properties"] == {"a": {"type": "integer"}}
    assert (sampling.seed, sampling.top_k, sampling.top_p) == (5, 3, 0.5)
    assert got["text"] == {"format": FORMAT}
    both(http, input="a", text={"format": {"type": "text"}}, max_output_tokens=3, temperature=0)
    assert driver.requests[-1].sequences[0].sampling.json_schema == ""


def test_logprobs(http: httpx.Client, driver: FakeDriver) -> None:
    include = ["message.output_text.logprobs"]
    body: dict[str, Any] = {"input": "a", "include": include, "max_output_tokens": 30}
    got = both(http, **body, top_logprobs=2, temperature=0)
    part = got["output"][0]["content"][0]
    assert len(part["logprobs"]) == 30
    joined = b"".join(bytes(entry["bytes"]) for entry in part["logprobs"])
    assert joined.decode("utf-8", "replace") == part["text"]
    assert all(len(entry["top_logprobs"]) == 2 for entry in part["logprobs"])


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_id", "not stored"),
        ({"conversation": "conv_1"}, "conversation", "not stored"),
        ({"background": True}, "background", "fetch a response later"),
        ({"truncation": "auto"}, "truncation", "shorten the input"),
        ({"n": 2}, "n", "one answer"),
        ({"include": ["file_search_call.results"]}, "include", "cannot be included"),
        ({"input": []}, "input", "cannot be empty"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input", "item_reference"),
        ({"input": [{"content": "x"}]}, "input", "needs a `role`"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input", "only text"),
        ({"input": "x " * 3000}, "input", "Please reduce the length of the messages"),
        ({"max_output_tokens": 4000}, "input", "maximum context length"),
        ({"max_output_tokens": 0}, "max_output_tokens", "greater than"),
        ({"tools": [{"type": "web_search"}]}, "tools", "only functions"),
        ({"tools": [{"type": "function", "name": "a b"}]}, "tools.0.function.name", "pattern"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"text": {"format": {"type": "json_schema"}}}, "text.format", "needs a schema"),
        ({"text": {"format": {"type": "strange"}}}, "text.format.type", "Input should be"),
        ({"top_logprobs": 2}, "top_logprobs", "`message.output_text.logprobs` in `include`"),
        ({"suffix": "x"}, "suffix", "not supported"),
        ({"tools": TOOLS, "include": ["message.output_text.logprobs"]}, "include", "combined"),
        ({"stop": 5}, "stop", "valid string or a valid list"),
    ],
)
def test_what_is_refused(
    http: httpx.Client, driver: FakeDriver, extra: dict[str, Any], param: str, words: str
) -> None:
    error = refused(http, PATH, 400, **{"input": "a", **extra})
    assert error["param"] == param
    assert words in error["message"]
    assert driver.requests == []


def test_failures(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.GENERATION, "it broke")
    assert refused(http, PATH, 500, input="a")["message"] == "it broke"
    driver.fail_after = 20
    *events, last = events_of(http, input="a")
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"] == {"code": "server_error", "message": "it broke"}
    assert any(event["type"] == "response.output_text.delta" for event in events)
    missing = refused(http, PATH, 400, input=None)
    assert missing["type"] == "invalid_request_error"


def test_openais_client(client: openai.OpenAI, driver: FakeDriver) -> None:
    whole = client.responses.create(model="tiny", input="hello", temperature=0, max_output_tokens=9)
    assert whole.output_text == spoken(driver)
    assert whole.usage is not None
    assert whole.usage.output_tokens == 9
    driver.replies[None] = HERMES
    tools: Any = TOOLS
    with client.responses.stream(model="tiny", input="hello", tools=tools) as stream:
        kinds = [event.type for event in stream]
        final = stream.get_final_response()
    assert final.output_text == "Let me see."
    assert [item.type for item in final.output] == ["message", "function_call"]
    assert kinds[0] == "response.created"
    assert kinds[-1] == "response.completed"
    assert "response.function_call_arguments.delta" in kinds
    again: Any = [{"role": "user", "content": "hello"}, *final.output]
    driver.replies[None] = "done"
    assert client.responses.create(model="tiny", input=again).output_text == "done"
    with pytest.raises(openai.BadRequestError, match="not stored"):
        client.responses.create(model="tiny", input="x", previous_response_id="resp_1")


def test_half_surrogate_pairs_break_nothing(http: httpx.Client) -> None:
    for field in (
        b'"tools": [{"type": "function", "name": "f", "x": "\\ud800"}]',
        b'"metadata": {"\\ud800": "x"}',
        b'"text": {"format": {"type": "text", "x": "\\ud800"}}',
        b'"tool_choice": {"type": "\\ud800"}',
        b'"instructions": "\\ud800"',
        b'"input": [{"role": "user", "content": "\\ud800"}]',
        b'"input": [{"type": "function_call", "name": "f", '
        b'"arguments": "{\\"a\\": \\"\\\\ud800\\"}"}]',
    ):
        body = b'{"model": "tiny", "input": "a", "max_output_tokens": 1, ' + field + b"}"
        reply = http.post(PATH, content=body, headers={"content-type": "application/json"})
        assert reply.status_code in (200, 400), (field, reply.text)
