"""Chats with tools: the prompt, the constraint, and the reply."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from configs.model import ToolParser
from deployments.ingress.chat_templates.template import ChatTemplate
from deployments.ingress.tools.parsers import FORMATS
from deployments.ingress.tools.schema import Function, Toolbox
from deployments.ingress.tools.tooling import tooling
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, refused, stream
from tests.fakes import FakeDriver, write_tokenizer

llguidance = pytest.importorskip("llguidance")

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a town",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
        "required": ["town"],
        "$defs": {"Days": {"type": "integer", "maximum": 9}},
    },
}
TIME = {"name": "get_time"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]
CALL = {"name": "get_weather", "arguments": {"town": "Paris"}}
HERMES = f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TWO = HERMES + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content }}"
    "{% endfor %}<|assistant|>{# WORD #}"
)


@pytest.fixture(autouse=True)
def _room_for_words(driver: FakeDriver) -> None:
    """Tools as text need more tokens than the small engine has."""
    driver.info = msgspec.structs.replace(driver.info, max_total_tokens=4096, max_input_tokens=4000)


def prompt_of(driver: FakeDriver) -> str:
    ids = driver.requests[-1].sequences[0].prompt
    return str(driver.tokenizer.decode(ids, skip_special_tokens=False))


def allowed(driver: FakeDriver, answer: str) -> bool:
    """Whether the newest request's grammar lets this answer through, whole."""
    tokenizer = llguidance.LLTokenizer(f"{driver.info.tokenizer}/tokenizer.json")
    matcher = llguidance.LLMatcher(tokenizer, driver.requests[-1].sequences[0].sampling.grammar)
    ids = driver.tokenizer.encode(answer, add_special_tokens=False).ids
    assert not matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas come to, and its finish reason."""
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({**delta, "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {"content": content, "calls": [call["function"] for call in calls], "reason": reason}


def both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The answer to a request, checked to be equal whole and streamed."""
    [choice] = post(http, CHAT, messages=HELLO, **body)["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    whole = {"content": message["content"] or "", "calls": calls, "reason": choice["finish_reason"]}
    assert joined(stream(http, CHAT, messages=HELLO, **body)) == whole
    return whole


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
         ['[{"name": "get_weather", "arguments": {"town": "x"}}]']),
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


HISTORY: list[dict[str, Any]] = [
    *HELLO,
    {"role": "assistant", "content": None, "tool_calls": [
        {"id": "call_1", "type": "function",
         "function": {"name": "get_weather", "arguments": '{"town": "Paris"}'}}]},
    {"role": "tool", "tool_call_id": "call_1", "content": [{"type": "text", "text": "rain"}]},
]  # fmt: skip


def test_a_template_without_tools_gets_text(http: httpx.Client, driver: FakeDriver) -> None:
    post(http, CHAT, messages=HISTORY, tools=TOOLS)
    prompt = prompt_of(driver)
    assert prompt.startswith("<s><|system|>You can call functions.")
    assert f"{json.dumps(WEATHER)}\n{json.dumps(TIME)}\n</tools>" in prompt
    assert f"<|assistant|><tool_call>\n{json.dumps(CALL)}\n</tool_call></s>" in prompt
    assert "<|user|><tool_response>\nrain\n</tool_response></s>" in prompt
    system = {"role": "system", "content": "Be brief."}
    post(http, CHAT, messages=[system, *HISTORY], tools=TOOLS)
    assert prompt_of(driver).startswith("<s><|system|>Be brief.\n\nYou can call functions.")


@pytest.mark.parametrize(
    ("written", "shown"),
    [('{"town": "Par', '{"town": "Par'), ("nonsense", "nonsense"), ("[1]", [1]), ("null", None),
     ("5", 5), ("", {}), ('"x"', "x"), ([1], [1]), ({"a": 1}, {"a": 1}), (None, None)],
)  # fmt: skip
def test_arguments_of_earlier_calls_are_values_or_text(
    http: httpx.Client, driver: FakeDriver, written: object, shown: object
) -> None:
    """Clients send answers back as they came, those that were cut off among them."""
    function = {"name": "get_weather", "arguments": written}
    called = {"role": "assistant", "tool_calls": [{"type": "function", "function": function}]}
    post(http, CHAT, messages=[*HELLO, called], tools=TOOLS)
    assert json.dumps({**function, "arguments": shown}) in prompt_of(driver)


@pytest.fixture
def native(server: Server, tmp_path: Path, request: pytest.FixtureRequest) -> FakeDriver:
    """The server over a model whose template knows tools; its special tokens are its markers."""
    markers: list[str] = request.param
    write_tokenizer(tmp_path, NATIVE.replace("WORD", markers[0]))
    tokenizer = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(marker, special=True) for marker in markers])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    driver = server.driver
    driver.tokenizer = tokenizer
    driver.info = msgspec.structs.replace(
        driver.info, tokenizer=str(tmp_path), vocab_size=tokenizer.get_vocab_size()
    )
    return driver


@pytest.mark.parametrize(
    ("native", "reply", "id_length"),
    [
        (["[TOOL_CALLS]"], f"[TOOL_CALLS] [{json.dumps(CALL)}]", 9),
        (["[TOOL_CALLS]", "[ARGS]"], '[TOOL_CALLS]get_weather[ARGS]{"town": "Paris"}', 9),
        (["<tool_call>", "</tool_call>"], HERMES.removeprefix("Let me see.\n"), 29),
        (["<|python_tag|>"],
         '<|python_tag|>{"name": "get_weather", "parameters": {"town": "Paris"}}', 29),
        (["<unknown>"], '{"name": "get_weather", "parameters": {"town": "Paris"}}', 29),
    ],
    indirect=["native"],
)  # fmt: skip
def test_templates_with_tools(
    http: httpx.Client, native: FakeDriver, reply: str, id_length: int
) -> None:
    native.replies[None] = reply
    got = both(http, tools=TOOLS)
    assert (got["content"], got["reason"]) == ("", "tool_calls")
    [call] = got["calls"]
    assert (call["name"], json.loads(call["arguments"])) == ("get_weather", {"town": "Paris"})
    [choice] = post(http, CHAT, messages=HISTORY, tools=TOOLS)["choices"]
    assert len(choice["message"]["tool_calls"][0]["id"]) == id_length
    prompt = prompt_of(native)
    shown = json.loads(prompt[: prompt.index("<|user|>")])
    assert shown[0] == {"type": "function", "function": WEATHER}
    # Arguments are objects, and results are named by their calls.
    assert '"function": {"name": "get_weather", "arguments": {"town": "Paris"}}' in prompt
    assert "<|tool|>get_weather: rain" in prompt
    assert "You can call functions" not in prompt
    # Without tools these markers have no text, like other special tokens.
    post(http, CHAT, messages=HELLO)
    assert native.requests[-1].sequences[0].sampling.grammar == ""


@pytest.mark.parametrize(
    ("source", "parser", "expected"),
    [
        ("no such thing", ToolParser.MISTRAL, ToolParser.HERMES),
        ("{{ tools }} <tool_call>", ToolParser.AUTO, ToolParser.HERMES),
        ("{{ tools }} [TOOL_CALLS]", ToolParser.AUTO, ToolParser.MISTRAL),
        ("{{ tools }}", ToolParser.AUTO, ToolParser.LLAMA3_JSON),
        ("{{ tools }} <tool_call>", ToolParser.LLAMA3_JSON, ToolParser.LLAMA3_JSON),
        ("{% set tools = 1 %}{{ tools }}", ToolParser.AUTO, ToolParser.HERMES),
    ],
)
def test_which_format_is_used(source: str, parser: ToolParser, expected: ToolParser) -> None:
    function = Function(name="f")
    toolbox = Toolbox((function,), (function,), forced=False, parallel=True, legacy=False)
    found = tooling(toolbox, ChatTemplate(source, {}), parser)
    assert found is not None
    assert found.format is FORMATS[expected]


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
        ({"tools": TOOLS, "tool_choice": "required", "response_format": {"type": "json_object"}},
         "response_format", "cannot be combined with tools that must be called"),
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


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


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
