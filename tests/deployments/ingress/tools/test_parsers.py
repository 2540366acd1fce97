# ruff: noqa: RUF001 (the bars of DeepSeek)
"""Calls in a model's text: each format, what is no call, and text that comes in pieces."""

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.cli.serving.utils import _RESPONSE_TEMPLATE_FALLBACKS
from transformers.utils.chat_parsing import parse_response
from transformers.utils.chat_parsing.response_parser import _coerce, _schema_types

from configs.model import ToolParser
from deployments.ingress.tools.formats import FORCED, FORMATS, ArgumentStyle, CallFormat
from deployments.ingress.tools.parsers import (
    ArgumentsDelta,
    CallReader,
    CallStart,
    TextDelta,
)
from deployments.ingress.tools.values import value_of

HERMES = FORMATS[ToolParser.HERMES]
LLAMA = FORMATS[ToolParser.LLAMA3_JSON]
MISTRAL = FORMATS[ToolParser.MISTRAL]
NAMES = ("get_weather", "get")

Read = tuple[str, list[tuple[str, str]]]


def read(format: CallFormat, text: str, width: int = 10**9, parallel: bool = True) -> Read:
    """The text and the calls of an answer that arrives in pieces of so many characters."""
    reader = CallReader(format, NAMES, parallel, SCHEMAS)
    parts = []
    for start in range(0, len(text), width):
        parts += reader.push(text[start : start + width])
    parts += reader.end()
    shown = "".join(part.text for part in parts if isinstance(part, TextDelta))
    calls = [(part.name, "") for part in parts if isinstance(part, CallStart)]
    for part in parts:
        if isinstance(part, ArgumentsDelta):
            name, arguments = calls[part.call]
            calls[part.call] = (name, arguments + part.text)
    assert reader.num_calls == len(calls)
    return shown, calls


SPACED = '{"town": "Paris", "days": 3}'
SCHEMAS = {"get": {"town": {"type": "string"}, "days": {"type": "integer"},
                   "all": {"anyOf": [{"type": "boolean"}, {"type": "array"}]}}}  # fmt: skip
WRITTEN = {
    ToolParser.GRANITE: f'<|tool_call|>[{{"name": "get", "arguments": {SPACED}}}]',
    ToolParser.QWEN3_CODER: "<tool_call>\n<function=get>\n<parameter=town>\nParis\n</parameter>\n"
    "<parameter=days>\n3\n</parameter>\n</function>\n</tool_call>",
    ToolParser.SEED: "<seed:tool_call>\n<function=get>\n<parameter=town>Paris</parameter>\n"
    "<parameter=days>3</parameter>\n</function>\n</seed:tool_call>",
    ToolParser.MINIMAX: '<minimax:tool_call>\n<invoke name="get">\n<parameter name="town">Paris'
    '</parameter>\n<parameter name="days">3</parameter>\n</invoke>\n</minimax:tool_call>',
    ToolParser.DEEPSEEK_V32: '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get">\n'
    '<｜DSML｜parameter name="town" string="true">Paris</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="days" string="false">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n'
    "</｜DSML｜function_calls>",
    ToolParser.GLM: "<tool_call>get\n<arg_key>town</arg_key>\n<arg_value>Paris</arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
    ToolParser.DEEPSEEK: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get\n"
    f"```json\n{SPACED}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
    ToolParser.KIMI: "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0"
    f"<|tool_call_argument_begin|>{SPACED}<|tool_call_end|><|tool_calls_section_end|>",
    ToolParser.GEMMA: '<|tool_call>call:get{town:<|"|>Paris<|"|>,days:3}<tool_call|>',
    ToolParser.FUNCTION_GEMMA: "<start_function_call>call:get{town:<escape>Paris<escape>,days:3}"
    "<end_function_call>",
    ToolParser.PYTHONIC: "<|python_start|>[get(town='Paris', days=3)]<|python_end|>",
    ToolParser.LFM2: "<|tool_call_start|>[get(town='Paris', days=3)]<|tool_call_end|>",
}
"""One call as models of each format write it."""
NEXT = {
    ToolParser.DEEPSEEK: ("<｜tool▁calls▁end｜>", "\n<｜tool▁call▁begin｜>get<｜tool▁sep｜>{}"
                          "<｜tool▁call▁end｜><｜tool▁calls▁end｜>"),
    ToolParser.KIMI: ("<|tool_calls_section_end|>", "<|tool_call_begin|>functions.get:1"
                      "<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>"),
    ToolParser.PYTHONIC: ("]<|python_end|>", ", get()]"),
    ToolParser.LFM2: ("]<|tool_call_end|>", ", get()]<|tool_call_end|>"),
    ToolParser.GRANITE: ("]", ', {"name": "get", "arguments": {}}]'),
    ToolParser.MINIMAX: ("</minimax:tool_call>", '<invoke name="get">\n</invoke>\n'
                         "</minimax:tool_call>"),
    ToolParser.DEEPSEEK_V32: ("</｜DSML｜function_calls>", '<｜DSML｜invoke name="get">\n'
                              "</｜DSML｜invoke>\n</｜DSML｜function_calls>"),
}  # fmt: skip
"""What a second call without arguments replaces, and how it is written; else it is a block more."""


@pytest.mark.parametrize("width", [1, 3, 7, 10**6])
@pytest.mark.parametrize("parser", WRITTEN)
def test_calls_of_each_format(parser: ToolParser, width: int) -> None:
    format, text = FORMATS[parser], WRITTEN[parser]
    # Text that is passed on keeps its blanks.
    town = SPACED.replace(" ", "") if format.style is ArgumentStyle.ESCAPED else SPACED
    assert read(format, f"Well.\n{text}", width) == ("Well.", [("get", town)]) or format.at_start
    assert read(format, text, width) == ("", [("get", town)])
    end, more = NEXT.get(parser, ("", ""))
    one = text.replace("Paris", "").replace("town", "TOWN")
    two = text.removesuffix(end) + more if more else f"{text}\n{one}"
    shown, calls = read(format, two, width)
    assert (shown, [name for name, _ in calls]) == ("", ["get", "get"])
    assert read(format, two, width, parallel=False) == ("", [("get", town)])
    # A function that is not known is no call.
    assert read(format, text.replace("get", "put"), width) == (text.replace("get", "put"), [])
    # An answer that is cut off has the arguments so far.
    shown, calls = read(format, text[: text.index("aris")], width)
    if format.style is ArgumentStyle.PYTHON:
        assert (shown, calls) == (text[: text.index("aris")], [])
    else:
        assert (shown, len(calls)) == ("", 1)
        assert town.startswith(calls[0][1])


@pytest.mark.parametrize("parser", [ToolParser.QWEN3_CODER, ToolParser.GEMMA])
@pytest.mark.parametrize("town", ["Paris", "a < b", '"quoted"', "12", "true"])
def test_as_transformers_parses_it(parser: ToolParser, town: str) -> None:
    template = next(
        each for kinds, each in _RESPONSE_TEMPLATE_FALLBACKS.items()
        if ("gemma4" if parser is ToolParser.GEMMA else "qwen3_5") in kinds
    )  # fmt: skip
    text = WRITTEN[parser].replace("Paris", town)
    properties = SCHEMAS["get"]
    tools: list[Any] = [{"type": "function", "function": {"name": "get", "parameters": {
        "type": "object", "properties": properties}}}]  # fmt: skip
    theirs = parse_response(text, template, prefix="", tools=tools)["tool_calls"][0]["function"]
    [(name, arguments)] = read(FORMATS[parser], text)[1]
    assert (name, json.loads(arguments)) == (theirs["name"], theirs["arguments"])


@pytest.mark.parametrize(
    ("value", "is_string", "read_as"),
    [("3", "true", "3"), ("3", "false", 3), ("\nParis\n", "true", "\nParis\n"),
     ("2.0", "false", 2.0), ("true", "false", True), ('{"a": [null]}', "false", {"a": [None]}),
     ("null", "true", "null"), ("Paris", "false", "Paris")],
)  # fmt: skip
@pytest.mark.parametrize("name", ["town", "days", "other"])
def test_deepseek_says_which_values_are_strings(
    value: str, is_string: str, read_as: object, name: str
) -> None:
    text = WRITTEN[ToolParser.DEEPSEEK_V32].replace(
        'name="town" string="true">Paris', f'name="{name}" string="{is_string}">{value}'
    )
    [(_, arguments)] = read(FORMATS[ToolParser.DEEPSEEK_V32], text, 5)[1]
    found = json.loads(arguments.replace(', "days": 3', ""))[name]
    assert (type(found), found) == (type(read_as), read_as)


def test_blocks_may_lack_their_marker() -> None:
    for parser in (ToolParser.QWEN3_CODER, ToolParser.MINIMAX, ToolParser.DEEPSEEK_V32):
        first, _, rest = WRITTEN[parser].partition("\n")
        assert first in FORMATS[parser].begins
        assert read(FORMATS[parser], f"Well.\n{rest}", 3) == ("Well.", [("get", SPACED)])


@pytest.mark.parametrize("width", [1, 7, 10**6])
def test_functions_may_lack_their_end(width: int) -> None:
    for parser in (ToolParser.QWEN3_CODER, ToolParser.MINIMAX, ToolParser.DEEPSEEK_V32):
        format = FORMATS[parser]
        text = WRITTEN[parser].replace(f"{format.tags.end}\n", "")
        assert format.tags.end not in text
        two = f"{text}\n{text.partition(format.end)[0].partition(chr(10))[2]}"
        for written, count in ((text, 1), (f"{text}\n{text}", 2), (two, 2)):
            shown, calls = read(format, written, width)
            assert (shown, len(calls)) == ("", count)
            assert calls[0] == ("get", SPACED)


@pytest.mark.parametrize(
    "schema",
    [{"type": "integer"}, {"type": "number"}, {"type": "boolean"}, {"type": ["null", "string"]},
     {"type": "array"}, {"anyOf": [{"type": "object"}, {"type": "boolean"}]}, {"type": "string"},
     {"type": "integer", "nullable": True}, {}, None],
)  # fmt: skip
@pytest.mark.parametrize(
    "raw", ["3", "3.0", "3.5", "1e3", "true", "False", "null", "[1]", '{"a": 1}', "x", "", "nan"]
)
def test_values_are_those_of_transformers(schema: object, raw: str) -> None:
    expected = _coerce(raw, _schema_types(schema))
    found = value_of(raw, schema)
    assert (type(found), found) == (type(expected), expected)


@pytest.mark.parametrize(
    "text",
    ["[get(1)]", "[get(town=f())]", "[get(**a)]", "[get(town='Paris]", "[get(town=1j)]", "[1]",
     f"[get(town={'(' * 300})]", f"[get(town={'-' * 20_000}1)]", "[get(town='a' 'b'"],
)  # fmt: skip
def test_what_is_no_python_call_stays_text(text: str) -> None:
    for width in (1, 10**6) if len(text) < 1000 else (1000,):
        assert read(FORMATS[ToolParser.PYTHONIC], text, width) == (text, [])


@pytest.mark.parametrize("parser", WRITTEN)
def test_endless_values_take_linear_time(parser: ToolParser) -> None:
    for junk in ("\n" * 20_000, "<" * 20_000, "<parameter=" * 2_000):
        text = WRITTEN[parser].replace("Paris", junk)
        [(_, arguments)] = read(FORMATS[parser], text, 1)[1] or [("", "{}")]
        assert len(arguments) < 3 * len(text)


@pytest.mark.parametrize("junk", ["(", "a ", '"', " "])
def test_endless_words_of_gemma_take_linear_time(junk: str) -> None:
    text = "<|tool_call>call:get{town:" + junk * 20_000 + "}<tool_call|>"
    whole = read(FORMATS[ToolParser.GEMMA], text)
    assert read(FORMATS[ToolParser.GEMMA], text, 1) == whole


TRICKY = '{"a": "}\\"</tool_call>[", "b": [{}, 1.5, null]}'


@pytest.mark.parametrize(
    ("format", "text", "shown", "calls"),
    [
        (HERMES, '<tool_call>\n{"name": "get", "arguments": {"a": 1}}\n</tool_call>', "",
         [("get", '{"a": 1}')]),
        (HERMES, f'Let me see. \n<tool_call>{{"name": "get", "arguments": {TRICKY}}}</tool_call>\n'
         '<tool_call>\n{"arguments": {"x": "é"}, "name": "get_weather"}\n</tool_call> \n',
         "Let me see.",
         [("get", TRICKY), ("get_weather", '{"x": "é"}')]),
        (HERMES, '<tool_call>{"name": "get", "arguments": {}, "id": {"x": "}"}}</tool_call> bye',
         "bye", [("get", "{}")]),
        (HERMES, '<tool_call>{"name": "get"}', "", [("get", "{}")]),
        (HERMES, '<tool_call>{"name": "get", "arguments": "{}"}</tool_call>', "", [("get", "{}")]),
        (LLAMA, '{"name": "get", "parameters": {"a": {}}}', "", [("get", '{"a": {}}')]),
        (LLAMA, '<|python_tag|>{"type": "function", "name": "get", "parameters": {"a": 1}}; '
         '{"name": "get_weather", "parameters": {}}', "",
         [("get", '{"a": 1}'), ("get_weather", "{}")]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {"a": 1}}, '
         '{"arguments": {}, "name": "get"}]', "", [("get", '{"a": 1}'), ("get", "{}")]),
        (MISTRAL, 'Well [TOOL_CALLS]get_weather[ARGS]{"a": 1}[TOOL_CALLS]get[CALL_ID]ab12[ARGS]{}',
         "Well", [("get_weather", '{"a": 1}'), ("get", "{}")]),
        (FORCED, '[{"name": "get", "arguments": {"a": 1}}, {"name": "get", "arguments": {}}]', "",
         [("get", '{"a": 1}'), ("get", "{}")]),
        # A bracket too many, and too few.
        (HERMES, '<tool_call>{"name": "get", "arguments": {"a": 1}}}</tool_call> bye', "bye",
         [("get", '{"a": 1}')]),
        (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "get"}} ]\n</tool_call>\n'
         '<tool_call>{"name": "get", "arguments": {}}}}</tool_call>', "",
         [("get", '{"a": 1}'), ("get", "{}")]),
        (HERMES, '<tool_call>{"name": "get", "arguments": {"a": "<"}\n</tool_call> x '
         '<tool_call>{"name": "get", "arguments": {"b": [1\n</tool_call> bye', "xbye",
         [("get", '{"a": "<"}'), ("get", '{"b": [1\n')]),
        (LLAMA, '{"name": "get", "parameters": {"a": 1}}}', "", [("get", '{"a": 1}')]),
        (MISTRAL, '[TOOL_CALLS] [{"name": "get", "arguments": {}}}, {"name": "get", "arguments": '
         '{}}]]', "", [("get", "{}"), ("get", "{}")]),
        (FORCED, '[{"name": "get", "arguments": {}}]]}', "", [("get", "{}")]),
        # Arguments that are not an object are passed on too.
        (HERMES, '<tool_call>{"name": "get", "arguments": null}</tool_call>', "",
         [("get", "null")]),
        (HERMES, '<tool_call>{"name": "get", "arguments": [1]}</tool_call>', "", [("get", "[1]")]),
    ],
)  # fmt: skip
@pytest.mark.parametrize("width", [1, 2, 7, 10**6])
def test_calls(format: CallFormat, text: str, shown: str, calls: object, width: int) -> None:
    assert read(format, text, width) == (shown, calls)


@pytest.mark.parametrize(
    ("format", "text"),
    [
        (HERMES, "no call \n"),
        (HERMES, '{"name": "get", "arguments": {}}'),
        (HERMES, 'x  <tool_call>{"name": "unknown", "arguments": {}}</tool_call> y'),
        (HERMES, '<tool_call>{"name": "get", </tool_call> y'),
        (HERMES, "<tool_call>get</tool_call>"),
        (HERMES, "a <tool_"),
        (HERMES, "a <tool_call> \n"),
        (LLAMA, ' {"a": 1} is JSON'),
        (LLAMA, "[1] says so"),
        (LLAMA, '<|python_tag|>search.call(query="x")'),
        (LLAMA, '{"name": "get", "parameters": [1}'),
        (MISTRAL, "[TOOL_CALLS]what is it?"),
        (MISTRAL, '[TOOL_CALLS]other{"a": 1}'),
        (FORCED, "  \n"),
        (FORCED, '[{"name": "get_w'),
    ],
)
@pytest.mark.parametrize("width", [1, 3, 10**6])
def test_what_is_no_call_stays_text(format: CallFormat, text: str, width: int) -> None:
    assert read(format, text, width) == (text, [])


@pytest.mark.parametrize("width", [1, 10**6])
def test_an_answer_that_is_cut_off(width: int) -> None:
    text = '[{"name": "get", "arguments": {"a": 1}}, {"name": "get", "arguments": {"b'
    assert read(FORCED, text, width) == ("", [("get", '{"a": 1}'), ("get", '{"b')])
    assert read(FORCED, text[:50], width) == ("", [("get", '{"a": 1}')])
    assert read(HERMES, '<tool_call>{"name": "get", "arguments": {"b', width) == (
        "", [("get", '{"b')],
    )  # fmt: skip


def test_one_call_at_most() -> None:
    text = '<tool_call>{"name": "get", "arguments": {}}</tool_call>'
    assert read(HERMES, text * 2 + "more", 1, parallel=False) == ("", [("get", "{}")])


def test_arguments_come_as_they_are_written() -> None:
    reader = CallReader(HERMES, NAMES, True)
    assert reader.push('<tool_call>{"name": "get", "arg') == []
    assert reader.push('uments": {"a": "on') == [
        CallStart(0, "get"),
        ArgumentsDelta(0, '{"a": "on'),
    ]
    assert reader.push('e"}}') == [ArgumentsDelta(0, 'e"}')]


@pytest.mark.parametrize("head", ["{", '{"name"', "get", "get[CALL_ID]a1"])
def test_endless_blanks_take_linear_time(head: str) -> None:
    """Matched in every way to share them out, so many would take hours."""
    text = f"[TOOL_CALLS]{head}{' ' * 20_000}x {{"
    assert read(MISTRAL, text, 10_000) == (text, [])


_SCRAPS = st.sampled_from(
    [mark for one in FORMATS.values() for mark in one.markers]
    + ["<function=get>", "<parameter=a>", "call:get", "get(", "a=1", ")", "'", "```json", "a:"]
    + ["<tool_call>", "</tool_call>", "<tool", "[TOOL_CALLS]", "[", "]", "{", "}", '"', "\\", ",",
     ";", " ", "\n", "name", '{"name": "get", "arguments": ', '{"name": "get", "parameters": {',
     "get", "get_weather", '{"a": "}"}', "<|python_tag|>", "[ARGS]", "x", "é"]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from([*FORMATS.values(), FORCED]),
    scraps=st.lists(_SCRAPS, max_size=14),
    width=st.integers(1, 9),
    parallel=st.booleans(),
)
def test_pieces_never_matter(
    format: CallFormat, scraps: list[str], width: int, parallel: bool
) -> None:
    text = "".join(scraps)
    whole = read(format, text, parallel=parallel)
    assert read(format, text, width, parallel) == whole
    shown, calls = whole
    assert all(name in NAMES for name, _ in calls)
    if not calls:
        assert shown == text


@given(arguments=st.dictionaries(st.text(), st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
), max_size=4), width=st.integers(1, 9))  # fmt: skip
@settings(max_examples=100, deadline=None)
def test_any_arguments_come_through(arguments: dict[str, object], width: int) -> None:
    call = json.dumps({"name": "get", "arguments": arguments})
    for format, text in (
        (HERMES, f"<tool_call>\n{call}\n</tool_call>"), (MISTRAL, f"[TOOL_CALLS] [{call}]"),
        (LLAMA, call), (FORCED, f"[{call}]"),
    ):  # fmt: skip
        shown, calls = read(format, text, width)
        assert shown == ""
        assert [(name, json.loads(text)) for name, text in calls] == [("get", arguments)]


@pytest.mark.parametrize("arguments", ['"\\ud800"', '{"a": "\\ud800"}'])
def test_half_surrogate_pairs_break_nothing(arguments: str) -> None:
    text = f'<tool_call>{{"arguments": {arguments}, "name": "get"}}</tool_call>'
    shown, [(name, called)] = read(HERMES, text)
    assert (shown, name) == ("", "get")
    assert json.loads(called.encode()) == json.loads(arguments)
