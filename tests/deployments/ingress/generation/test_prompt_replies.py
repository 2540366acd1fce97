"""Logprobs of prompts in replies, in each dialect."""

import asyncio
from typing import Any

import httpx
import openai
import pytest
from tokenizers.processors import TemplateProcessing

from deployments.ingress.generation.prompt_replies import starts_of
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.conftest import Server, spoken
from tests.deployments.ingress.openai.openai_http import CHAT, COMPLETIONS, HELLO, post, refused
from tests.fakes import BOS, EOS, FakeDriver, byte_level_tokenizer, token_id, token_logprobs

PROMPTS = ["the fox jumps", "café 東京 🦊"]


@pytest.fixture
def text(server: Server) -> ModelTokenizer:
    return server.text


def values(ids: list[int]) -> list[float | None]:
    """The fake's logprobs of a prompt, as both dialects show them."""
    return [None, *(token_logprobs(id, 0).logprob for id in ids[1:])]


def requested_alternatives(driver: FakeDriver) -> list[int]:
    """The requested alternatives of prompt tokens, for each sequence of the last request."""
    return [each.sampling.prompt_logprobs for each in driver.requests[-1].sequences]


def test_lorax_details_contain_the_prefill(
    http: httpx.Client, driver: FakeDriver, text: ModelTokenizer
) -> None:
    body = {"inputs": PROMPTS[1], "parameters": {"decoder_input_details": True, "seed": 1}}
    details = http.post("/generate", json=body).json()["details"]
    ids = driver.requests[-1].sequences[0].prompt
    assert requested_alternatives(driver) == [0]
    assert [token["id"] for token in details["prefill"]] == ids
    assert [token["logprob"] for token in details["prefill"]] == values(ids)
    assert [token["text"] for token in details["prefill"]] == [text.token_text(id) for id in ids]
    assert details["tokens"], "it asks for details by itself"
    reported: Any = {"details": True}
    reply = http.post("/generate", json={"inputs": "hello", "parameters": reported}).json()
    assert reply["details"]["prefill"] == []
    assert requested_alternatives(driver) == [-1]


def test_lorax_sequences_share_one_prefill(http: httpx.Client, driver: FakeDriver) -> None:
    given = {"decoder_input_details": True, "best_of": 2, "do_sample": True, "max_new_tokens": 5}
    reply = http.post("/generate", json={"inputs": "hello", "parameters": given}).json()
    assert requested_alternatives(driver) == [0, -1], "the prompt is read once"
    details = reply["details"]
    assert details["best_of_sequences"][0]["prefill"] == details["prefill"] != []


@pytest.mark.parametrize("as_ids", [False, True])
def test_echo_with_logprobs(
    http: httpx.Client, driver: FakeDriver, text: ModelTokenizer, as_ids: bool
) -> None:
    """Prompt and answer in the same four lists, with offsets into the whole text."""
    known = [driver.tokenizer.encode(prompt).ids for prompt in PROMPTS]
    given: Any = known if as_ids else PROMPTS
    reply = post(http, COMPLETIONS, prompt=given, echo=True, logprobs=2, max_tokens=6, n=2, seed=4)
    assert requested_alternatives(driver) == [2, -1, 2, -1]
    for index, choice in enumerate(reply["choices"]):
        ids, reported = known[index // 2], choice["logprobs"]
        answer = driver.answer(driver.requests[-1].sequences[index], None)
        assert choice["text"] == PROMPTS[index // 2] + spoken(driver, index)
        assert reported["token_logprobs"][: len(ids)] == values(ids)
        assert reported["top_logprobs"][0] is None
        assert all(len(top) == 2 for top in reported["top_logprobs"][1:])
        assert len(reported["tokens"]) == len(reported["text_offset"]) == len(ids) + len(answer)
        offsets = reported["text_offset"]
        assert offsets == sorted(offsets)
        assert offsets[len(ids)] == len(PROMPTS[index // 2])
        for token, offset in zip(reported["tokens"], offsets, strict=True):
            if not token.startswith("bytes:") and token != "<s>":
                assert choice["text"].startswith(token, offset), (token, offset)


def test_an_end_token_of_the_tokenizer_begins_where_the_prompt_ends() -> None:
    tokenizer = byte_level_tokenizer()
    known = [(name, token_id(tokenizer, name)) for name in (BOS, EOS)]
    template = TemplateProcessing(single=f"{BOS} $A {EOS} {EOS}", special_tokens=known)
    tokenizer.post_processor = template
    for prompt in PROMPTS:
        starts = starts_of(asyncio.run(ModelTokenizer(tokenizer).slices(prompt)))
        assert starts[0] == 0
        assert starts[-2:] == [len(prompt)] * 2
        assert starts == sorted(starts)


def test_echo_alone_needs_no_prompt_logprobs(http: httpx.Client, driver: FakeDriver) -> None:
    reply = post(http, COMPLETIONS, prompt="hello", echo=True, max_tokens=0)
    assert reply["choices"][0]["text"] == "hello"
    assert reply["choices"][0]["logprobs"] is None
    assert requested_alternatives(driver) == [-1]


def test_scoring_without_generating(http: httpx.Client, driver: FakeDriver) -> None:
    reply = post(http, COMPLETIONS, prompt="hello", echo=True, logprobs=0, max_tokens=0)
    (choice,) = reply["choices"]
    ids = driver.requests[-1].sequences[0].prompt
    assert driver.requests[-1].sequences[0].stopping.max_new_tokens == 0
    assert choice["text"] == "hello"
    assert choice["logprobs"]["token_logprobs"] == values(ids)
    assert choice["finish_reason"] == "length"
    assert reply["usage"]["completion_tokens"] == 0
    assert reply["usage"]["total_tokens"] == len(ids)


def test_max_tokens_0_needs_echo_or_prompt_logprobs(http: httpx.Client, driver: FakeDriver) -> None:
    error = refused(http, COMPLETIONS, 400, prompt="a", max_tokens=0)
    assert "unless `echo` or `prompt_logprobs`" in error["message"]
    assert refused(http, CHAT, 400, messages=HELLO, max_tokens=0)["param"] == "max_tokens"
    assert driver.requests == []


def test_the_form_of_vllm(http: httpx.Client, driver: FakeDriver, text: ModelTokenizer) -> None:
    reply = post(http, COMPLETIONS, prompt=PROMPTS, prompt_logprobs=2, max_tokens=3)
    for choice, sequence in zip(reply["choices"], driver.requests[-1].sequences, strict=True):
        first, *reported = choice["prompt_logprobs"]
        assert first is None
        assert choice["logprobs"] is None
        for id, entries in zip(sequence.prompt[1:], reported, strict=True):
            found = token_logprobs(id, 2)
            assert list(entries) == [str(top) for top in found.top_ids]
            own = entries[str(id)]
            assert own == {
                "logprob": found.logprob,
                "rank": 1,
                "decoded_token": text.token_text(id),
            }
    chat = post(http, CHAT, messages=HELLO, prompt_logprobs=0, max_tokens=3)
    ids = driver.requests[-1].sequences[0].prompt
    assert [list(each) if each else None for each in chat["prompt_logprobs"]] == [
        None, *([str(id)] for id in ids[1:]),
    ]  # fmt: skip
    assert chat["prompt_logprobs"][1][str(ids[1])]["rank"] is None, "no alternatives were requested"
    assert "prompt_logprobs" not in post(http, CHAT, messages=HELLO, max_tokens=3)


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (COMPLETIONS, {"prompt": "a", "echo": True, "logprobs": 1}),
        (COMPLETIONS, {"prompt": "a", "prompt_logprobs": 1}),
        (CHAT, {"messages": HELLO, "prompt_logprobs": 0}),
    ],
)
def test_streams_have_no_prompt_logprobs(
    http: httpx.Client, driver: FakeDriver, path: str, body: dict[str, object]
) -> None:
    reply = http.post(path, json={"model": "tiny", "stream": True, **body})
    assert reply.status_code == 400
    assert "cannot be streamed" in reply.json()["error"]["message"]
    assert driver.requests == []


def test_openais_client_reads_an_echo(server: Server, driver: FakeDriver) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        reply = client.completions.create(
            model="tiny", prompt="hello", echo=True, logprobs=1, max_tokens=0
        )
    reported = reply.choices[0].logprobs
    assert reported is not None
    assert reported.token_logprobs == values(driver.requests[-1].sequences[0].prompt)
