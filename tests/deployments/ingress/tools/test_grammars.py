"""Grammars for calls: what they let through, in each format, with markers as tokens and as text."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest
from tokenizers import AddedToken

from configs.grammars import matcher_of
from configs.model import ToolParser
from deployments.ingress.reasoning.answers import AnswerReader, read_whole
from deployments.ingress.structured.compile_process import CompileResult, check
from deployments.ingress.structured.schemas import schema_text
from deployments.ingress.text.tokenizer import ModelTokenizer
from deployments.ingress.tools.formats import FORCED, FORMATS, CallFormat
from deployments.ingress.tools.grammars import calls_constraint
from deployments.ingress.tools.parsers import CallReader
from deployments.ingress.tools.schema import Function, Toolbox
from tests.fakes import EOS, token_id, write_tokenizer

llguidance = pytest.importorskip("llguidance")

FUNCTIONS = (
    Function(name="f", strict=True, parameters={
        "type": "object", "properties": {"a": {"$ref": "#/$defs/A"}}, "required": ["a"],
        "$defs": {"A": {"type": "integer"}}}),
    Function(name="g"),
)  # fmt: skip
CONSTRAINED = [parser for parser, format in FORMATS.items() if format.constrained]
F, F_BAD, G = '{"a": 1}', '{"a": "x"}', '{"b": [2]}'
ANSWER = {"type": "object", "properties": {"done": {"type": "boolean"}}, "required": ["done"],
          "additionalProperties": False}  # fmt: skip


class Model:
    """A tokenizer in which the format's markers are special tokens, other tokens, or text."""

    def __init__(self, folder: Path, format: CallFormat, words: str) -> None:
        self.tokenizer = write_tokenizer(folder)
        tokens = [AddedToken(word, special=words == "special") for word in format.markers]
        if words == "special":
            self.tokenizer.add_special_tokens(tokens)
        elif words == "added":
            self.tokenizer.add_tokens(tokens)
        self.tokenizer.save(str(folder / "tokenizer.json"))
        self.ids = ModelTokenizer.load(str(folder)).added_within(format.markers)
        assert bool(self.ids) == (words != "plain" and bool(format.markers))
        self.guide = llguidance.LLTokenizer(
            str(folder / "tokenizer.json"), eos_token=[token_id(self.tokenizer, EOS)]
        )

    def allows(self, grammar: str, answer: str) -> bool:
        matcher = matcher_of(self.guide, grammar)
        ids = self.tokenizer.encode(answer, add_special_tokens=False).ids
        return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def toolbox(functions: Sequence[Function] = FUNCTIONS, **changes: Any) -> Toolbox:
    settled = {"forced": False, "parallel": True, "legacy": False, **changes}
    return Toolbox(tuple(functions), tuple(functions), **settled)


def objects(key: str, *calls: tuple[str, str]) -> list[str]:
    return [f'{{"name": "{name}", "{key}": {arguments}}}' for name, arguments in calls]


def written(parser: ToolParser, *calls: tuple[str, str]) -> list[str]:
    """The ways in which a model of this kind may write these calls."""
    if parser is ToolParser.HERMES:
        blocks = [f"<tool_call>\n{one}\n</tool_call>" for one in objects("arguments", *calls)]
        return ["\n".join(blocks)]
    if parser is ToolParser.LLAMA3_JSON:
        listed = "; ".join(objects("parameters", *calls))
        return [listed, f"<|python_tag|>{listed}"]
    listed = ", ".join(objects("arguments", *calls))
    named = "".join(f"[TOOL_CALLS]{name}[ARGS]{arguments}" for name, arguments in calls)
    return [f"[TOOL_CALLS] [{listed}]", f"[TOOL_CALLS][{listed}]", named]


@pytest.mark.parametrize("words", ["special", "added", "plain"])
@pytest.mark.parametrize("parser", CONSTRAINED)
def test_strict_functions_in_the_models_own_format(
    tmp_path: Path, parser: ToolParser, words: str
) -> None:
    format = FORMATS[parser]
    model = Model(tmp_path, format, words)
    grammar = calls_constraint(toolbox(), format, model.ids).grammar
    for answer in ("", "plain text, {} [1] \n"):
        assert model.allows(grammar, answer)
    for calls in ([("f", F)], [("g", G)], [("f", F), ("g", G)]):
        for text in written(parser, *calls):
            assert model.allows(grammar, text), text
            read = read_whole(AnswerReader(None, CallReader(format, ("f", "g"), True)), text)
            assert [(call.name, call.arguments) for call in read.calls] == calls
            assert read.text == ""
    for calls in ([("f", F_BAD)], [("h", G)], [("f", F), ("f", "{}")]):
        assert not any(model.allows(grammar, text) for text in written(parser, *calls)), calls


@pytest.mark.parametrize("words", ["special", "plain"])
@pytest.mark.parametrize("parser", CONSTRAINED)
def test_calls_or_an_answer_that_fits(tmp_path: Path, parser: ToolParser, words: str) -> None:
    format = FORMATS[parser]
    model = Model(tmp_path, format, words)
    grammar = calls_constraint(toolbox(), format, model.ids, schema_text(ANSWER)).grammar
    assert model.allows(grammar, '{"done": true}')
    for text in written(parser, ("f", F), ("g", G)):
        assert model.allows(grammar, text), text
    for text in ("plain", '{"done": 1}', "", *written(parser, ("f", F_BAD))):
        assert not model.allows(grammar, text), text


def test_one_list_of_calls(tmp_path: Path) -> None:
    model = Model(tmp_path, FORCED, "plain")
    grammar = calls_constraint(toolbox(forced=True), FORCED, {}).grammar
    listed = ", ".join(objects("arguments", ("f", F), ("g", "{}")))
    assert model.allows(grammar, f"[{listed}]")
    single = calls_constraint(toolbox(forced=True, parallel=False), FORCED, {}).grammar
    [call] = objects("arguments", ("f", F))
    assert model.allows(single, f"[{call}]")
    for text in ("[]", f"[{listed}]", call, "plain"):
        assert not model.allows(single, text), text
    # Required arguments fit, strict or not: without parameters there are none.
    [loose] = objects("arguments", ("g", G))
    assert not model.allows(grammar, f"[{loose}]")


def test_names_are_escaped(tmp_path: Path) -> None:
    model = Model(tmp_path, FORCED, "plain")
    functions = [Function(name=name) for name in ("a.b/c:d", "a-b", "start", "TEXT")]
    grammar = calls_constraint(toolbox(functions, forced=True), FORCED, {}).grammar
    for function in functions:
        [call] = objects("arguments", (function.name, "{}"))
        assert model.allows(grammar, f"[{call}]")


def test_nothing_is_constrained_without_need() -> None:
    loose = toolbox([Function(name="g")])
    assert not calls_constraint(loose, FORMATS[ToolParser.HERMES], {})


@pytest.mark.parametrize("parser", CONSTRAINED)
def test_what_is_built_compiles(parser: ToolParser, tmp_path: Path) -> None:
    """Also with a hundred functions, within what a mask may cost."""
    schema = {"type": "object", "properties": {"a": {"enum": list(range(20))}}}
    many = [Function(name=f"f{index}", parameters=schema, strict=True) for index in range(100)]
    model = Model(tmp_path, FORMATS[parser], "special")
    for changes in ({}, {"forced": True}, {"parallel": False}):
        for answer in ("", json.dumps(ANSWER)):
            tools, format = toolbox(many, **changes), FORMATS[parser]
            task = calls_constraint(tools, format, model.ids, answer).task
            assert check(model.guide, msgspec.msgpack.encode(task)) == CompileResult(task.text)
