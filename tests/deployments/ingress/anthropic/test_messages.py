"""POST /v1/messages: messages in, blocks out, the same whole and streamed."""

from typing import Any

import httpx
import msgspec
import pytest

from deployments.contract import ErrorKind, Failed
from tests.deployments.ingress.anthropic.messages_http import (
    BODY,
    HELLO,
    PATH,
    events_of,
    in_order,
    post,
    refused,
)
from tests.deployments.ingress.conftest import Server, spoken
from tests.deployments.ingress.openai.openai_http import CHAT
from tests.deployments.ingress.tools.tool_chats import NATIVE, TWO, WEATHER
from tests.fakes import FakeDriver, Unreliable, write_tokenizer

pytestmark = pytest.mark.usefixtures("room_for_tools")

TOOLS = [
    {"name": "get_weather", "description": "x", "input_schema": WEATHER["parameters"]},
    {"name": "get_time", "input_schema": {"type": "object"}},
]
ALL = ["message_start", "content_block_start", "ping", "content_block_delta", "content_block_stop",
       "message_delta", "message_stop"]  # fmt: skip


def rebuilt(events: list[dict[str, Any]]) -> dict[str, Any]:
    """The message as a client puts it together, without calls' ids."""
    message: dict[str, Any] = events[0]["message"]
    blocks: list[dict[str, Any]] = message["content"]
    for event in events:
        delta = event.get("delta", {})
        if event["type"] == "content_block_start":
            blocks.append({**event["content_block"], "written": ""})
        elif event["type"] == "content_block_delta":
            blocks[-1]["written"] += delta.get("text", "") + delta.get("partial_json", "")
        elif event["type"] == "message_delta":
            message |= {**delta, "usage": event["usage"]}
    return message


def plain(message: dict[str, Any]) -> dict[str, Any]:
    """A message without what is new each time."""
    blocks = []
    for block in message["content"]:
        written = block.pop("written", None)
        if written is not None and block["type"] == "text":
            block["text"] += written
        elif written is not None:
            block["input"] = msgspec.json.decode(written)
        blocks.append({name: value for name, value in block.items() if name != "id"})
    return {**message, "id": "", "content": blocks}


def both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The message, checked to be equal whole and streamed."""
    whole = plain(post(http, **body))
    assert plain(rebuilt(events_of(http, **body))) == whole
    return whole


def prompt_of(driver: FakeDriver) -> list[int]:
    return list(driver.requests[-1].sequences[0].prompt)


def test_a_stream_has_the_events_in_anthropics_order(http: httpx.Client) -> None:
    events = events_of(http)
    assert in_order(events) == ALL
    assert events[0]["message"]["content"] == []
    assert events[0]["message"]["stop_reason"] is None


@pytest.mark.parametrize("steady", [True, False])
def test_whole_and_streamed_are_one_message(
    http: httpx.Client, driver: FakeDriver, steady: bool
) -> None:
    if not steady:
        driver.link = Unreliable()
    message = both(http)
    assert message["content"] == [{"type": "text", "text": spoken(driver)}]
    assert (message["type"], message["role"], message["model"]) == ("message", "assistant", "tiny")
    assert (message["stop_reason"], message["stop_sequence"]) == ("max_tokens", None)
    prompt = len(prompt_of(driver))
    assert message["usage"] == {
        "input_tokens": prompt - 4, "cache_read_input_tokens": 4,
        "cache_creation_input_tokens": 0, "output_tokens": 24,
    }  # fmt: skip


def test_a_stop_sequence_is_named_and_not_in_the_text(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.replies[None] = "One, two. END! Three."
    message = both(http, stop_sequences=["Three", "END!"], max_tokens=99)
    assert message["content"] == [{"type": "text", "text": "One, two. "}]
    assert (message["stop_reason"], message["stop_sequence"]) == ("stop_sequence", "END!")


def test_an_end_of_turn_and_an_empty_answer(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = "Done."
    assert both(http)["stop_reason"] == "end_turn"
    driver.replies[None] = ""
    message = both(http)
    assert (message["content"], message["stop_reason"]) == ([], "end_turn")
    assert in_order(events_of(http)) == ["message_start", "message_delta", "message_stop"]


def test_the_context_may_end_an_answer(http: httpx.Client, driver: FakeDriver) -> None:
    driver.info = msgspec.structs.replace(driver.info, max_total_tokens=64)
    assert both(http, max_tokens=32000)["stop_reason"] == "model_context_window_exceeded"
    assert "context length" in refused(http, messages=[{"role": "user", "content": "fox " * 200}])


def test_calls_are_blocks_of_their_own(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = TWO
    message = both(http, tools=TOOLS, max_tokens=500)
    assert message["content"] == [
        {"type": "text", "text": "Let me see."},
        {"type": "tool_use", "name": "get_weather", "input": {"town": "Paris"}},
        {"type": "tool_use", "name": "get_time", "input": {}},
    ]
    assert message["stop_reason"] == "tool_use"
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    order = ["message_start", block[0], "ping", *block[1:], *block, *block]
    events = events_of(http, tools=TOOLS, max_tokens=500)
    assert in_order(events) == [*order, "message_delta", "message_stop"]


def test_blanks_around_calls_are_no_block(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = TWO.removeprefix("Let me see.")
    kinds = [block["type"] for block in both(http, tools=TOOLS, max_tokens=500)["content"]]
    assert kinds == ["tool_use", "tool_use"]


def test_a_call_that_is_cut_off_has_what_was_written(
    http: httpx.Client, driver: FakeDriver
) -> None:
    driver.replies[None] = '<tool_call>{"name": "get_weather", "arguments": {"town": "Paris'
    [block] = post(http, tools=TOOLS, max_tokens=500)["content"]
    assert (block["type"], block["input"]) == ("tool_use", {"town": "Paris"})


def test_half_a_pair_of_surrogates_spoils_no_arguments(
    http: httpx.Client, driver: FakeDriver
) -> None:
    written = r'{"town": "\ud83d \ude00\ud83d\ude00 \\ud83d \u00e9", "days": 1}'
    driver.replies[None] = (
        f'<tool_call>{{"name": "get_weather", "arguments": {written}}}</tool_call>'
    )
    [block] = post(http, tools=TOOLS, max_tokens=500)["content"]
    assert block["input"] == {"town": "\ufffd \ufffd\U0001f600 \\ud83d \u00e9", "days": 1}


def test_an_answer_ends_with_the_only_tool_use(http: httpx.Client, driver: FakeDriver) -> None:
    driver.replies[None] = TWO + " and more" * 9
    choice = {"type": "auto", "disable_parallel_tool_use": True}
    message = both(http, tools=TOOLS, tool_choice=choice, max_tokens=500, stop_sequences=["Rome"])
    assert [block["type"] for block in message["content"]] == ["text", "tool_use"]
    assert (message["stop_reason"], message["stop_sequence"]) == ("tool_use", None)
    assert driver.finishes


@pytest.mark.parametrize(
    ("choice", "openai"),
    [
        ({"type": "auto"}, "auto"),
        ({"type": "none"}, "none"),
        ({"type": "any"}, "required"),
        ({"type": "tool", "name": "get_time"},
         {"type": "function", "function": {"name": "get_time"}}),
    ],
)  # fmt: skip
def test_tools_and_choices_make_the_same_request_as_openais(
    http: httpx.Client, driver: FakeDriver, choice: dict[str, Any], openai: object
) -> None:
    alone = {"disable_parallel_tool_use": True} if choice["type"] != "none" else {}
    http.post(PATH, json={**BODY, "tools": TOOLS, "tool_choice": {**choice, **alone}})
    functions = [
        {"name": tool["name"], "parameters": tool["input_schema"],
         **({"description": "x"} if "description" in tool else {})}
        for tool in TOOLS
    ]  # fmt: skip
    chat = {"model": "tiny", "messages": HELLO, "tool_choice": openai, "max_tokens": 24,
            "temperature": 0, "parallel_tool_calls": False,
            "tools": [{"type": "function", "function": each} for each in functions]}  # fmt: skip
    http.post(CHAT, json=chat)
    [ours], [theirs] = (request.sequences for request in driver.requests[-2:])
    assert len(ours.prompt) == len(theirs.prompt)
    assert ours.sampling.grammar == theirs.sampling.grammar
    assert bool(ours.sampling.grammar) == (choice["type"] in ("any", "tool"))


def test_blocks_become_the_messages_of_a_chat(
    server: Server, driver: FakeDriver, http: httpx.Client, tmp_path: Any
) -> None:
    write_tokenizer(tmp_path, NATIVE)
    driver.info = msgspec.structs.replace(driver.info, tokenizer=str(tmp_path))
    call = {"type": "tool_use", "id": "toolu_1", "name": "get_weather", "input": {"town": "Paris"}}
    result = {"type": "tool_result", "tool_use_id": "toolu_1", "content": [
        {"type": "text", "text": "Sunny", "cache_control": {"type": "ephemeral"}}]}  # fmt: skip
    messages = [
        {"role": "user", "content": "Weather"},
        {"role": "user", "content": [{"type": "text", "text": "in Paris?"}]},
        {"role": "assistant", "content": [
            {"type": "redacted_thinking", "data": "x"}, {"type": "text", "text": "Well"}, call]},
        {"role": "user", "content": [result, {"type": "text", "text": "And now?"}]},
    ]  # fmt: skip
    post(http, messages=messages, system=[{"type": "text", "text": "Be brief."}], tools=TOOLS)
    function = {"name": "get_weather", "arguments": '{"town": "Paris"}'}
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": [
            {"type": "text", "text": "Weather"}, {"type": "text", "text": "in Paris?"}]},
        {"role": "assistant", "content": "Well", "tool_calls": [
            {"id": "toolu_1", "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": "toolu_1", "content": "Sunny"},
        {"role": "user", "content": "And now?"},
    ]  # fmt: skip
    tools = [{"type": "function", "function": {
        **({"description": tool["description"]} if "description" in tool else {}),
        "name": tool["name"], "parameters": tool["input_schema"]}} for tool in TOOLS]  # fmt: skip
    body = {"model": "tiny", "messages": chat, "tools": tools, "max_tokens": 24}
    assert http.post(CHAT, json=body).status_code == 200
    ours, theirs = (
        driver.tokenizer.decode(request.sequences[0].prompt, skip_special_tokens=False)
        for request in driver.requests[-2:]
    )
    assert ours.partition("<|system|>")[2] == theirs.partition("<|system|>")[2] != ""


def test_a_last_message_of_the_assistant_is_continued(
    http: httpx.Client, driver: FakeDriver
) -> None:
    messages = [*HELLO, {"role": "assistant", "content": "The fox"}]
    post(http, messages=messages)
    text = driver.tokenizer.decode(prompt_of(driver), skip_special_tokens=False)
    assert text.endswith("<|assistant|>The fox")


def test_a_format_constrains_the_answer(http: httpx.Client, driver: FakeDriver) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    form = {"type": "json_schema", "schema": schema}
    post(http, output_config={"format": form})
    newer = driver.requests[-1].sequences[0].sampling.json_schema
    post(http, output_format=form)
    assert newer == driver.requests[-1].sequences[0].sampling.json_schema != ""


def test_tokens_are_counted_as_they_are_used(http: httpx.Client, driver: FakeDriver) -> None:
    body = {"model": "tiny", "messages": HELLO, "system": "Be brief.", "tools": TOOLS}
    reply = http.post(f"{PATH}/count_tokens", json=body)
    assert driver.requests == []
    usage = post(http, **body)["usage"]
    assert reply.json() == {
        "input_tokens": usage["input_tokens"] + usage["cache_read_input_tokens"]
    }
    assert http.post(f"{PATH}/count_tokens", json={"model": "tiny"}).status_code == 400


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ({"messages": [{"role": "user", "content": [{"type": "image", "source": {}}]}]}, "`image`"),
        ({"messages": [{"role": "user", "content": [{"type": "document"}]}]}, "`document`"),
        ({"system": [{"type": "image"}]}, "`image`"),
        ({"tools": [{"type": "web_search_20250305", "name": "w"}]}, "`web_search_20250305`"),
        ({"tools": [{"name": "w"}]}, "`input_schema`"),
        ({"tools": [{**TOOLS[0], "defer_loading": True}]}, "`defer_loading`"),
        ({"tool_choice": {"type": "tool"}, "tools": TOOLS}, "`name`"),
        ({"mcp_servers": [{"url": "x"}]}, "`mcp_servers`"),
        ({"container": "c"}, "`container`"),
        ({"context_management": {"edits": [{"type": "clear_tool_uses_20250919"}]}},
         "`context_management`"),
        ({"stop": ["x"]}, "use `stop_sequences`"),
        ({"no_such_field": 1}, "`no_such_field`"),
        ({"n": 2}, "`n`"),
        ({"stop_sequences": ["a", "b", "c", "d", "e"]}, "`stop_sequences`"),
        ({"max_tokens": 0}, "`max_tokens`"),
        ({"max_tokens": None}, "`max_tokens`"),
        ({"seed": "x"}, "`seed`"),
        ({"messages": []}, "`messages`"),
        ({"output_config": {"effort": "high"}}, "`output_config.effort`"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "max_tokens"),
        ({"thinking": {"type": "enabled"}}, "budget_tokens"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_refused_by_name(
    http: httpx.Client, body: dict[str, Any], named: str
) -> None:
    assert named in refused(http, **body)


def test_fields_that_change_nothing_are_accepted(http: httpx.Client) -> None:
    unedited = {"type": "clear_thinking_20251015", "keep": "all"}
    body = {"metadata": {"user_id": "u"}, "service_tier": "auto", "cache_control": None,
            "seed": 3, "min_p": 0.1, "thinking": {"type": "disabled"},
            "context_management": {"edits": [unedited]}}  # fmt: skip
    assert post(http, **body)["type"] == "message"


def test_a_failure_on_the_way_is_the_last_event(http: httpx.Client, driver: FakeDriver) -> None:
    driver.faults[None] = Failed(ErrorKind.OVERLOADED, "too many")
    driver.fail_after = 3
    events = events_of(http)
    error = {"type": "overloaded_error", "message": "too many"}
    assert events[-1] == {"type": "error", "error": error}
    assert events[0]["type"] == "message_start"
    whole = http.post(PATH, json=BODY)
    assert (whole.status_code, whole.json()["error"]) == (529, error)
    assert whole.headers["retry-after"] == "1"
