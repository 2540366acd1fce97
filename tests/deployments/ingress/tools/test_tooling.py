"""Chats with tools: the prompt, the constraint, and the reply."""

import json
from typing import Any

import httpx
import openai
import pytest

from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, refused, stream
from tests.deployments.ingress.tools.tool_chats import (
    CALL,
    HERMES,
    TIME,
    TOOLS,
    TWO,
    WEATHER,
    allowed,
    both,
    joined,
    prompt_of,
)
from tests.fakes import FakeDriver

pytestmark = pytest.mark.usefixtures("room_for_tools")


def test_calls_come_back(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = TWO
    got = both(http, tools=TOOLS)
    assert (got["content"], got["reason"]) == ("Let me see.", "tool_calls")
    assert [(call["name"], json.loads(call["arguments"])) for call in got["calls"]] == [
        ("get_weather", {"town": "Paris"}), ("get_time", {}),
    ]  # fmt: skip
    [choice] = post(http, CHAT, messages=HELLO, tools=TOOLS)["choices"]
    first, second = (call["id"] for call in choice["message"]["tool_calls"])
    assert first != second
    assert first[:5] == second[:5] == "call_"
    assert len(both(http, tools=TOOLS, parallel_tool_calls=False)["calls"]) == 1


@pytest.mark.parametrize("more", ["", TWO.removeprefix(HERMES)])
def test_an_answer_ends_with_the_only_call_that_it_may_have(
    http: httpx.Client, driver: FakeDriver, more: str
) -> None:
    driver.replies[None] = HERMES + more + " and more" * 9
    body = {"tools": TOOLS, "parallel_tool_calls": False}
    got = both(http, **body)
    assert (got["content"], got["reason"]) == ("Let me see.", "tool_calls")
    assert [call["name"] for call in got["calls"]] == ["get_weather"]
    text = HERMES.removesuffix("\n</tool_call>")
    length = len(driver.tokenizer.encode(text, add_special_tokens=False).ids)
    driver.finishes.clear()
    sent = post(http, CHAT, messages=HELLO, n=2, logprobs=True, **body)
    assert sent["usage"]["completion_tokens"] == 2 * length
    assert [len(one["logprobs"]["content"]) for one in sent["choices"]] == [length] * 2
    assert sorted(driver.finishes) == [(0, length), (1, length)]


@pytest.mark.parametrize(("stop", "reason"), [("Par", "stop"), ("</tool_call>", "tool_calls")])
def test_a_call_that_a_stop_string_cuts_off_is_none(
    http: httpx.Client, driver: FakeDriver, stop: str, reason: str
) -> None:
    driver.replies[None] = HERMES
    got = both(http, tools=TOOLS, stop=stop)
    assert got["reason"] == reason
    assert [call["name"] for call in got["calls"]] == ["get_weather"]


def test_arguments_are_streamed(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    chunks = stream(http, CHAT, messages=HELLO, tools=TOOLS)
    deltas = [c["delta"]["tool_calls"][0] for chunk in chunks for c in chunk["choices"]
              if "tool_calls" in c["delta"]]  # fmt: skip
    assert deltas[0]["function"] == {"name": "get_weather", "arguments": ""}
    assert len(deltas) > 4
    assert all("id" not in delta for delta in deltas[1:])


@pytest.mark.parametrize("reply", ["plain text \n", '<tool_call>{"name": "other"}</tool_call>'])
def test_text_stays_text(http: httpx.Client, driver: FakeDriver, reply: str) -> None:
    driver.replies[None] = reply
    assert both(http, tools=TOOLS) == {"content": reply, "calls": [], "reason": "stop"}
    driver.replies[None] = HERMES
    for extra in ({}, {"tools": TOOLS, "tool_choice": "none"}):
        assert both(http, **extra) == {"content": HERMES, "calls": [], "reason": "stop"}
        assert "get_weather" not in prompt_of(driver)


def test_calls_that_are_cut_off_have_reason_length(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    whole = driver.tokenizer.encode(HERMES, add_special_tokens=False)
    got = both(http, tools=TOOLS, max_tokens=len(whole.ids) - 12)
    assert got["reason"] == "length"
    assert got["calls"][0]["name"] == "get_weather"
    assert json.dumps(CALL["arguments"]).startswith(got["calls"][0]["arguments"])


def test_choices_have_calls_of_their_own(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    choices = post(http, CHAT, messages=HELLO, tools=TOOLS, n=2, logprobs=True)["choices"]
    assert [len(choice["message"]["tool_calls"]) for choice in choices] == [1, 1]
    chunks = stream(http, CHAT, messages=HELLO, tools=TOOLS, n=2, logprobs=True)
    for index, whole in enumerate(choices):
        own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
        got = joined([{"choices": own}])
        assert got["calls"] == [call["function"] for call in whole["message"]["tool_calls"]]
        entries = [entry for c in own if c["logprobs"] for entry in c["logprobs"]["content"]]
        assert entries == whole["logprobs"]["content"]


@pytest.mark.parametrize(
    ("choice", "parallel", "good", "bad"),
    [
        ("required", True,
         ['[{"name": "get_weather", "arguments": {"town": "x", "days": 3}}]',
          '[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]'],
         ["[]", "hello", '[{"name": "get_time", "arguments": {"a": 1}}]',
          '[{"name": "get_weather", "arguments": {"days": 3}}]',
          '[{"name": "get_weather", "arguments": {"town": "x", "days": 10}}]']),
        ({"type": "function", "function": {"name": "get_time"}}, False,
         ['[{"name": "get_time", "arguments": {}}]'],
         ['[{"name": "get_weather", "arguments": {"town": "x"}}]',
          '[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]']),
        ("get_time", True, ['[{"name": "get_time", "arguments": {}}]'],
         ['[{"name": "get_weather", "arguments": {"town": "x"}}]',
          '[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]']),
        ({"type": "function", "function": {"name": "get_time"}}, True,
         ['[{"name": "get_time", "arguments": {}}]'],
         ['[{"name": "get_time", "arguments": {}}, {"name": "get_time", "arguments": {}}]']),
        ({"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": [
            {"type": "function", "function": {"name": "get_time"}}]}}, True,
         ['[{"name": "get_time", "arguments": {}}]'],
         ['[{"name": "get_weather", "arguments": {"town": "x"}}]']),
    ],
)  # fmt: skip
def test_required_calls(
    http: httpx.Client, driver: FakeDriver, choice: object, parallel: bool, good: list[str],
    bad: list[str],
) -> None:  # fmt: skip
    for answer in good:
        driver.replies[None] = answer
        got = both(http, tools=TOOLS, tool_choice=choice, parallel_tool_calls=parallel)
        expected = [(call["name"], call["arguments"]) for call in json.loads(answer)]
        calls = [(call["name"], json.loads(call["arguments"])) for call in got["calls"]]
        assert (got["content"], calls, got["reason"]) == ("", expected, "tool_calls")
        assert allowed(driver, answer)
    assert not any(allowed(driver, answer) for answer in bad)
    assert "Answer with a JSON list" in prompt_of(driver)


def test_strict_functions_and_formats_with_tools(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    assert both(http, tools=TOOLS)["calls"]
    assert driver.requests[-1].sequences[0].sampling.constraint == ""
    strict = [{"type": "function", "function": {**WEATHER, "strict": True}}, TOOLS[1]]
    assert both(http, tools=strict)["calls"]
    assert allowed(driver, HERMES)
    assert allowed(driver, "plain text")
    assert not allowed(driver, HERMES.replace("town", "city"))
    block = HERMES.removeprefix("Let me see.\n")
    driver.replies[None] = '{"x": 1}'
    got = both(http, tools=TOOLS, response_format={"type": "json_object"})
    assert (got["content"], got["calls"]) == ('{"x": 1}', [])
    assert allowed(driver, '{"x": 1}')
    assert allowed(driver, block)
    assert not allowed(driver, "plain text")


def test_legacy_functions(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    body: dict[str, Any] = {"messages": HELLO, "functions": [WEATHER, TIME]}
    [choice] = post(http, CHAT, **body)["choices"]
    assert choice["finish_reason"] == "function_call"
    called = choice["message"]["function_call"]
    assert (called["name"], json.loads(called["arguments"])) == ("get_weather", {"town": "Paris"})
    deltas = [c["delta"].get("function_call", {}) for chunk in stream(http, CHAT, **body)
              for c in chunk["choices"]]  # fmt: skip
    assert "".join(delta.get("arguments", "") for delta in deltas) == called["arguments"]
    post(http, CHAT, **body, function_call={"name": "get_time"})
    assert allowed(driver, '[{"name": "get_time", "arguments": {}}]')
    history = [*HELLO, {"role": "assistant", "content": None, "function_call": called},
               {"role": "function", "name": "get_weather", "content": "rain"}]  # fmt: skip
    post(http, CHAT, messages=history)
    assert "<tool_response>\nrain\n</tool_response>" in prompt_of(driver)


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"tools": [{"type": "custom", "custom": {"name": "x"}}]}, "tools", "only functions"),
        ({"tools": [{"type": "function"}]}, "tools", "needs `function`"),
        ({"tools": [*TOOLS, TOOLS[0]]}, "tools", "more than once"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]},
         "tools.0.function.name", "match pattern"),
        ({"tool_choice": "required"}, "tool_choice", "needs `tools`"),
        ({"tools": TOOLS, "tool_choice": "unknown"}, "tool_choice", "none of the functions"),
        ({"tools": TOOLS, "tool_choice": {"type": "custom"}}, "tool_choice", "name a function"),
        ({"tools": TOOLS, "functions": [TIME]}, "functions", "cannot be combined"),
        ({"tools": TOOLS, "guided_regex": "a"}, "guided_regex", "only JSON can"),
        ({"tools": TOOLS, "tool_choice": "required", "guided_json": {"type": "object"}},
         "guided_json", "cannot be combined with tools that must be called"),
        ({"tools": TOOLS, "tool_choice": "required", "ignore_eos": True}, "tool_choice",
         "cannot be combined"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {}}}}],
          "tool_choice": "required"}, "tool_choice", "not"),
        ({"tools": [{"type": "function",
                     "function": {"name": "f", "parameters": {"type": "array"}}}],
          "tool_choice": "required"}, "tools", "of type object"),
    ],
)  # fmt: skip
def test_what_is_refused(
    http: httpx.Client, driver: FakeDriver, extra: dict[str, Any], param: str, words: str
) -> None:
    error = refused(http, CHAT, 400, **{"messages": HELLO, **extra})
    assert error["param"] == param
    assert words in error["message"]
    assert driver.requests == []


def test_openais_client(client: openai.OpenAI, driver: FakeDriver) -> None:
    driver.replies[None] = TWO
    tools: Any = TOOLS
    messages: Any = list(HELLO)
    reply = client.chat.completions.create(model="tiny", messages=messages, tools=tools)
    message = reply.choices[0].message
    assert message.tool_calls is not None
    assert [call.type for call in message.tool_calls] == ["function", "function"]
    messages += [message, *({"role": "tool", "tool_call_id": call.id, "content": "rain"}
                            for call in message.tool_calls)]  # fmt: skip
    driver.replies[None] = "It rains."
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as events:
        for _ in events:
            pass
        assert events.get_final_completion().choices[0].message.content == "It rains."
    assert prompt_of(driver).count("<tool_response>\nrain") == 2
    driver.replies[None] = TWO
    with client.chat.completions.stream(model="tiny", messages=messages, tools=tools) as events:
        done = [event for event in events if event.type == "tool_calls.function.arguments.done"]
    assert [(event.name, json.loads(event.arguments)) for event in done] == [
        ("get_weather", {"town": "Paris"}), ("get_time", {}),
    ]  # fmt: skip


def test_half_surrogate_pairs_break_nothing(http: httpx.Client) -> None:
    for function in (
        b'{"name": "f", "description": "\\ud800"}',
        b'{"name": "f", "parameters": {"description": "\\ud800"}}',
        b'{"name": "f", "parameters": {"properties": {"\\ud800": {"const": "\\ud800"}}}}',
    ):
        for choice in (b"auto", b"required"):
            body = (
                b'{"model": "tiny", "max_tokens": 1, '
                b'"messages": [{"role": "user", "content": "a"}], "tools": [{"type": "function", '
                b'"function": ' + function + b"}], "
                b'"tool_choice": "' + choice + b'"}'
            )
            reply = http.post(CHAT, content=body, headers={"content-type": "application/json"})
            assert reply.status_code in (200, 400), (function, reply.text)


def test_a_format_of_the_text_changes_no_required_calls(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.replies[None] = json.dumps([CALL])
    required = {"tools": TOOLS, "tool_choice": "required", "messages": HELLO}
    post(http, CHAT, **required)
    plain = driver.requests[-1].sequences[0].sampling
    post(http, CHAT, **required, response_format={"type": "json_object"})
    formatted = driver.requests[-1].sequences[0].sampling
    assert plain.constraint
    assert (formatted.grammar, formatted.json_schema) == (plain.grammar, plain.json_schema)
