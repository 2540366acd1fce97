"""`structured_outputs` and `guided_*`: what reaches the driver, and what is refused before."""

import asyncio
import json
from typing import Any

import httpx
import pytest

from deployments.contract import EngineInfo
from deployments.ingress.structured.compile_process import CompileResult, CompileTask
from deployments.ingress.structured.constraints import Compiler, Constraint
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post, refused
from tests.fakes import FakeDriver

llguidance = pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
ODD = ['é\n"x"\\', "🦊", "\x01/", "a//b", "%json {}", "<|user|>"]


def last(driver: FakeDriver) -> Any:
    return driver.requests[-1].sequences[0].sampling


def fits(driver: FakeDriver, answer: str) -> bool:
    """Whether the newest request's constraint lets this answer through, whole."""
    requested = last(driver)
    schema, grammar = requested.json_schema, requested.grammar
    if schema:
        grammar = llguidance.LLMatcher.grammar_from_json_schema(schema)
    tokenizer = llguidance.LLTokenizer(f"{driver.info.tokenizer}/tokenizer.json")
    matcher = llguidance.LLMatcher(tokenizer, grammar)
    assert not matcher.get_error()
    plain = answer.encode()
    ids = [driver.tokenizer.token_to_id(_CHARACTERS[byte]) for byte in plain]
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def _byte_characters() -> dict[int, str]:
    """The byte-level vocabulary's character for each byte."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {
        byte: chr(0x100 + index) for index, byte in enumerate(others)
    }


_CHARACTERS = _byte_characters()


@pytest.mark.parametrize(
    ("ways", "good", "bad"),
    [
        ({"json": SCHEMA}, ['{"a": 1}'], ['{"a": "x"}', "1"]),
        ({"json": json.dumps(SCHEMA)}, ['{"a": 1}'], ["{}"]),
        ({"regex": r"a/b\d+"}, ["a/b12"], ["a/b", "xa/b1", "a/b1x"]),
        ({"regex": "a\\/\nb"}, ["a/\nb"], ["a\\/b"]),
        ({"choice": ["yes", "no"]}, ["yes", "no"], ["maybe", "yesno"]),
        ({"choice": ["a", "ab", "abc"]}, ["a", "ab", "abc"], ["abcd", "b"]),
        ({"choice": ODD}, ODD, ["x", "é"]),
        ({"grammar": 'start: "a" b+\nb: /[0-9]/'}, ["a12"], ["a", "b"]),
        ({"grammar": 'root ::= "a" b+\nb ::= [0-9] | "x"'}, ["a1x"], ["a", "ay"]),
    ],
)
def test_forms_of_constraints(
    http: httpx.Client, driver: FakeDriver, ways: dict[str, Any], good: list[str], bad: list[str]
) -> None:
    [(way, value)] = ways.items()
    for body in ({"structured_outputs": ways}, {f"guided_{way}": value}):
        post(http, COMPLETIONS, prompt="a", **body)
        requested = last(driver)
        post(http, CHAT, messages=HELLO, **body, seed=requested.seed)
        assert last(driver) == requested
        assert all(fits(driver, answer) for answer in good)
        assert not any(fits(driver, answer) for answer in bad)


def test_any_object(http: httpx.Client, driver: FakeDriver) -> None:
    post(http, COMPLETIONS, prompt="a", structured_outputs={"json_object": True})
    assert fits(driver, '{"x": [1]}')
    assert not fits(driver, "[1]")
    post(http, COMPLETIONS, prompt="a", structured_outputs=None, guided_choice=[])
    assert last(driver).constraint == ""


@pytest.mark.parametrize(
    ("extra", "param", "words"),
    [
        ({"structured_outputs": {}}, "structured_outputs", "exactly one of"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs",
         "2 are given"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regex": ""}}, "structured_outputs", "is empty"),
        ({"structured_outputs": {"regex": "(?=x)"}}, "structured_outputs", "look-around"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs", "not valid JSON"),
        ({"structured_outputs": {"json": "[1]"}}, "structured_outputs", "must be a JSON object"),
        ({"structured_outputs": {"json": {"uniqueItems": True}}}, "structured_outputs",
         "uniqueItems"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs", "structural_tag"),
        ({"guided_grammar": "start: foo"}, "guided_grammar", 'unknown name: "foo"'),
        ({"guided_grammar": "root ::= ("}, "guided_grammar", "not valid GBNF"),
        ({"guided_grammar": '{"grammars": []}'}, "guided_grammar", "must be Lark or GBNF"),
        ({"guided_grammar": 'start: <|user|> "a"'}, "guided_grammar", "special_token"),
        ({"guided_grammar": 'start: %json {"x-guidance": {"lenient": true}, "uniqueItems": true}'},
         "guided_grammar", "uniqueItems"),
        ({"guided_grammar": "start: x\nx[temperature=0.5]: /a+/"}, "guided_grammar", "temperature"),
        ({"guided_grammar": 'start: x\nx[stop="[", temperature = 1]: /a+/'}, "guided_grammar",
         "temperature"),
        ({"guided_grammar": 'start: x\nx[stop="\\"]", temperature=1]: /a+/'}, "guided_grammar",
         "temperature"),
        ({"guided_grammar": "start: x\nx[stop=/]/, temperature=1]: /a+/"}, "guided_grammar",
         "temperature"),
        ({"guided_grammar": '"' + '\\"' * 32_000}, "guided_grammar", "not"),
        ({"guided_grammar": "[" * 1_000_000}, "guided_grammar", "longer than 65536"),
        ({"guided_regex": "a" * 70_000}, "guided_regex", "longer than 65536"),
        ({"guided_regex": "a", "response_format": {"type": "json_object"}}, "guided_regex",
         "`response_format` cannot be combined with `guided_regex`"),
        ({"guided_regex": "a", "min_tokens": 3}, "guided_regex", "cannot be combined"),
        ({"guided_regex": "a", "guided_whitespace_pattern": "x"}, "guided_whitespace_pattern", ""),
    ],
)  # fmt: skip
def test_what_is_refused(
    http: httpx.Client, driver: FakeDriver, extra: dict[str, Any], param: str, words: str
) -> None:
    error = refused(http, CHAT, 400, messages=HELLO, **extra)
    assert error["param"] == param
    assert words in error["message"]
    assert driver.requests == []


class Counting(Compiler):
    """Finds everything fine, and counts."""

    def __init__(self) -> None:
        super().__init__()
        self.checked = 0

    async def check(self, task: CompileTask, info: EngineInfo) -> CompileResult:
        self.checked += 1
        return CompileResult(task.text)


def test_results_are_cached_within_bounds(driver: FakeDriver) -> None:
    many = [Constraint("x", grammar=f'start: "{index}"') for index in range(400)]

    async def ask() -> int:
        compiler = Counting()
        for requested in (many[0], *many, many[-1], many[0]):
            for _ in range(2):
                assert await compiler.compiled(requested, driver.info) is requested
        return compiler.checked

    assert asyncio.run(ask()) == 401  # the first was forgotten in between


def test_equal_concurrent_tasks_share_one_check(driver: FakeDriver) -> None:
    requested = Constraint("x", grammar='start: "a"')

    async def ask() -> int:
        compiler = Counting()
        first = asyncio.create_task(compiler.compiled(requested, driver.info))
        others = [asyncio.create_task(compiler.compiled(requested, driver.info)) for _ in range(9)]
        await asyncio.sleep(0)
        first.cancel()  # A client that leaves does not affect the others.
        assert await asyncio.gather(*others) == [requested] * 9
        return compiler.checked

    assert asyncio.run(ask()) == 1
