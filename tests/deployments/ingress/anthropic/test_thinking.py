"""Blocks of thinking, whole and streamed, and the switch for them."""

from pathlib import Path

import anthropic
import httpx
import pytest

from tests.deployments.ingress.anthropic.messages_http import events_of, in_order, post
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.reasoning.test_reasoning import TEMPLATE, serve
from tests.fakes import FakeDriver

THOUGHT = {"type": "thinking", "thinking": "A capital.", "signature": "unsigned"}
TEXT = {"type": "text", "text": "Paris."}


@pytest.fixture(autouse=True)
def thinking(server: Server, tmp_path: Path) -> FakeDriver:
    return serve(server, tmp_path, TEMPLATE)


def test_thinking_is_a_block_of_its_own(http: httpx.Client) -> None:
    message = post(http)
    assert message["content"] == [THOUGHT, TEXT]
    counts = message["usage"]
    assert 0 < counts["output_tokens_details"]["thinking_tokens"] < counts["output_tokens"]
    events = events_of(http)
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    order = ["message_start", block[0], "ping", *block[1:], *block]
    assert in_order(events) == [*order, "message_delta", "message_stop"]
    kinds = [event["delta"]["type"] for event in events if event["type"] == block[1]]
    assert list(dict.fromkeys(kinds)) == ["thinking_delta", "signature_delta", "text_delta"]


def test_anthropics_client_reads_it_and_sends_it_back(server: Server, thinking: FakeDriver) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        with client.messages.stream(
            model="tiny", max_tokens=99, messages=[{"role": "user", "content": "hello"}]
        ) as stream:
            final = stream.get_final_message()
        assert [block.to_dict() for block in final.content] == [THOUGHT, TEXT]
        client.messages.create(
            model="tiny",
            max_tokens=99,
            messages=[
                {"role": "user", "content": "hello"},
                final.to_param(),
                {"role": "user", "content": "And now?"},
            ],
        )
    prompt = thinking.tokenizer.decode(
        thinking.requests[-1].sequences[0].prompt, skip_special_tokens=False
    )
    assert "<think>A capital.</think>" in prompt


@pytest.mark.parametrize("display", [None, "omitted"])
def test_it_can_be_switched_off_or_left_out(
    http: httpx.Client, thinking: FakeDriver, display: str | None
) -> None:
    given = {"type": "adaptive", "display": display} if display else {"type": "disabled"}
    if display is None:
        thinking.replies[None] = "Paris."
    assert post(http, thinking=given)["content"] == [TEXT]
    prompt = thinking.tokenizer.decode(
        thinking.requests[-1].sequences[0].prompt, skip_special_tokens=False
    )
    assert prompt.endswith("<think></think>") == (display is None)
