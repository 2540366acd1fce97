"""What holds for completions and chat completions alike."""

import json
from collections.abc import Mapping
from typing import Any

import httpx
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.conftest import Server, spoken
from tests.deployments.ingress.openai.openai_http import (
    CHAT,
    COMPLETIONS,
    HELLO,
    post,
    refused,
    stream,
    texts_of,
)
from tests.fakes import FakeDriver, Unreliable, deaf


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "hello"}),
                                              (CHAT, {"messages": HELLO})])  # fmt: skip
class TestBothRoutes:
    def test_whole_and_streamed_answers_are_equal(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        for link in (deaf, Unreliable(), driver.link):
            driver.link = link
            whole = post(http, path, **prompt, max_tokens=40, temperature=0)
            chunks = stream(http, path, **prompt, max_tokens=40, temperature=0)
            choice = whole["choices"][0]
            text = choice["text"] if path == COMPLETIONS else choice["message"]["content"]
            assert text == texts_of(chunks)[0] == spoken(driver)
            assert choice["finish_reason"] == "length"
            reasons = [c["finish_reason"] for chunk in chunks for c in chunk["choices"]]
            assert reasons[-1] == "length"
            assert not any(reasons[:-1])

    def test_objects_are_openais(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        whole = post(http, path, **prompt, max_tokens=3)
        chunks = stream(http, path, **prompt, max_tokens=3)
        kinds = ("text_completion", "text_completion") if path == COMPLETIONS else (
            "chat.completion", "chat.completion.chunk",
        )  # fmt: skip
        assert whole["id"].startswith("cmpl-" if path == COMPLETIONS else "chatcmpl-")
        assert whole["object"] == kinds[0]
        assert isinstance(whole["created"], int)
        assert {chunk["object"] for chunk in chunks} == {kinds[1]}
        assert len({chunk["id"] for chunk in chunks}) == 1
        assert {chunk["model"] for chunk in [whole, *chunks]} == {"tiny"}
        assert all("usage" not in chunk for chunk in chunks)
        num_prompt = len(driver.requests[-1].sequences[0].prompt)
        assert whole["usage"] == {
            "prompt_tokens": num_prompt,
            "completion_tokens": 3,
            "total_tokens": num_prompt + 3,
            "prompt_tokens_details": {"cached_tokens": min(4, num_prompt)},
        }

    def test_usage_is_last_when_requested(
        self, http: httpx.Client, path: str, prompt: dict[str, Any]
    ) -> None:
        options = {"include_usage": True}
        *chunks, last = stream(http, path, **prompt, max_tokens=5, stream_options=options)
        assert all(chunk["usage"] is None for chunk in chunks)
        assert last["choices"] == []
        assert last["usage"]["completion_tokens"] == 5
        assert last["usage"]["total_tokens"] == last["usage"]["prompt_tokens"] + 5

    def test_eos_ends_with_stop_and_leaves_no_text(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        driver.replies[None] = "short"
        chunks = stream(http, path, **prompt, max_tokens=50)
        assert texts_of(chunks) == {0: "short"}
        assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
        whole = post(http, path, **prompt, max_tokens=50, ignore_eos=True)
        assert whole["choices"][0]["finish_reason"] == "length"
        assert driver.requests[-1].sequences[0].stopping.stop_token_ids == ()

    @pytest.mark.parametrize("stop", ["END", "; caf", ["never", "é E"], "🚀 fl"])
    def test_stop_strings_are_removed(
        self,
        http: httpx.Client,
        driver: FakeDriver,
        path: str,
        prompt: dict[str, Any],
        stop: str | list[str],
    ) -> None:
        """Across tokens, inside one, across the bytes of a character."""
        fields = {**prompt, "max_tokens": 300, "temperature": 0, "stop": stop}
        for _ in range(2):
            chunks = stream(http, path, **fields)
            found = stop if isinstance(stop, str) else stop[1]
            [(index, at)] = driver.finishes
            driver.finishes.clear()
            full = spoken(driver)
            assert texts_of(chunks) == {0: full[: full.index(found)]}
            assert chunks[-1]["choices"][0]["finish_reason"] == "stop"
            ids = driver.answer(driver.requests[-1].sequences[0], None)
            decode = driver.tokenizer.decode
            assert (index, found in decode(ids[:at])) == (0, True)
            assert found not in decode(ids[: at - 1])
        whole = post(http, path, **fields)
        assert whole["usage"]["completion_tokens"] == at
        driver.link = deaf
        assert post(http, path, **fields)["choices"] == whole["choices"]

    def test_choices_differ_by_seed_and_repeat_with_it(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        fields = {**prompt, "n": 3, "seed": 7, "max_tokens": 20}
        texts = texts_of(stream(http, path, **fields))
        assert sorted(texts) == [0, 1, 2]
        assert texts == texts_of(stream(http, path, **fields))
        assert texts == {index: spoken(driver, index) for index in range(3)}
        seeds = [sequence.sampling.seed for sequence in driver.requests[-1].sequences]
        assert len(set(seeds)) == 3
        assert seeds[0] == 7
        whole = post(http, path, **fields)
        assert [choice["index"] for choice in whole["choices"]] == [0, 1, 2]
        assert whole["usage"]["completion_tokens"] == 60
        assert whole["usage"]["prompt_tokens"] == len(driver.requests[-1].sequences[0].prompt)

    def test_model_names_the_adapter(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        for model in ("tiny", "org/tiny-base", ""):
            post(http, path, **prompt, model=model)
            assert driver.requests[-1].adapter is None
        reply = post(http, path, **prompt, model="local:poet@v2", max_tokens=9, temperature=0)
        assert driver.requests[-1].adapter == AdapterReference(AdapterSource.LOCAL, "poet", "v2")
        assert reply["model"] == "local:poet@v2"
        post(http, path, **prompt, model="poet", adapter_source="local", api_token="t")
        assert driver.requests[-1].adapter == AdapterReference(AdapterSource.LOCAL, "poet")
        assert driver.requests[-1].api_token == "t"

    def test_sampling_goes_to_the_driver(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        post(http, path, **prompt)
        sampling = driver.requests[-1].sequences[0].sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (1.0, 0, 1.0)
        assert sampling.logprobs == -1
        post(http, path, **prompt, temperature=0.5, top_k=9, top_p=0.4, seed=-1, min_tokens=2)
        sequence = driver.requests[-1].sequences[0]
        sampling = sequence.sampling
        assert (sampling.temperature, sampling.top_k, sampling.top_p) == (0.5, 9, 0.4)
        assert sampling.seed == 2**64 - 1
        assert sequence.stopping.min_new_tokens == 2
        assert sampling.masked_ids == sequence.stopping.stop_token_ids
        assert sampling.masked_tokens == 2
        post(http, path, **prompt, temperature=0, top_k=-1, top_p=0.4)
        assert driver.requests[-1].sequences[0].sampling.top_p == 1.0
        post(http, path, **prompt, top_p=0)
        assert 0 < driver.requests[-1].sequences[0].sampling.top_p < 1e-9

    @pytest.mark.parametrize(
        "case",
        [
            (ErrorKind.ADAPTER_NOT_FOUND, 404, "model_not_found"),
            (ErrorKind.ADAPTER_FORBIDDEN, 403, "adapter_forbidden"),
            (ErrorKind.ADAPTER_UNSUPPORTED, 400, "adapter_unsupported"),
            (ErrorKind.ADAPTER_TOO_LARGE, 400, "adapter_too_large"),
            (ErrorKind.ADAPTER_UNAVAILABLE, 503, "adapter_unavailable"),
            (ErrorKind.UNAVAILABLE, 503, "unavailable"),
            (ErrorKind.GENERATION, 500, "generation"),
        ],
    )
    def test_failures_have_their_status_also_when_streaming(
        self,
        http: httpx.Client,
        driver: FakeDriver,
        path: str,
        prompt: dict[str, Any],
        case: tuple[ErrorKind, int, str],
    ) -> None:
        kind, status, code = case
        driver.faults["bad"] = Failed(kind, "no such luck")
        error = refused(http, path, status, **prompt, model="bad")
        assert (error["code"], error["message"]) == (code, "no such luck")
        assert error["param"] == ("model" if kind.value.startswith("adapter_") else None)

    def test_overload_has_retry_after(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full", retry_after_s=2.2)
        reply = http.post(path, json={"model": "tiny", "stream": True, **prompt})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "3")
        driver.faults[None] = Failed(ErrorKind.OVERLOADED, "full")
        reply = http.post(path, json={"model": "tiny", **prompt})
        assert (reply.status_code, reply.headers["retry-after"]) == (429, "1")
        assert reply.json()["error"]["type"] == "rate_limit_error"

    def test_a_failure_in_a_stream_is_the_last_event(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        driver.faults["bad"] = Failed(ErrorKind.GENERATION, "the ranks are gone")
        driver.fail_after = 3
        reply = http.post(path, json={"model": "bad", "stream": True, **prompt})
        assert reply.status_code == 200
        *chunks, last, nothing = reply.text.split("\n\n")
        assert chunks
        assert nothing == ""
        error = json.loads(last.removeprefix("data: "))["error"]
        assert (error["message"], error["type"]) == ("the ranks are gone", "server_error")
        assert "[DONE]" not in reply.text
        assert http.post(path, json={"model": "bad", **prompt}).status_code == 500

    def test_a_broken_driver_is_a_503(
        self, http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
    ) -> None:
        post(http, path, **prompt)
        driver.broken = ConnectionError("secret host name")
        error = refused(http, path, 503, **prompt)
        assert "ConnectionError" in error["message"]
        assert "secret" not in error["message"]

    @pytest.mark.parametrize(
        "case",
        [
            ({"max_tokens": -1}, "max_tokens", "greater than"),
            ({"max_tokens": 0}, "max_tokens", None),
            ({"prompt_logprobs": 21}, "prompt_logprobs", "at most 20"),
            ({"prompt_logprobs": -1}, "prompt_logprobs", "greater than or equal to 0"),
            ({"max_tokens": 600}, None, "maximum context length is 512 tokens"),
            ({"min_tokens": 9, "max_tokens": 3}, "min_tokens", "more than max_tokens"),
            ({"temperature": -1}, "temperature", "greater than or equal to 0"),
            ({"top_p": -0.1}, "top_p", "greater than or equal to 0"),
            ({"n": 17}, "n", "at most 16"),
            ({"stop": list("abcde")}, "stop", "up to 4"),
            ({"stop": ""}, "stop", None),
            ({"stop": ["a", ""]}, "stop", "1 to 1024 characters"),
            ({"stop": "a" * 1025}, "stop", "1 to 1024 characters"),
            ({"presence_penalty": 2.5}, "presence_penalty", "less than or equal to 2"),
            ({"frequency_penalty": -3}, "frequency_penalty", "greater than or equal to -2"),
            ({"repetition_penalty": 0}, "repetition_penalty", "greater than 0"),
            ({"min_p": 1.5}, "min_p", "less than or equal to 1"),
            ({"logit_bias": {"5": 101}}, "logit_bias.5", "less than or equal to 100"),
            ({"logit_bias": {"x": 1}}, "logit_bias.x", "valid integer"),
            ({"logit_bias": {"9999": 1}}, "logit_bias", "token 9999; ids must be in"),
            ({"logit_bias": {str(i): 1 for i in range(301)}}, "logit_bias", "at most 300"),
            ({"stop_token_ids": [9999]}, "stop_token_ids", "token 9999; ids must be in"),
            ({"guideline": "be kind"}, "guideline", "not supported"),
            ({"adapter_id": "poet"}, "adapter_id", "name the adapter in `model`"),
            ({"lora_path": "poet"}, "lora_path", "name the adapter in `model`"),
            ({"merged_adapters": {"ids": ["a"]}}, "merged_adapters", "must match number"),
            (
                {"model": "a", "merged_adapters": {"ids": ["b"], "weights": [1]}},
                "merged_adapters",
                "let `model` be the base model",
            ),
            (
                {"merged_adapters": {"ids": ["a"], "weights": [1], "merge_strategy": "cat"}},
                "merged_adapters.merge_strategy",
                "'linear', 'ties', 'dare_linear' or 'dare_ties'",
            ),
            ({"response_format": {"type": "json_schema"}}, "response_format", "needs a schema"),
            ({"response_format": {"type": "regex"}}, "response_format.type", "should be 'text'"),
            ({"tools": [{"type": "function"}]}, "tools", None),
            ({"adapter_source": "pbase"}, "adapter_source", "must be one of"),
            ({"model": "local:"}, "model", "names no adapter"),
            ({"model": 5}, "model", "valid string"),
        ],
    )
    def test_bad_input_never_reaches_the_driver(
        self,
        http: httpx.Client,
        driver: FakeDriver,
        path: str,
        prompt: dict[str, Any],
        case: tuple[Mapping[str, object], str | None, str | None],
    ) -> None:
        extra, param, words = case
        error = refused(http, path, 400, **{**prompt, **extra})
        assert error["type"] == "invalid_request_error"
        assert error["param"] == (param or ("prompt" if path == COMPLETIONS else "messages"))
        assert words is None or words in error["message"]
        assert driver.requests == []

    def test_neutral_values_pass(
        self, http: httpx.Client, path: str, prompt: dict[str, Any]
    ) -> None:
        neutral = {
            "presence_penalty": 0.0, "frequency_penalty": 0, "logit_bias": {}, "tools": [],
            "response_format": {"type": "text"}, "user": "me", "metadata": {"a": "b"},
            "store": True, "stop": None, "seed": None, "n": None, "tool_choice": "none",
        }  # fmt: skip
        post(http, path, **prompt, **neutral)

    def test_no_inbox_is_left_open(
        self, http: httpx.Client, server: Server, path: str, prompt: dict[str, Any]
    ) -> None:
        stream(http, path, **prompt)
        server.driver.faults["bad"] = Failed(ErrorKind.GENERATION, "x")
        refused(http, path, 500, **prompt, model="bad")
        assert len(server.inboxes) == 0
