import json
from typing import Any

import httpx
import msgspec
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import ErrorKind, Failed
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.conftest import Server, spoken
from tests.fakes import FakeDriver, Unreliable, deaf, token_id


def _post(http: httpx.Client, path: str = "/generate", **parameters: object) -> Any:
    reply = http.post(path, json={"inputs": "hello", "parameters": parameters})
    assert reply.status_code == 200, reply.text
    return reply.json()


def _stream(http: httpx.Client, **parameters: object) -> list[dict[str, Any]]:
    body = {"inputs": "hello", "parameters": parameters}
    reply = http.post("/generate_stream", json=body)
    assert reply.status_code == 200, reply.text
    assert "[DONE]" not in reply.text
    *events, nothing = reply.text.split("\n\n")
    assert nothing == ""
    return [json.loads(event.removeprefix("data: ")) for event in events]


def _refused(http: httpx.Client, status: int, **parameters: object) -> dict[str, str]:
    """The error of a request that is refused, the same on all three routes."""
    body = {"inputs": "hello", "parameters": parameters}
    replies = [http.post(path, json=body) for path in ("/generate", "/generate_stream", "/")]
    assert [reply.status_code for reply in replies] == [status] * 3, replies[0].text
    assert replies[0].json() == replies[1].json() == replies[2].json()
    error: dict[str, str] = replies[0].json()
    assert set(error) == {"error", "error_type", "code"}
    return error


def _expected(driver: FakeDriver) -> tuple[list[int], str]:
    request = driver.requests[-1]
    ids = driver.answer(request.sequences[0], request.adapter)
    return ids, spoken(driver)


def test_three_routes_say_the_same(http: httpx.Client, driver: FakeDriver) -> None:
    for link in (deaf, Unreliable(), driver.link):
        driver.link = link
        whole = _post(http, max_new_tokens=40)
        ids, text = _expected(driver)
        assert whole == {"generated_text": text}
        assert _post(http, "/", max_new_tokens=40) == [whole]
        events = _stream(http, max_new_tokens=40)
        assert [event["token"]["id"] for event in events] == ids
        assert "".join(event["token"]["text"] for event in events) == text
        assert [event["generated_text"] for event in events] == [None] * 39 + [text]
        assert all(event["details"] is None for event in events)
        body = {"inputs": "hello", "parameters": {"max_new_tokens": 40}, "stream": True}
        assert http.post("/", json=body).text.count("data: ") == 40


def test_details(http: httpx.Client, driver: FakeDriver) -> None:
    whole = _post(http, max_new_tokens=30, details=True)
    ids, text = _expected(driver)
    details = whole["details"]
    tokens = details.pop("tokens")
    num_prompt = len(driver.requests[-1].sequences[0].prompt)
    expected = {
        "finish_reason": "length", "prompt_tokens": num_prompt, "generated_tokens": 30,
        "skipped_tokens": 0, "seed": None,
    }  # fmt: skip
    assert details == {**expected, "prefill": []}
    assert [token["id"] for token in tokens] == ids
    assert "".join(token["text"] for token in tokens) == text
    assert [token["logprob"] for token in tokens] == [-(id % 8) / 4 for id in ids]
    assert set(tokens[0]) == {"id", "text", "logprob", "special", "skipped"}
    events = _stream(http, max_new_tokens=30, details=True)
    assert [event["token"] for event in events] == tokens
    assert events[-1]["details"] == expected
    assert driver.requests[-1].sequences[0].sampling.logprobs == 0


@pytest.mark.parametrize("link", [deaf, Unreliable(), None])
def test_eos_is_a_special_token(http: httpx.Client, driver: FakeDriver, link: Any) -> None:
    driver.link = link or driver.link
    driver.replies[None] = "café"
    events = _stream(http, max_new_tokens=50, details=True)
    assert (events[-1]["token"]["text"], events[-1]["token"]["special"]) == ("</s>", True)
    assert events[-1]["generated_text"] == "café"
    assert events[-1]["details"]["finish_reason"] == "eos_token"
    assert not any(event["token"]["special"] for event in events[:-1])
    assert _post(http, details=True)["details"]["tokens"][-1]["text"] == "</s>"
    _post(http, ignore_eos_token=True)
    assert driver.requests[-1].sequences[0].stopping.stop_token_ids == ()


@pytest.mark.parametrize("stop", [["END"], ["; caf"], ["never", "é E"], ["🚀 fl"], ["ND"]])
def test_stop_strings_stay_in_the_text(
    http: httpx.Client, driver: FakeDriver, stop: list[str]
) -> None:
    events = _stream(http, max_new_tokens=300, stop=stop, details=True)
    [(index, at)] = driver.finishes
    _, full = _expected(driver)
    expected = full[: full.index(stop[-1]) + len(stop[-1])]
    assert events[-1]["generated_text"] == expected
    assert "".join(event["token"]["text"] for event in events) == expected
    assert (index, at) == (0, len(events))
    assert events[-1]["details"]["finish_reason"] == "stop_sequence"
    assert events[-1]["details"]["generated_tokens"] == at
    assert _post(http, max_new_tokens=300, stop=stop)["generated_text"] == expected
    driver.link = deaf
    details = _post(http, max_new_tokens=300, stop=stop, details=True)["details"]
    assert (details["generated_tokens"], details["finish_reason"]) == (at, "stop_sequence")
    assert len(details["tokens"]) == at


def test_the_prompt_can_come_back(http: httpx.Client, driver: FakeDriver) -> None:
    whole = _post(http, max_new_tokens=5, return_full_text=True)
    text = "hello" + _expected(driver)[1]
    assert whole["generated_text"] == text
    events = _stream(http, max_new_tokens=5, return_full_text=True)
    assert events[-1]["generated_text"] == text


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({}, (0.0, 0, 1.0)),
        ({"temperature": 1.0}, (0.0, 0, 1.0)),
        ({"temperature": 0.0, "do_sample": True, "top_k": 5}, (0.0, 0, 1.0)),
        ({"top_p": 1.0}, (0.0, 0, 1.0)),
        ({"do_sample": True}, (1.0, 0, 1.0)),
        ({"temperature": 0.7}, (0.7, 0, 1.0)),
        ({"top_k": 5}, (1.0, 5, 1.0)),
        ({"top_p": 0.5}, (1.0, 0, 0.5)),
        ({"typical_p": 0.5}, (1.0, 0, 1.0)),
        ({"typical_p": 1.0, "repetition_penalty": 1.2}, (0.0, 0, 1.0)),
        ({"temperature": 1.0, "do_sample": True, "top_k": 3, "top_p": 0.9}, (1.0, 3, 0.9)),
    ],
)
def test_when_tokens_are_drawn(
    http: httpx.Client, driver: FakeDriver, given: Any, expected: tuple[float, int, float]
) -> None:
    details = _post(http, details=True, max_new_tokens=2, **given)["details"]
    sampling = driver.requests[-1].sequences[0].sampling
    assert (sampling.temperature, sampling.top_k, sampling.top_p) == expected
    drawn = expected[0] > 0
    assert details["seed"] == (sampling.seed if drawn else None)
    _post(http, seed=11, **given)
    assert driver.requests[-1].sequences[0].sampling.seed == 11


def test_what_is_left_is_the_default_length(http: httpx.Client, driver: FakeDriver) -> None:
    _post(http)
    sequence = driver.requests[-1].sequences[0]
    assert sequence.stopping.max_new_tokens == 512 - len(sequence.prompt)


def test_adapters_are_named(http: httpx.Client, driver: FakeDriver) -> None:
    for given, expected in (
        ({}, None),
        ({"adapter_id": ""}, None),
        ({"adapter_id": "org/tiny-base"}, None),
        ({"adapter_id": "a/b"}, AdapterReference(AdapterSource.HUB, "a/b")),
        ({"adapter_id": "a/b", "adapter_source": "LOCAL"},
         AdapterReference(AdapterSource.LOCAL, "a/b")),
        ({"adapter_id": "a/b@v1"}, AdapterReference(AdapterSource.HUB, "a/b", "v1")),
    ):  # fmt: skip
        _post(http, max_new_tokens=1, **given)
        assert driver.requests[-1].adapter == expected


def test_the_token_in_the_body_goes_before_the_header(
    http: httpx.Client, driver: FakeDriver
) -> None:
    headers = {"authorization": "Bearer hf_header"}
    for parameters, expected in (({}, "hf_header"), ({"api_token": "hf_body"}, "hf_body")):
        body = {"inputs": "a", "parameters": {"max_new_tokens": 1, **parameters}}
        http.post("/generate", json=body, headers=headers)
        assert driver.requests[-1].api_token == expected


@pytest.mark.parametrize(
    ("given", "words"),
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
         "`` in `ids` names no adapter: the base model is always there"),
        ({"merged_adapters": {"ids": ["a" * 1000] * 3, "weights": [1, 1, 1]}},
         "the `ids` are longer than 2048 characters together"),
        ({"response_format": {"type": "json_schema"}},
         "`response_format` of type json_schema needs a schema"),
        ({"adapter_id": "a", "adapter_source": "pbase"},
         "`adapter_source` must be one of hub, local, s3. Given: pbase"),
    ],
)  # fmt: skip
def test_bad_input_has_loraxs_words(
    http: httpx.Client, driver: FakeDriver, given: dict[str, Any], words: str
) -> None:
    error = _refused(http, 422, **given)
    assert error["error"] == f"Input validation error: {words}"
    assert (error["error_type"], error["code"]) == ("validation", "validation")
    assert driver.requests == []


@pytest.mark.parametrize(
    ("path", "given", "words"),
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
def test_what_streaming_changes(
    http: httpx.Client, path: str, given: dict[str, Any], words: str
) -> None:
    reply = http.post(path, json={"inputs": "hello", "parameters": given})
    assert reply.status_code == 422
    assert reply.json()["error"] == f"Input validation error: {words}"


def test_a_server_may_have_no_best_of(server: Server, http: httpx.Client) -> None:
    server.fresh_app(IngressSettings(max_best_of=1))
    error = _refused(http, 422, best_of=2, do_sample=True)
    words = "`best_of` != 1 is not allowed for this endpoint"
    assert error["error"] == f"Input validation error: {words}"
    reply = http.post("/generate", json={"inputs": "a", "parameters": {"best_of": 1}})
    assert reply.status_code == 200


def test_inputs_have_limits(http: httpx.Client, driver: FakeDriver) -> None:
    for inputs, words in (
        ("", "`inputs` cannot be empty"),
        ("x " * 252, "`inputs` must have less than 500 tokens. Given: 505"),
    ):
        reply = http.post("/generate", json={"inputs": inputs})
        assert reply.status_code == 422
        assert reply.json()["error"] == f"Input validation error: {words}"
    assert driver.requests == []


def test_neutral_values_of_what_is_not_built_are_fine(http: httpx.Client) -> None:
    _post(
        http, best_of=1, repetition_penalty=1, frequency_penalty=0.0, presence_penalty=0,
        typical_p=1.0, watermark=False, truncate=None, decoder_input_details=False,
        return_k_alternatives=None, response_format={"type": "text"}, merged_adapters=None,
        apply_chat_template=True, max_new_tokens=1, something_new=3,
    )  # fmt: skip


@pytest.mark.parametrize("kind", [kind for kind in ErrorKind if kind.value.startswith("adapter")])
def test_adapter_failures_are_424_with_a_code(
    http: httpx.Client, driver: FakeDriver, kind: ErrorKind
) -> None:
    driver.faults["bad"] = Failed(kind, "no such luck")
    assert _refused(http, 424, adapter_id="bad") == {
        "error": "Request failed during generation: no such luck",
        "error_type": "generation",
        "code": kind.value,
    }


def test_overload(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full", retry_after_s=7.0)
    error = _refused(http, 429)
    assert (error["error"], error["error_type"]) == ("Model is overloaded", "overloaded")
    assert http.post("/generate", json={"inputs": "a"}).headers["retry-after"] == "7"


def test_a_failure_on_the_way_is_the_last_event(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.GENERATION, "gone")
    driver.fail_after = 3
    reply = http.post("/generate_stream", json={"inputs": "a"})
    assert reply.status_code == 200
    last = json.loads(reply.text.split("\n\n")[-2].removeprefix("data: "))
    assert last["error"] == "Request failed during generation: gone"
    assert last["error_type"] == "generation"


def test_headers_of_a_whole_reply(http: httpx.Client, driver: FakeDriver) -> None:
    parameters = {"max_new_tokens": 4, "adapter_id": "pö\net", "adapter_source": "local"}
    for path in ("/", "/generate"):
        reply = http.post(path, json={"inputs": "héllo", "parameters": parameters})
        headers = reply.headers
        num_prompt = len(driver.requests[-1].sequences[0].prompt)
        assert headers["x-compute-type"] == "cpu"
        assert headers["x-compute-characters"] == "5"
        assert headers["x-prompt-tokens"] == str(num_prompt)
        assert headers["x-generated-tokens"] == "4"
        assert headers["x-total-tokens"] == str(num_prompt + 4)
        assert headers["x-queue-time"] == "250"
        assert headers["x-model-id"] == "org/tiny-base"
        assert headers["x-adapter-id"] == "p%C3%B6%0Aet"
        assert headers["x-adapter-source"] == "local"
        for name in ("compute", "total", "validation", "inference"):
            assert headers[f"x-{name}-time"].isdigit()
        for name in ("time-per-token", "time-to-first-token", "time-per-output-token"):
            assert headers[f"x-{name}"].isdigit()


def test_headers_of_a_stream(http: httpx.Client) -> None:
    parameters = {"max_new_tokens": 4, "adapter_id": "\u0007 é"}
    reply = http.post("/generate_stream", json={"inputs": "hello", "parameters": parameters})
    assert reply.headers["x-accel-buffering"] == "no"
    assert reply.headers["x-compute-characters"] == "5"
    assert reply.headers["x-adapter-id"] == "%07%20%C3%A9"
    assert "x-total-time" not in reply.headers


def test_tokenize(http: httpx.Client, driver: FakeDriver) -> None:
    tokens = http.post("/tokenize", json={"inputs": "é END!"}).json()
    assert tokens[0] == {
        "id": token_id(driver.tokenizer, "<s>"),
        "text": "",
        "start": 0,
        "stop": 0,
    }
    assert [token["text"] for token in tokens[1:]] == ["é", " END", "!"]
    plain = http.post("/tokenize", json={"inputs": "é", "add_special_tokens": False}).json()
    assert len(plain) == 1


def test_a_list_of_tokens_has_a_bound(http: httpx.Client) -> None:
    assert len(http.post("/tokenize", json={"inputs": "a" * 600}).json()) == 601
    reply = http.post("/tokenize", json={"inputs": "a" * 65_537})
    assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")
    assert "at most 65536 characters. Given: 65537" in reply.json()["error"]


def test_info_and_health_follow_the_engine(http: httpx.Client, server: Server) -> None:
    info = http.get("/info").json()
    assert info["model_id"] == "org/tiny-base"
    assert info["max_total_tokens"] == 512
    assert info["max_stop_sequences"] == 4
    for path in ("/", "/health", "/ping"):
        assert http.get(path).status_code == 200
    assert server.driver.descriptions == 1
    server.fresh_app()
    server.driver.info = msgspec.structs.replace(server.driver.info, healthy=False)
    for path in ("/", "/health"):
        reply = http.get(path)
        assert reply.status_code == 503
        assert reply.json() == {"error": "unhealthy", "error_type": "healthcheck"}
    server.fresh_app()
    server.driver.broken = ConnectionError("gone")
    assert http.get("/health").status_code == 503
    assert http.get("/info").status_code == 503


@pytest.mark.parametrize(
    "body", [b"{", b"", b"[1]", b"null", b'{"inputs": 5}', b'{"inputs": "\\ud800"}']
)
def test_bodies_that_are_no_request(http: httpx.Client, body: bytes) -> None:
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
