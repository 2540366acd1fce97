"""Reasoning in chats and responses: split from the text, counted, switched, sent back."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import openai
import pytest
from tokenizers import AddedToken, Tokenizer

from configs.model import ReasoningParser
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.reasoning.formats import FORMATS
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, refused, stream
from tests.deployments.ingress.tools.tool_chats import allowed
from tests.fakes import FakeDriver, token_id, write_tokenizer

TEMPLATE = (
    "{% for message in messages %}<|{{ message.role }}|>"
    "{% if message.reasoning_content %}<think>{{ message.reasoning_content }}</think>{% endif %}"
    "{{ message.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>"
    "{% if enable_thinking is defined and not enable_thinking %}<think></think>"
    "{% elif opens %}<think>{% endif %}{% endif %}"
)
GRADED = "<think>{{ reasoning_effort }}" + TEMPLATE
CHANNELS = (
    "{{ tools }}{{ messages[0].content }}<|start|>assistant{# <|channel|>analysis<|message|> #}"
)
REPLY = "<think>\nA capital.\n</think>\n\nParis."
TALK = {"content": "Paris.", "reasoning": "A capital."}


def serve(
    server: Server, folder: Path, template: str, marks: Sequence[str] = ("</think>",)
) -> FakeDriver:
    """The server over a model with this template; its marks are special tokens."""
    write_tokenizer(folder, template)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens([AddedToken(mark, special=True) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    driver = server.driver
    driver.tokenizer = tokenizer
    driver.info = msgspec.structs.replace(
        driver.info, tokenizer=str(folder), vocab_size=tokenizer.get_vocab_size()
    )
    driver.replies[None] = REPLY
    return driver


@pytest.fixture
def thinking(server: Server, tmp_path: Path) -> FakeDriver:
    return serve(server, tmp_path, TEMPLATE)


def both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The answer to a chat, checked to be equal whole and streamed, and its reasoning tokens."""
    body = {"messages": HELLO, **body}
    reply = post(http, CHAT, **body)
    [choice] = reply["choices"]
    message = choice["message"]
    whole = {"content": message["content"] or "",
             "reasoning": message.get("reasoning_content", "")}  # fmt: skip
    assert message.get("reasoning", "") == whole["reasoning"]
    usage = {"stream_options": {"include_usage": True}}
    *chunks, last = stream(http, CHAT, **body, **usage)
    deltas = [one["delta"] for chunk in chunks for one in chunk["choices"]]
    assert whole == {
        "content": "".join(delta.get("content") or "" for delta in deltas),
        "reasoning": "".join(delta.get("reasoning_content") or "" for delta in deltas),
    }
    assert last["usage"] == reply["usage"]
    details = reply["usage"].get("completion_tokens_details")
    return {**whole, "tokens": details and details["reasoning_tokens"]}


def prompt_of(driver: FakeDriver) -> str:
    ids = driver.requests[-1].sequences[0].prompt
    return str(driver.tokenizer.decode(ids, skip_special_tokens=False))


def test_reasoning_is_split_from_the_text_and_counted(
    http: httpx.Client, thinking: FakeDriver
) -> None:
    marked = thinking.tokenizer.encode(REPLY.removesuffix("\n\nParis."), add_special_tokens=False)
    assert both(http) == {**TALK, "tokens": len(marked.ids)}
    # Also where the prompt has the mark already, and where the answer is cut off.
    thinking.replies[None] = REPLY.removeprefix("<think>")
    opened = {"chat_template_kwargs": {"opens": True}}
    assert both(http, **opened) == {**TALK, "tokens": len(marked.ids) - 1}
    got = both(http, **opened, max_tokens=5)
    assert (got["content"], got["tokens"]) == ("", 5)
    assert got["reasoning"]
    assert "A capital.".startswith(got["reasoning"])
    [choice] = post(http, CHAT, messages=HELLO, **opened, max_tokens=5)["choices"]
    assert (choice["message"]["content"], choice["finish_reason"]) == (None, "length")
    thinking.replies[None] = "Paris."
    assert both(http) == {"content": "Paris.", "reasoning": "", "tokens": 0}


def test_the_split_is_switched_off(
    http: httpx.Client, server: Server, thinking: FakeDriver
) -> None:
    # The end mark is a special token, and stays in the text all the same: clients split there.
    got = both(http, separate_reasoning=False)
    assert got == {"content": REPLY, "reasoning": "", "tokens": None}
    hidden = both(http, include_reasoning=False)
    assert (hidden["content"], hidden["reasoning"]) == ("Paris.", "")
    assert hidden["tokens"] > 5
    info, tokenizer = thinking.info, thinking.tokenizer
    server.fresh_app(IngressSettings(reasoning_parser=ReasoningParser.NONE))
    server.driver.info, server.driver.tokenizer = info, tokenizer
    server.driver.replies[None] = REPLY
    # Of a model whose marks the server does not know, special tokens have no text.
    assert both(http)["content"] == REPLY.replace("</think>", "")


def test_effort_switches_reasoning(http: httpx.Client, thinking: FakeDriver) -> None:
    thinking.replies[None] = "Paris."
    assert both(http, reasoning_effort="none")["tokens"] == 0
    assert prompt_of(thinking).endswith("<think></think>")
    # After a closed mark there is none, whatever the text says.
    thinking.replies[None] = REPLY
    assert both(http, reasoning_effort="none")["reasoning"] == ""
    for effort in ("low", "high"):
        post(http, CHAT, messages=HELLO, reasoning_effort=effort)
        assert prompt_of(thinking).endswith("<|assistant|>")
    post(http, CHAT, messages=HELLO, reasoning_effort="none",
         chat_template_kwargs={"enable_thinking": True})  # fmt: skip
    assert prompt_of(thinking).endswith("<|assistant|>")


def test_effort_is_a_variable_of_templates_that_grade_it(
    http: httpx.Client, server: Server, tmp_path: Path
) -> None:
    driver = serve(server, tmp_path, GRADED)
    post(http, CHAT, messages=HELLO, reasoning_effort="high")
    assert prompt_of(driver).startswith("<think>high")
    post(http, CHAT, messages=HELLO, reasoning_effort="none")
    assert prompt_of(driver).endswith("<think></think>")


def test_constraints_begin_after_the_reasoning(http: httpx.Client, thinking: FakeDriver) -> None:
    thinking.replies[None] = '<think>\nA capital.\n</think>{"a": 1}'
    json_mode = {"response_format": {"type": "json_object"}}
    begin, end = (token_id(thinking.tokenizer, mark) for mark in ("<think>", "</think>"))

    def free() -> tuple[int, tuple[int, ...]]:
        sampling = thinking.requests[-1].sequences[0].sampling
        assert sampling.constraint
        return sampling.free_from, sampling.free_until

    got = both(http, **json_mode)
    assert (got["reasoning"], got["content"]) == ("A capital.", '{"a": 1}')
    assert free() == (begin, (end,))
    post(http, CHAT, messages=HELLO, **json_mode, chat_template_kwargs={"opens": True})
    assert free() == (-1, (end,))
    for extra in ({"reasoning_effort": "none"}, {"separate_reasoning": False}):
        post(http, CHAT, messages=HELLO, **json_mode, **extra)
        assert free() == (-1, ())
    tools = [{"type": "function", "function": {"name": "f"}}]
    thinking.replies[None] = '<think>Hm.</think>[{"name": "f", "arguments": {}}]'
    forced = {"messages": HELLO, "tools": tools, "tool_choice": "required"}
    [choice] = post(http, CHAT, **forced)["choices"]
    assert choice["message"]["reasoning_content"] == "Hm."
    assert choice["message"]["tool_calls"][0]["function"] == {"name": "f", "arguments": "{}"}
    assert free() == (begin, (end,))


@pytest.mark.parametrize("mark", ["<think>", "</think>"])
def test_marks_that_the_model_does_not_have(
    http: httpx.Client, thinking: FakeDriver, mark: str
) -> None:
    """Its tokenizer has them, and its embedding was not resized: no rank knows such a token."""
    thinking.info = msgspec.structs.replace(
        thinking.info, vocab_size=token_id(thinking.tokenizer, mark)
    )
    thinking.replies[None] = '{"a": 1}'
    [choice] = post(http, CHAT, messages=HELLO, response_format={"type": "json_object"})["choices"]
    assert choice["message"]["content"] == '{"a": 1}'
    sampling = thinking.requests[-1].sequences[0].sampling
    assert (sampling.free_from, sampling.free_until) == (-1, ())


def test_a_mark_of_a_token_and_a_word(http: httpx.Client, server: Server, tmp_path: Path) -> None:
    """Gemma 4's: only the first token of its opening mark is special."""
    marks = ["<|channel>", "<channel|>"]
    driver = serve(server, tmp_path, TEMPLATE + "{# <|channel>thought <channel|> #}", marks)
    driver.replies[None] = "<|channel>thought\nA capital.\n<channel|>{}"
    begin, end = (token_id(driver.tokenizer, mark) for mark in marks)
    for extra in ({}, {"response_format": {"type": "json_object"}}):
        got = both(http, **extra)
        assert (got["reasoning"], got["content"]) == ("A capital.", "{}")
    sampling = driver.requests[-1].sequences[0].sampling
    assert (sampling.free_from, sampling.free_until) == (begin, (end,))


def test_channels_are_read_and_constrained(
    http: httpx.Client, server: Server, tmp_path: Path
) -> None:
    driver = serve(server, tmp_path, CHANNELS, [*FORMATS[ReasoningParser.HARMONY].markers])
    driver.replies[None] = (
        "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant<|channel|>final<|message|>{}"
    )
    got = both(http, response_format={"type": "json_object"})
    assert (got["reasoning"], got["content"]) == ("Hm.", "{}")
    sampling = driver.requests[-1].sequences[0].sampling
    final = driver.tokenizer.encode("<|channel|>final<|message|>", add_special_tokens=False).ids
    assert (sampling.free_from, list(sampling.free_until)) == (-1, final)
    tools = [{"type": "function", "function": {"name": "f", "strict": True}}]
    assert refused(http, CHAT, 400, messages=HELLO, tools=tools)["param"] == "tool_choice"


@pytest.mark.parametrize("name", ["f", "g"])
def test_required_calls_are_messages_in_channels(
    http: httpx.Client, server: Server, tmp_path: Path, name: str
) -> None:
    driver = serve(server, tmp_path, CHANNELS, [*FORMATS[ReasoningParser.HARMONY].markers])
    named = {"type": "function", "function": {"name": name}}
    functions = [{"name": one, "parameters": {"properties": {key: {"type": "integer"}}}}
                 for one, key in (("f", "a"), ("g", "b"))]  # fmt: skip
    body = {"tools": [{"type": "function", "function": one} for one in functions]}
    before = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
    call = "<|channel|>commentary to=functions.f <|constrain|>json<|message|>" + '{"a": 1}'
    other = '<|end|><|start|>assistant to=functions.g<|channel|>commentary json<|message|>{"b": 1}'
    driver.replies[None] = before + call + other
    got = both(http, **body, tool_choice="required")
    assert (got["reasoning"], got["content"]) == ("Hm.", "")
    [choice] = post(http, CHAT, messages=HELLO, **body, tool_choice="required")["choices"]
    calls = [called["function"] for called in choice["message"]["tool_calls"]]
    assert calls == [{"name": "f", "arguments": '{"a": 1}'}, {"name": "g", "arguments": '{"b": 1}'}]
    assert choice["finish_reason"] == "tool_calls"
    assert driver.requests[-1].sequences[0].sampling.free_until == ()
    for answer in (before + call, call, before + call + other, call + other):
        assert allowed(driver, answer)
    final = "<|channel|>final<|message|>"
    early = final + "Hm.<|end|><|start|>assistant"
    for answer in (
        before + final + "{}",
        early + call,
        "{}",
        call.replace("a", "c"),
        before + before + "Hm.",
    ):
        assert not allowed(driver, answer)
    post(http, CHAT, messages=HELLO, **body, tool_choice=named)
    assert [allowed(driver, answer) for answer in (call, call + other)] == [name == "f", False]


def test_continued_reasoning_and_text(http: httpx.Client, thinking: FakeDriver) -> None:
    thinking.replies[None] = " so</think>Paris."
    talk = [*HELLO, {"role": "assistant", "reasoning_content": "Well", "content": ""}]
    got = both(http, messages=talk, continue_final_message="reasoning_content")
    assert (got["reasoning"], got["content"]) == ("so", "Paris.")
    talk = [*HELLO, {"role": "assistant", "content": "<think>Well"}]
    got = both(http, messages=talk, continue_final_message=True)
    assert (got["reasoning"], got["content"]) == ("so", "Paris.")
    thinking.replies[None] = "is."
    talk = [*HELLO, {"role": "assistant", "content": "Par"}]
    assert both(http, messages=talk, continue_final_message=True)["content"] == "is."


def test_openais_client_has_items_and_sends_them_back(
    client: openai.OpenAI, thinking: FakeDriver
) -> None:
    reply = client.responses.create(model="tiny", input="hello")
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    thought = reply.output[0]
    assert thought.type == "reasoning"
    assert thought.content is not None
    assert [part.text for part in thought.content] == ["A capital."]
    assert reply.output_text == "Paris."
    assert reply.usage is not None
    assert reply.usage.output_tokens_details.reasoning_tokens > 5
    with client.responses.stream(model="tiny", input="hello") as events:
        kinds = {event.type: event for event in events}
        final = events.get_final_response()
    assert [item.type for item in final.output] == ["reasoning", "message"]
    done = kinds["response.reasoning_text.done"]
    assert done.type == "response.reasoning_text.done"
    assert done.text == "A capital."
    talk: Any = [{"role": "user", "content": "hello"}, *reply.output,
                 {"role": "user", "content": "Sure?"}]  # fmt: skip
    client.responses.create(model="tiny", input=talk)
    assert "<think>A capital.</think>Paris.<|user|>Sure?" in prompt_of(thinking)
    # Reasoning alone, of an answer that was cut off, is left out.
    client.responses.create(model="tiny", input=[*talk[:2], talk[-1]])
    assert "A capital." not in prompt_of(thinking)


def test_logprobs_belong_to_the_text_of_responses(
    client: openai.OpenAI, thinking: FakeDriver
) -> None:
    reply = client.responses.create(
        model="tiny", input="hello", include=["message.output_text.logprobs"], top_logprobs=1
    )
    message = reply.output[1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert "".join(one.token for one in part.logprobs or ()).strip() == "Paris.</s>"


def test_headers_of_reasoning_belong_to_it(
    http: httpx.Client, client: openai.OpenAI, server: Server, tmp_path: Path
) -> None:
    driver = serve(server, tmp_path, CHANNELS, [*FORMATS[ReasoningParser.HARMONY].markers])
    thought = "<|channel|>analysis<|message|>Hm.<|end|>"
    header = "<|start|>assistant<|channel|>final<|message|>"
    driver.replies[None] = thought + header + "Paris."
    length = len(driver.tokenizer.encode(thought, add_special_tokens=False).ids)
    assert both(http) == {"content": "Paris.", "reasoning": "Hm.", "tokens": length}
    logprobs: Any = {"include": ["message.output_text.logprobs"], "top_logprobs": 1}
    reply = client.responses.create(model="tiny", input="hello", **logprobs)
    assert [item.type for item in reply.output] == ["reasoning", "message"]
    message = reply.output[1]
    assert message.type == "message"
    part = message.content[0]
    assert part.type == "output_text"
    assert "".join(one.token for one in part.logprobs or ()).startswith(header + "Paris.")
    driver.replies[None] = ""
    [message] = client.responses.create(model="tiny", input="hello", **logprobs).output
    assert message.type == "message"
    assert message.content[0].type == "output_text"
    assert len(message.content[0].logprobs or ()) == 1


def test_anthropics_messages_have_blocks_of_thinking(
    http: httpx.Client, thinking: FakeDriver
) -> None:
    body = {"messages": HELLO, "max_tokens": 100}
    thought = {"type": "thinking", "thinking": "A capital.", "signature": "unsigned"}
    text = {"type": "text", "text": "Paris."}
    assert post(http, "/v1/messages", **body)["content"] == [thought, text]
    omitted = {"thinking": {"type": "adaptive", "display": "omitted"}}
    assert post(http, "/v1/messages", **body, **omitted)["content"] == [text]
    reply = http.post("/v1/messages", json={"model": "tiny", **body, "stream": True})
    data = [block.split("data: ")[1] for block in reply.text.strip().split("\n\n")]
    deltas = [event["delta"] for event in map(json.loads, data) if "delta" in event]
    shown = "".join(delta.get("thinking", "") for delta in deltas)
    assert (shown, "".join(delta.get("text", "") for delta in deltas)) == ("A capital.", "Paris.")
