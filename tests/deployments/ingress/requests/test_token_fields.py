"""Fields about tokens: those to use or not, those that are cut, shown, or listed."""

from typing import Any

import httpx
import pytest
from transformers import PreTrainedTokenizerFast

from configs.wire.sampling import Sampling
from tests.deployments.ingress.openai.openai_http import (
    CHAT,
    COMPLETIONS,
    HELLO,
    post,
    refused,
    stream,
    texts_of,
)
from tests.fakes import BOS, EOS, FakeDriver, token_id

LONG = "the naïve fox jumps over the lazy dog"


def sampling_of(driver: FakeDriver) -> Sampling:
    return driver.requests[-1].sequences[0].sampling


def ids_of(driver: FakeDriver, text: str) -> list[int]:
    ids: list[int] = driver.tokenizer.encode(text, add_special_tokens=False).ids
    return ids


@pytest.mark.parametrize(("path", "prompt"), [(COMPLETIONS, {"prompt": "a"}),
                                              (CHAT, {"messages": HELLO})])  # fmt: skip
def test_bad_words_and_allowed_tokens_reach_the_driver(
    http: httpx.Client, driver: FakeDriver, path: str, prompt: dict[str, Any]
) -> None:
    post(http, path, **prompt, bad_words=["fox", " dog", EOS], allowed_token_ids=[7, 9, 7])
    spellings = [ids_of(driver, text) for text in ("fox", " fox", "dog", " dog", f" {EOS}")]
    assert sampling_of(driver).bad_words == tuple(map(tuple, spellings))
    assert sampling_of(driver).allowed_ids == (7, 9)
    post(http, path, **prompt, bad_words=[], allowed_token_ids=[])
    assert not sampling_of(driver).adjusted
    for extra, param in (
        ({"allowed_token_ids": [9999]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "min_tokens": 2, "stop_token_ids": [7]}, "allowed_token_ids"),
        ({"allowed_token_ids": [7], "guided_regex": "a"}, "allowed_token_ids"),
        ({"bad_words": ["fox"], "guided_regex": "a"}, "bad_words"),
        ({"bad_words": [letter * 256 for letter in "éüä"]}, "bad_words"),
        ({"bad_words": [""]}, "bad_words.0"),
    ):
        assert refused(http, path, 400, **prompt, **extra)["param"] == param


@pytest.mark.parametrize("side", ["left", "right"])
def test_prompts_are_cut_as_transformers_cuts_them(
    http: httpx.Client, driver: FakeDriver, side: str
) -> None:
    theirs: Any = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=driver.tokenizer, truncation_side=side, bos_token=BOS
    )
    for special in (True, False):
        fields = {"truncate_prompt_tokens": 5, "truncation_side": side, "max_tokens": 1}
        post(http, COMPLETIONS, prompt=LONG, add_special_tokens=special, **fields)
        expected = theirs(LONG, add_special_tokens=special, truncation=True, max_length=5)
        assert driver.requests[-1].sequences[0].prompt == expected["input_ids"]
    driver.tokenizer.no_truncation()
    post(http, COMPLETIONS, prompt=[7, 8, 9], truncate_prompt_tokens=2, truncation_side=side,
         max_tokens=1)  # fmt: skip
    kept = [8, 9] if side == "left" else [7, 8]
    assert driver.requests[-1].sequences[0].prompt == kept


def test_prompts_that_are_too_long_are_cut_to_what_fits(
    http: httpx.Client, driver: FakeDriver
) -> None:
    info = driver.info
    post(http, COMPLETIONS, prompt=LONG * 100, truncate_prompt_tokens=-1, max_tokens=100)
    prompt = driver.requests[-1].sequences[0].prompt
    assert len(prompt) == info.max_total_tokens - 100
    post(http, COMPLETIONS, prompt="a", truncate_prompt_tokens=10**30)
    post(http, CHAT, messages=[{"role": "user", "content": LONG * 100}], max_tokens=3,
         truncate_prompt_tokens=4)  # fmt: skip
    assistant = ids_of(driver, "<|assistant|>")
    assert driver.requests[-1].sequences[0].prompt[-1:] == assistant
    assert len(driver.requests[-1].sequences[0].prompt) == 4
    for extra, param in (
        ({"truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({"truncate_prompt_tokens": 1}, "truncate_prompt_tokens"),
        ({"truncation_side": "left"}, "truncation_side"),
        ({"truncate_prompt_tokens": 5, "echo": True}, "echo"),
    ):
        assert refused(http, COMPLETIONS, 400, prompt=LONG, **extra)["param"] == param
    most = {"prompt": "a" * 70_000, "truncate_prompt_tokens": 5}
    assert refused(http, COMPLETIONS, 400, **most)["code"] == "context_length_exceeded"


def both(http: httpx.Client, path: str, **body: Any) -> str:
    """The text of an answer, checked to be equal whole and streamed."""
    [choice] = post(http, path, **body)["choices"]
    text = str(choice["text"] if path == COMPLETIONS else choice["message"]["content"])
    assert texts_of(stream(http, path, **body))[0] == text
    return text


def test_what_becomes_text(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = answer = "one<|user|>two"
    assert both(http, COMPLETIONS, prompt="a") == "onetwo"
    # The token that ends the answer has no text.
    assert both(http, COMPLETIONS, prompt="a", skip_special_tokens=False) == answer
    assert both(http, CHAT, messages=HELLO, skip_special_tokens=False) == answer
    mute = {"detokenize": False}
    assert both(http, COMPLETIONS, prompt="a", **mute) == ""
    assert post(http, COMPLETIONS, prompt="a", **mute)["usage"]["completion_tokens"] > 3
    assert refused(http, COMPLETIONS, 400, prompt="a", stop="x", **mute)["param"] == "detokenize"
    tools = [{"type": "function", "function": {"name": "f"}}]
    error = refused(http, CHAT, 400, messages=HELLO, tools=tools, **mute)
    assert error["param"] == "detokenize"
    # Tokens that end an answer have a text, if stop strings have one.
    driver.replies[None] = "o"
    stops = {"prompt": "a", "stop_token_ids": ids_of(driver, "o")}
    assert both(http, COMPLETIONS, **stops) == ""
    assert both(http, COMPLETIONS, **stops, include_stop_str_in_output=True) == "o"


def test_token_ids_are_listed(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = "one two"
    answer = [*ids_of(driver, "one two"), token_id(driver.tokenizer, EOS)]
    fields: dict[str, Any] = {"return_token_ids": True, "n": 2}
    for path, prompt in ((COMPLETIONS, {"prompt": ["a", "b"]}), (CHAT, {"messages": HELLO})):
        reply = post(http, path, **prompt, **fields)
        prompts = [sequence.prompt for sequence in driver.requests[-1].sequences]
        assert [choice["token_ids"] for choice in reply["choices"]] == [answer] * len(prompts)
        chunks = stream(http, path, **prompt, **fields)
        for index in range(len(prompts)):
            own = [c for chunk in chunks for c in chunk["choices"] if c["index"] == index]
            assert [id for c in own for id in c.get("token_ids", ())] == answer
        if path == CHAT:
            assert reply["prompt_token_ids"] == prompts[0]
            assert [c["prompt_token_ids"] for c in chunks if "prompt_token_ids" in c] == prompts[:1]
        else:
            assert [choice["prompt_token_ids"] for choice in reply["choices"]] == prompts
            listed = [c["prompt_token_ids"] for chunk in chunks for c in chunk["choices"]
                      if "prompt_token_ids" in c]  # fmt: skip
            assert listed == prompts
    error = refused(http, "/v1/responses", 400, input="a", return_token_ids=True)
    assert error["param"] == "return_token_ids"
    with_tools = [{"type": "function", "function": {"name": "f"}}]
    chunks = stream(http, CHAT, messages=HELLO, tools=with_tools, return_token_ids=True)
    listed = [id for chunk in chunks for c in chunk["choices"] for id in c.get("token_ids", ())]
    assert listed == answer


def test_stop_strings_count_after_min_tokens(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = answer = "the fox and the fox and the fox"
    ids = ids_of(driver, answer)
    ends = [end for end in range(len(ids)) if driver.tokenizer.decode(ids[:end]).endswith(" fox")]
    cuts = []
    for shortest in (0, ends[0] - 1, ends[0], ends[1]):
        fields = {"prompt": "a", "stop": [" fox"], "min_tokens": shortest}
        [choice] = post(http, COMPLETIONS, **fields)["choices"]
        assert texts_of(stream(http, COMPLETIONS, **fields)) == {0: choice["text"]}
        cuts.append(choice["text"])
    assert cuts[:3] == ["the", "the", "the fox and the"]
    assert cuts[3].startswith("the fox and the fox and the")
