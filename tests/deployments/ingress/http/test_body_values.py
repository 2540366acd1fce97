"""Values of the wrong JSON type are refused with the field's name, on every route."""

from typing import Any

import httpx
import pytest

from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post
from tests.fakes import FakeDriver

_TINY: dict[str, Any] = {"model": "tiny"}
_COMPLETION = {**_TINY, "prompt": "a"}
_CHAT = {**_TINY, "messages": HELLO}
_MESSAGE = {**_CHAT, "max_tokens": 4}
_MERGE = {"ids": ["a", "b"], "weights": [1, True]}


def at(path: str, body: dict[str, Any], field: str, *values: object) -> list[Any]:
    return [(path, body, field, value) for value in values]


def native(name: str, *values: object, path: str = "/generate") -> list[Any]:
    body: dict[str, Any] = {"inputs": "a"}
    return [(path, {**body, "parameters": {name: v}}, f"parameters.{name}", v) for v in values]


WRONG = [
    *at(COMPLETIONS, _COMPLETION, "max_tokens", True, "5", 1.5, [5]),
    *at(COMPLETIONS, _COMPLETION, "temperature", True, "0.5"),
    *at(COMPLETIONS, _COMPLETION, "logprobs", True),
    *at(COMPLETIONS, _COMPLETION, "echo", 1, "true"),
    *at(COMPLETIONS, _COMPLETION, "seed", False),
    *at(CHAT, _CHAT, "max_completion_tokens", True, "5"),
    *at(CHAT, _CHAT, "n", True),
    *at(CHAT, _CHAT, "logprobs", 2),
    *at(CHAT, _CHAT, "stream", 1, "yes"),
    *at(CHAT, _CHAT, "parallel_tool_calls", "false"),
    *at("/v1/responses", {**_TINY, "input": "a"}, "max_output_tokens", True, "5"),
    *at("/v1/responses", {**_TINY, "input": "a"}, "store", "true"),
    *at("/v1/responses", {**_TINY, "input": "a"}, "seed", True),
    *at("/v1/messages", _MESSAGE, "max_tokens", True, "4"),
    *at("/v1/messages", _MESSAGE, "top_k", True),
    *at("/v1/messages", _MESSAGE, "temperature", "1"),
    *at("/v1/embeddings", {**_TINY, "input": "a"}, "dimensions", True),
    *at("/v1/embeddings", {**_TINY, "input": "a"}, "normalize", "no"),
    *at("/rerank", {**_TINY, "query": "a", "documents": ["b"]}, "top_n", True, "1"),
    *native("max_new_tokens", True, "5"),
    *native("temperature", True, "0.5", path="/generate_stream"),
    *native("details", 1, "true"),
    *native("best_of", True),
    *native("seed", "7"),
    *at("/", {"inputs": "a"}, "stream", 1),
    *at("/tokenize", {"inputs": "a"}, "add_special_tokens", "false"),
    *at("/v1/adapters", {"id": "a"}, "pin", 1),
    *at("/v1/load_lora_adapter", {"lora_name": "a", "lora_path": "b"}, "load_inplace", "yes"),
    (COMPLETIONS, {**_COMPLETION, "logit_bias": {"5": True}}, "logit_bias.5", True),
    (CHAT, {**_CHAT, "stop_token_ids": [3, True]}, "stop_token_ids.1", True),
    (CHAT, {**_CHAT, "stream_options": {"include_usage": 1}}, "stream_options.include_usage", 1),
    (CHAT, {**_CHAT, "merged_adapters": _MERGE}, "merged_adapters.weights.1", True),
]


@pytest.mark.parametrize(("path", "body", "field", "value"), WRONG)
def test_a_value_of_another_type_is_refused(
    http: httpx.Client,
    driver: FakeDriver,
    path: str,
    body: dict[str, Any],
    field: str,
    value: object,
) -> None:
    given = body if "." in field else {**body, field: value}
    reply = http.post(path, json=given)
    assert reply.status_code in (400, 422)
    assert f"`{field}`: Input should be a valid " in reply.text
    assert driver.requests == []


def test_whole_numbers_may_have_a_point_and_numbers_none(
    http: httpx.Client, driver: FakeDriver
) -> None:
    fields = {"max_tokens": 2.0, "seed": 7.0, "top_k": 3.0, "stop_token_ids": [9.0]}
    post(http, COMPLETIONS, prompt="a", temperature=1, logit_bias={"5": 2}, **fields)
    (sequence,) = driver.requests[-1].sequences
    assert (sequence.stopping.max_new_tokens, sequence.sampling.seed) == (2, 7)
    assert (sequence.sampling.top_k, sequence.sampling.logit_bias) == (3, ((5, 2.0),))
    assert 9 in sequence.stopping.stop_token_ids
    reply = http.post("/generate", json={"inputs": "a", "parameters": {"max_new_tokens": 2.0}})
    assert reply.status_code == 200
    merge = {"ids": ["a", "b"], "weights": [1, 2], "merge_strategy": "linear"}
    post(http, COMPLETIONS, prompt="a", merged_adapters=merge)
