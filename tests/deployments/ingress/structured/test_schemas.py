"""`response_format` in both dialects: what reaches the driver, and what is refused before."""

import json
from typing import Any

import httpx
import msgspec
import pytest

from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post, refused
from tests.fakes import FakeDriver

pytest.importorskip("llguidance")

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
# As pydantic writes a union of models whose discriminator has a default: it is not required.
KINDS = [{"type": "object", "properties": {"kind": {"const": kind}}} for kind in "ab"]
UNION = {"oneOf": KINDS, "discriminator": {"propertyName": "kind"}}
OPENAI = {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": SCHEMA}}


def last(driver: FakeDriver) -> Any:
    text = driver.requests[-1].sequences[0].sampling.json_schema
    if not text:
        return None
    schema = json.loads(text)
    assert schema.pop("x-guidance")["lenient"] is False
    return schema


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (OPENAI, SCHEMA),
        ({"type": "json_object"}, {"type": "object"}),
        ({"type": "json_object", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object", "schema": {**SCHEMA, "x-guidance": {"lenient": True}}}, SCHEMA),
        ({"type": "JsonSchema", "schema": SCHEMA}, SCHEMA),
        ({"type": "json_object", "schema": UNION}, {**UNION, "required": ["kind"]}),
        ({"type": "text"}, None),
        ({"type": "Text", "schema": SCHEMA}, None),
        (None, None),
    ],
)
def test_schemas_reach_the_driver(
    http: httpx.Client, driver: FakeDriver, given: object, expected: object
) -> None:
    post(http, COMPLETIONS, prompt="a", response_format=given)
    assert last(driver) == expected
    post(http, CHAT, messages=HELLO, response_format=given, temperature=0)
    assert last(driver) == expected
    for path in ("/generate", "/generate_stream"):
        body = {"inputs": "a", "parameters": {"response_format": given}}
        assert http.post(path, json=body).status_code == 200
        assert last(driver) == expected


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"type": "strange"}, "Invalid type: strange"),
        ({"$ref": "http://127.0.0.1/x"}, "Default retriever does not fetch resources"),
        ({"type": "string", "pattern": "(?=x)"}, "the schema is not supported"),
        ({"oneOf": KINDS}, "oneOf constraints are not supported. Write anyOf, or give each"),
        ({"$ref": "#"}, "the schema is not supported: no answer fits it"),
        ({"description": "x" * 70_000}, "longer than 65536 characters"),
        ({"type": "integer", "minimum": 1e19, "maximum": 1e20}, "`minimum` has 1e+19, which is"),
        ({"items": {"type": "integer", "exclusiveMaximum": -(2**63)}}, "`exclusiveMaximum` has"),
        ({"properties": {"a": {"enum": [1, [2**64]]}}}, "`enum` has 18446744073709551616, which"),
    ],
)
def test_schemas_that_cannot_be_compiled(
    http: httpx.Client, driver: FakeDriver, schema: dict[str, Any], words: str
) -> None:
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    error = refused(http, CHAT, 400, messages=HELLO, response_format=given)
    assert error["param"] == "response_format"
    assert words in error["message"]
    assert driver.requests == []


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "integer", "minimum": 0, "maximum": 2**64 - 1},
        {"type": "integer", "minimum": -1e18, "maximum": 1e30},
        {"enum": [2**64 - 1, -(2**62), 1.5]},
        {"type": "object", "properties": {"minimum": {"const": 5}}},
    ],
)
def test_large_numbers_that_can_be_enforced(
    http: httpx.Client, driver: FakeDriver, schema: dict[str, Any]
) -> None:
    given = {"type": "json_schema", "json_schema": {"schema": schema}}
    post(http, CHAT, messages=HELLO, response_format=given)
    assert len(driver.requests) == 1


def test_blanks_between_tokens_are_few(http: httpx.Client, driver: FakeDriver) -> None:
    """A model that likes blanks must come to an end."""
    from llguidance import LLMatcher, LLTokenizer

    post(http, COMPLETIONS, prompt="a", response_format={"type": "json_object"})
    text = driver.requests[-1].sequences[0].sampling.json_schema
    tokenizer = LLTokenizer(f"{driver.info.tokenizer}/tokenizer.json")
    grammar = LLMatcher.grammar_from_json_schema(text)
    for answer, fits in (('{"a": {"b":1}}', True), ('{\n  "a": 1\n}', True), ('{"a":  1}', False),
                         ('{\n\n"a": 1}', False), ('{"a":\t1}', False)):  # fmt: skip
        ids = driver.tokenizer.encode(answer, add_special_tokens=False).ids
        matcher = LLMatcher(tokenizer, grammar)
        assert (matcher.try_consume_tokens(ids) == len(ids)) == fits, answer


def test_half_surrogate_pairs_break_nothing(http: httpx.Client) -> None:
    given = b'{"type": "json_object", "schema": {"const": "\\ud800", "\\ud800": 1}}'
    body = b'{"model": "tiny", "prompt": "a", "response_format": ' + given + b"}"
    reply = http.post(COMPLETIONS, content=body, headers={"content-type": "application/json"})
    assert reply.status_code in (200, 400), reply.text


def test_deep_schemas_break_nothing(http: httpx.Client) -> None:
    schema: dict[str, Any] = {"type": "string"}
    for _ in range(300):
        schema = {"type": "array", "items": schema}
    given = {"type": "json_object", "schema": schema}
    body = {"model": "tiny", "prompt": "a", "response_format": given}
    assert http.post(COMPLETIONS, json=body).status_code in (200, 400)
    assert http.get("/health").status_code == 200


@pytest.mark.parametrize("extra", [{"ignore_eos": True}, {"ignore_eos_token": True},
                                   {"min_tokens": 2}])  # fmt: skip
def test_answers_must_be_able_to_end(
    http: httpx.Client, driver: FakeDriver, extra: dict[str, Any]
) -> None:
    error = refused(http, CHAT, 400, messages=HELLO, response_format=OPENAI, **extra)
    assert "cannot be combined" in error["message"]
    parameters = {"response_format": {"type": "json_object"}, "ignore_eos_token": True}
    reply = http.post("/generate", json={"inputs": "a", "parameters": parameters})
    assert reply.status_code == 422
    assert driver.requests == []


def test_a_model_without_an_end_token_refuses(http: httpx.Client, server: Server) -> None:
    server.driver.info = msgspec.structs.replace(server.driver.info, stop_token_ids=())
    error = refused(http, CHAT, 400, messages=HELLO, response_format=OPENAI)
    assert error["code"] == "unsupported_parameter"
    assert "no token that ends" in error["message"]


def test_a_server_without_the_compiler_says_so(
    http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("deployments.ingress.structured.constraints.find_spec", lambda name: None)
    error = refused(http, CHAT, 400, messages=HELLO, response_format=OPENAI)
    assert "pip install llguidance" in error["message"]
