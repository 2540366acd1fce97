"""Functions, answers with calls, and checks for tests of chats with tools."""

import json
from typing import Any

import httpx
import pytest

from tests.deployments.ingress.openai.openai_http import CHAT, HELLO, post, stream
from tests.fakes import FakeDriver

llguidance = pytest.importorskip("llguidance")

WEATHER = {
    "name": "get_weather",
    "description": "The weather of a town",
    "parameters": {
        "type": "object",
        "properties": {"town": {"type": "string"}, "days": {"$ref": "#/$defs/Days"}},
        "required": ["town"],
        "$defs": {"Days": {"type": "integer", "maximum": 9}},
    },
}
TIME = {"name": "get_time"}
TOOLS = [{"type": "function", "function": WEATHER}, {"type": "function", "function": TIME}]
CALL = {"name": "get_weather", "arguments": {"town": "Paris"}}
HERMES = f"Let me see.\n<tool_call>\n{json.dumps(CALL)}\n</tool_call>"
TWO = HERMES + '\n<tool_call>\n{"name": "get_time", "arguments": {}}\n</tool_call>'
NATIVE = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for message in messages %}"
    "<|{{ message.role }}|>{% if message.tool_calls %}{{ message.tool_calls | tojson }}{% endif %}"
    "{% if message.name is defined %}{{ message.name }}: {% endif %}{{ message.content }}"
    "{% endfor %}<|assistant|>{# WORD #}"
)


def prompt_of(driver: FakeDriver) -> str:
    ids = driver.requests[-1].sequences[0].prompt
    return str(driver.tokenizer.decode(ids, skip_special_tokens=False))


def allowed(driver: FakeDriver, answer: str) -> bool:
    """Whether the newest request's grammar lets this answer through, whole."""
    tokenizer = llguidance.LLTokenizer(f"{driver.info.tokenizer}/tokenizer.json")
    matcher = llguidance.LLMatcher(tokenizer, driver.requests[-1].sequences[0].sampling.grammar)
    ids = driver.tokenizer.encode(answer, add_special_tokens=False).ids
    assert not matcher.get_error()
    return bool(matcher.try_consume_tokens(ids) == len(ids) and matcher.is_accepting())


def joined(chunks: list[dict[str, Any]]) -> dict[str, Any]:
    """The message that a stream's deltas come to, and its finish reason."""
    content, reason = "", None
    calls: list[dict[str, Any]] = []
    for choice in (choice for chunk in chunks for choice in chunk["choices"]):
        content += choice["delta"].get("content") or ""
        for delta in choice["delta"].get("tool_calls", ()):
            if "id" in delta:
                assert delta["index"] == len(calls)
                calls.append({**delta, "function": dict(delta["function"])})
            else:
                calls[delta["index"]]["function"]["arguments"] += delta["function"]["arguments"]
        reason = choice["finish_reason"] or reason
    return {"content": content, "calls": [call["function"] for call in calls], "reason": reason}


def both(http: httpx.Client, **body: Any) -> dict[str, Any]:
    """The answer to a request, checked to be equal whole and streamed."""
    [choice] = post(http, CHAT, messages=HELLO, **body)["choices"]
    message = choice["message"]
    calls = [call["function"] for call in message.get("tool_calls", ())]
    whole = {"content": message["content"] or "", "calls": calls, "reason": choice["finish_reason"]}
    assert joined(stream(http, CHAT, messages=HELLO, **body)) == whole
    return whole
