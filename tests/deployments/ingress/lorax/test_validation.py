"""LoRAX's routes: refused requests and their messages."""

from typing import Any

import httpx
import msgspec
import pytest

from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.lorax.lorax_http import post, refused
from tests.fakes import FakeDriver


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"adapter_id": "a", "merged_adapters": {"ids": ["b"], "weights": [1]}},
         "at most one of `adapter_id` or `adapters` may be provided"),
        ({"merged_adapters": {"ids": []}},
         "at least one adapter ID must be provided when setting `adapters`"),
        ({"merged_adapters": {"ids": ["a"], "weights": []}},
         "number of adapter IDs must match number of adapter weights"),
        ({"temperature": -1}, "`temperature` must be non-negative"),
        ({"temperature": -1, "top_k": 0}, "`temperature` must be non-negative"),
        ({"repetition_penalty": 0}, "`repetition_penalty` must be strictly positive"),
        ({"frequency_penalty": 3}, "`frequency_penalty` must be >= -2.0 and <= 2.0"),
        ({"presence_penalty": -3}, "`presence_penalty` must be >= -2.0 and <= 2.0"),
        ({"top_p": 0}, "`top_p` must be > 0.0 and < 1.0"),
        ({"top_p": 1.5}, "`top_p` must be > 0.0 and < 1.0"),
        ({"typical_p": 0}, "`typical_p` must be > 0.0 and < 1.0"),
        ({"top_k": 0}, "`top_k` must be strictly positive"),
        ({"return_k_alternatives": 0}, "`return_k_alternatives` must be strictly positive"),
        ({"max_new_tokens": 0}, "`max_new_tokens` must be strictly positive"),
        ({"stop": list("abcde")}, "`stop` supports up to 4 stop sequences. Given: 5"),
        ({"stop": [""]}, "`stop` sequences must have 1 to 1024 characters"),
        ({"stop": ["a", "b" * 1025]}, "`stop` sequences must have 1 to 1024 characters"),
        ({"best_of": 3}, "`best_of` must be > 0 and <= 2. Given: 3"),
        ({"best_of": 0}, "`best_of` must be > 0 and <= 2. Given: 0"),
        ({"max_new_tokens": 600}, "`inputs` tokens + `max_new_tokens` must be <= 512. "
         "Given: 5 `inputs` tokens and 600 `max_new_tokens`"),
        ({"truncate": 0}, "`truncate` must be strictly positive and less than 500. Given: 0"),
        ({"truncate": 501}, "`truncate` must be strictly positive and less than 500. Given: 501"),
        ({"return_k_alternatives": 21}, "`return_k_alternatives` must be <= 20. Given: 21"),
        ({"merged_adapters": {"ids": ["a", "b"], "weights": [1, 1], "density": 1.5}},
         "`density` must be >= 0.0 and <= 1.0. Given: 1.5"),
        ({"merged_adapters": {"ids": ["a", "b"], "weights": [1, 1], "merge_strategy": "ties"}},
         "`density` must be > 0.0 and <= 1.0 with `merge_strategy` ties: it is the fraction of "
         "each adapter's values that is kept"),
        ({"merged_adapters": {"ids": ["a", ""], "weights": [1, 1]}},
         "`` in `ids` names no adapter: a merge always has the base model"),
        ({"merged_adapters": {"ids": ["a" * 1000] * 3, "weights": [1, 1, 1]}},
         "the `ids` are longer than 2048 characters together"),
        ({"response_format": {"type": "json_schema"}},
         "`response_format` of type json_schema needs a schema"),
        ({"adapter_id": "a", "adapter_source": "pbase"},
         "`adapter_source` must be one of hub, local, s3, pushed. Given: pbase"),
    ],
)  # fmt: skip
def test_bad_input_has_the_messages_of_lorax(
    http: httpx.Client, driver: FakeDriver, given: dict[str, Any], message: str
) -> None:
    error = refused(http, 422, **given)
    assert error["error"] == f"Input validation error: {message}"
    assert (error["error_type"], error["code"]) == ("validation", "validation")
    assert driver.requests == []


@pytest.mark.parametrize(
    ("path", "given", "message"),
    [
        ("/generate", {"best_of": 2}, "you must use sampling when `best_of` is > 1"),
        ("/generate", {"best_of": 2, "do_sample": True, "seed": 1},
         "`seed` must not be set when `best_of` > 1"),
        ("/generate_stream", {"best_of": 2, "do_sample": True},
         "`best_of` != 1 is not supported when streaming tokens"),
        ("/generate_stream", {"decoder_input_details": True},
         "`decoder_input_details` == true is not supported when streaming tokens"),
    ],
)  # fmt: skip
def test_parameters_that_cannot_be_streamed_or_combined(
    http: httpx.Client, path: str, given: dict[str, Any], message: str
) -> None:
    reply = http.post(path, json={"inputs": "hello", "parameters": given})
    assert reply.status_code == 422
    assert reply.json()["error"] == f"Input validation error: {message}"


def test_best_of_can_be_switched_off(server: Server, http: httpx.Client) -> None:
    server.fresh_app(IngressSettings(max_best_of=1))
    error = refused(http, 422, best_of=2, do_sample=True)
    message = "`best_of` != 1 is not allowed for this endpoint"
    assert error["error"] == f"Input validation error: {message}"
    reply = http.post("/generate", json={"inputs": "a", "parameters": {"best_of": 1}})
    assert reply.status_code == 200


def test_inputs_have_limits(http: httpx.Client, driver: FakeDriver) -> None:
    for inputs, message in (
        ("", "`inputs` cannot be empty"),
        ("x " * 252, "`inputs` must have less than 500 tokens. Given: 505"),
    ):
        reply = http.post("/generate", json={"inputs": inputs})
        assert reply.status_code == 422
        assert reply.json()["error"] == f"Input validation error: {message}"
    assert driver.requests == []


def test_neutral_values_and_unknown_fields_pass(http: httpx.Client) -> None:
    post(
        http, best_of=1, repetition_penalty=1, frequency_penalty=0.0, presence_penalty=0,
        typical_p=1.0, watermark=False, truncate=None, decoder_input_details=False,
        return_k_alternatives=None, response_format={"type": "text"}, merged_adapters=None,
        apply_chat_template=True, max_new_tokens=1, something_new=3,
    )  # fmt: skip


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1]", b"null", b'{"inputs": 5}', b'{"inputs": "\\ud800"}']
)
def test_malformed_bodies(http: httpx.Client, body: bytes) -> None:
    headers = {"content-type": "application/json"}
    for path in ("/", "/generate", "/generate_stream", "/tokenize"):
        reply = http.post(path, content=body, headers=headers)
        assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")


def test_unknown_routes(http: httpx.Client) -> None:
    reply = http.post("/unknown")
    assert (reply.status_code, reply.json()["error"]) == (404, "Not Found")


@pytest.mark.parametrize("path", ["/generate", "/generate_stream", "/", "/embed"])
def test_tokens_that_the_model_does_not_have_are_refused(
    http: httpx.Client, driver: FakeDriver, path: str
) -> None:
    """A tokenizer may have more tokens than the model has rows for."""
    driver.info = msgspec.structs.replace(driver.info, vocab_size=3)
    reply = http.post(path, json={"inputs": "hello"})
    assert reply.status_code == 422, reply.text
    assert "the model has 3" in reply.json()["error"]
    assert driver.requests == []
