"""Reasoning split from text: transformers' parser is the truth, and pieces never matter."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.utils.chat_parsing import parse_response

from configs.model import ReasoningParser
from deployments.ingress.chat_templates.template import ChatTemplate
from deployments.ingress.reasoning.answers import Answer
from deployments.ingress.reasoning.formats import FORMATS, Start, reasoning_format
from deployments.ingress.reasoning.harmony import HarmonyReader
from deployments.ingress.reasoning.splitter import Splitter
from deployments.ingress.tools.parsers import TextDelta

THINK, HARMONY = FORMATS[ReasoningParser.THINK], FORMATS[ReasoningParser.HARMONY]
SPLIT = [one for one in FORMATS.values() if not one.channels]
FINAL = "<|start|>assistant<|channel|>final<|message|>"
CALL = '<|channel|>commentary to=functions.f <|constrain|>json<|message|>{"a": 1}'


def read(reader: Splitter | HarmonyReader, text: str, width: int = 10_000) -> Answer:
    """The answer in a text that comes in pieces of that width."""
    answer = Answer()
    for at in range(0, len(text), width):
        answer.add(reader.push(text[at : at + width]))
    answer.add(reader.end())
    return answer


@pytest.mark.parametrize("format", SPLIT)
@pytest.mark.parametrize(
    ("prompt", "text"),
    [
        ("", "BEGIN\nLet me see.\n\nYes. END\n\nParis."),
        ("BEGIN\n", "Let me see.END Paris."),
        ("BEGIN", "\nbarely begun"),
        ("BEGIN END\n\n", "Paris."),
        ("", "Paris."),
        ("", "BEGIN\n\nEND\n\nParis."),
    ],
)
def test_as_transformers_parses_it(format: object, prompt: str, text: str) -> None:
    assert isinstance(format, type(THINK))
    prompt, text = (
        each.replace("BEGIN", format.begin).replace("END", format.end) for each in (prompt, text)
    )
    expected = parse_response(
        text,
        {"start_anchor": "<ASSISTANT>", "fields": {
            "reasoning_content": {"open": format.begin, "close": format.end}, "content": {}}},
        prefix=f"<ASSISTANT>{prompt}",
    )  # fmt: skip
    for width in (1, 3, 1000):
        got = read(Splitter(format, format.start(prompt)), text, width)
        assert got.reasoning == expected.get("reasoning_content", "")
        assert got.text == expected.get("content", "")


@pytest.mark.parametrize(
    ("start", "text", "reasoning", "shown"),
    [
        (Start.EITHER, "  no marks <think>here</think>", "", "  no marks <think>here</think>"),
        (Start.EITHER, " \n", "", " \n"),
        (Start.EITHER, "<thi", "", "<thi"),
        (Start.EITHER, "a <think>b</think>c", "", "a <think>b</think>c"),
        (Start.EITHER, "\n<think>a <think> b</think>c</think>", "a <think> b", "c</think>"),
        (Start.REASONING, "<think>\nagain\n</think>\n\nc \n", "again", "c \n"),
        (Start.REASONING, "cut </thin", "cut </thin", ""),
        (Start.REASONING, "\n </think>", "", ""),
        (Start.TEXT, "<think>a</think>", "", "<think>a</think>"),
    ],
)
def test_where_reasoning_begins_and_ends(
    start: Start, text: str, reasoning: str, shown: str
) -> None:
    for width in (1, 4, 1000):
        got = read(Splitter(THINK, start), text, width)
        assert (got.reasoning, got.text) == (reasoning, shown)


@pytest.mark.parametrize(
    ("text", "reasoning", "shown", "calls"),
    [
        (f"<|channel|>analysis<|message|>Hm.<|end|>{FINAL}Paris.", "Hm.", "Paris.", []),
        (f"<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant{CALL}", "Hm.", "",
         ['f{"a": 1}']),
        (f"<|start|>assistant to=functions.f<|channel|>commentary<|message|>{{}}<|call|>{CALL}",
         "", "", ["f{}", 'f{"a": 1}']),
        (f"<|channel|>commentary<|message|>First.<|end|>{FINAL}Paris.", "", "First.Paris.", []),
        (CALL.replace("functions.f", "functions.g"), "", '{"a": 1}', []),
        ("<|channel|>analysis<|message|>cut", "cut", "", []),
        ("<|channel|>analysis<|mess", "", "", []),
        ("plain text", "", "plain text", []),
        ("assist", "", "assist", []),
    ],
)  # fmt: skip
def test_channels(text: str, reasoning: str, shown: str, calls: list[str]) -> None:
    for width in (1, 5, 1000):
        got = read(HarmonyReader(["f"], True, Start.EITHER), text, width)
        assert (got.reasoning, got.text) == (reasoning, shown)
        assert [call.name + call.arguments for call in got.calls] == calls
    assert len(read(HarmonyReader(["f"], False, Start.EITHER), text).calls) == min(1, len(calls))


def test_where_calls_in_channels_end() -> None:
    open_call = CALL[: CALL.index("<|message|>") + 12]
    for parallel in (True, False):
        reader = HarmonyReader(["f"], parallel, Start.EITHER)
        reader.push(open_call)
        assert not reader.ended
        reader.push("<|end|>")
        assert reader.ended is not parallel
        read(reader, "")
        assert not reader.cut_off
        cut = HarmonyReader(["f"], parallel, Start.EITHER)
        read(cut, open_call)
        assert cut.cut_off


@pytest.mark.parametrize("start", Start)
def test_channels_without_reasoning(start: Start) -> None:
    reader = HarmonyReader([], True, start, joins_reasoning=True)
    begin = "" if start is Start.REASONING else "<|channel|>analysis<|message|>"
    if start is Start.TEXT:
        begin = f"<|end|>{begin}"
    assert reader.push(f"{begin}Hm.") == [TextDelta("Hm.")]
    assert not reader.reasoning, "its tokens would be counted as reasoning"
    assert reader.push(f"<|end|>{FINAL}Paris.") == [TextDelta("Paris.")]


_SCRAPS = st.sampled_from(
    [mark for one in FORMATS.values() for mark in (*one.markers, one.begin, one.end)]
    + ["<", "<|", "assistant", "analysis", "final", " to=functions.f", " ", "\n", "x", "é"]
)


@settings(max_examples=300, deadline=None)
@given(
    format=st.sampled_from([*FORMATS.values()]),
    start=st.sampled_from(Start),
    scraps=st.lists(_SCRAPS, max_size=14),
    width=st.integers(1, 9),
)
def test_pieces_never_matter(format: object, start: Start, scraps: list[str], width: int) -> None:
    assert isinstance(format, type(THINK))

    def reader() -> Splitter | HarmonyReader:
        own = HarmonyReader(["f"], True, start) if format.channels else Splitter(format, start)
        return own

    text = "".join(scraps)
    whole = read(reader(), text)
    assert read(reader(), text, width) == whole
    if not format.channels and start is Start.TEXT:
        assert (whole.text, whole.reasoning) == (text, "")


@pytest.mark.parametrize("text", ["<think>" + "\n" * 30_000, "\n" * 30_000, "<|start|>" * 5_000])
def test_endless_blanks_take_linear_time(text: str) -> None:
    for format in (THINK, HARMONY):
        own = HarmonyReader([], True, Start.EITHER) if format.channels else Splitter(
            format, Start.EITHER
        )  # fmt: skip
        read(own, text, 1)


@pytest.mark.parametrize(
    ("source", "parser", "expected"),
    [
        ("<|im_start|>assistant\n<think>\n\n</think>", ReasoningParser.AUTO, ReasoningParser.THINK),
        ("{{ content.split('</think>')[-1] }}", ReasoningParser.AUTO, ReasoningParser.THINK),
        ("[THINK]{{ x }}[/THINK]", ReasoningParser.AUTO, ReasoningParser.MISTRAL),
        ("<|start|>assistant<|channel|>analysis<|message|>", ReasoningParser.AUTO,
         ReasoningParser.HARMONY),
        ("<|channel>thought\n<channel|>", ReasoningParser.AUTO, ReasoningParser.GEMMA),
        ("nothing", ReasoningParser.AUTO, None),
        ("<think>", ReasoningParser.NONE, None),
        ("nothing", ReasoningParser.THINK, ReasoningParser.THINK),
    ],
)  # fmt: skip
def test_which_format_is_used(
    source: str, parser: ReasoningParser, expected: ReasoningParser | None
) -> None:
    found = reasoning_format(parser, ChatTemplate(source, {}))
    assert found == (FORMATS[expected] if expected is not None else None)
