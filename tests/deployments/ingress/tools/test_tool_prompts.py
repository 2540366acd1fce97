# ruff: noqa: RUF001 (the bars of DeepSeek)
"""Tools in prompts, by the chat template, and the format of calls that follows from it."""

import json
import re
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
from tokenizers import AddedToken, Tokenizer

from configs.model import ToolParser
from deployments.ingress.chat_templates.template import ChatTemplate
from deployments.ingress.http.errors import RequestError
from deployments.ingress.tools.formats import FORMATS, TRACES
from deployments.ingress.tools.parsers import CallStart
from deployments.ingress.tools.schema import Function, Toolbox
from deployments.ingress.tools.tooling import tooling
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post
from tests.deployments.ingress.tools.tool_chats import (
    CALL,
    HERMES,
    NATIVE,
    TIME,
    TOOLS,
    WEATHER,
    both,
    prompt_of,
)
from tests.fakes import FakeDriver, write_tokenizer

pytestmark = pytest.mark.usefixtures("room_for_tools")

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
    # DeepSeek's marks begin with a bracket that is no part of the token.
    write_tokenizer(tmp_path, NATIVE.replace("WORD", f"<{markers[0]}"))
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
        (["｜DSML｜"], '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get_weather">\n'
         '<｜DSML｜parameter name="town" string="true">Paris</｜DSML｜parameter>\n'
         "</｜DSML｜invoke>\n</｜DSML｜function_calls>", 29),
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
        *((f"{{{{ tools }}}} {trace}", ToolParser.AUTO, parser) for trace, parser in TRACES),
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


@pytest.mark.parametrize("forced", [False, True])
def test_ids_are_as_the_template_wants_them_back(forced: bool) -> None:
    """Kimi's writes the id as the head of the call, Mistral's takes nine letters and digits."""
    function = Function(name="f")
    toolbox = Toolbox((function,), (function,), forced=forced, parallel=True, legacy=False)
    for source, expected in (
        ("<|tool_calls_section_begin|>", "functions.f:3"), ("[TOOL_CALLS]", r"[0-9A-Za-z]{9}"),
        ("<tool_call>", "call_[0-9a-f]{24}"),
    ):  # fmt: skip
        template = ChatTemplate("{{ tools }} " + source, {})
        found = tooling(toolbox, template, ToolParser.AUTO, past_calls=2)
        assert found is not None
        assert re.fullmatch(expected, found.call_id(CallStart(1, "f")))


def test_strict_calls_in_a_format_without_a_grammar() -> None:
    """The mask makes a model go on with an object after the same marker; else it is refused."""
    function = Function(name="f", strict=True)
    toolbox = Toolbox((function,), (function,), forced=False, parallel=True, legacy=False)
    for trace in ("<arg_key>", "<tool_call> <function="):
        found = tooling(toolbox, ChatTemplate("{{ tools }} " + trace, {}), ToolParser.AUTO)
        assert found is not None
        assert found.format is FORMATS[ToolParser.HERMES]
    for trace in ("<|tool_calls_section_begin|>", "<|channel|>", "<|tool_call>"):
        with pytest.raises(RequestError, match="set `tool_choice` to required or none"):
            tooling(toolbox, ChatTemplate("{{ tools }} " + trace, {}), ToolParser.AUTO)
