"""Anthropic's own client, unmodified, against the routes."""

from collections.abc import Iterator
from dataclasses import replace

import anthropic
import httpx
import pytest
from anthropic import beta_tool
from pydantic import BaseModel

from configs.api import ApiConfig, KeyConfig
from deployments.contract import ErrorKind, Failed
from deployments.ingress.generation.engine import IngressSettings
from tests.deployments.ingress.anthropic.messages_http import BODY, PATH
from tests.deployments.ingress.conftest import Server
from tests.deployments.ingress.tools.tool_chats import HERMES
from tests.fakes import FakeDriver

pytestmark = pytest.mark.usefixtures("room_for_tools")

TOOL: anthropic.types.ToolParam = {
    "name": "get_weather",
    "input_schema": {"type": "object", "properties": {"town": {"type": "string"}}},
}


@pytest.fixture
def client(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as client:
        yield client


def hello(content: str = "hello") -> list[anthropic.types.MessageParam]:
    return [{"role": "user", "content": content}]


def test_a_message_whole_and_streamed(client: anthropic.Anthropic, driver: FakeDriver) -> None:
    driver.replies[None] = "The fox jumps. END!"
    whole = client.messages.create(
        model="tiny",
        max_tokens=64,
        messages=hello(),
        stop_sequences=["END!"],
        extra_body={"top_k": 5},
    )
    [block] = whole.content
    assert isinstance(block, anthropic.types.TextBlock)
    assert (block.text, whole.stop_reason) == ("The fox jumps. ", "stop_sequence")
    with client.messages.stream(
        model="tiny", max_tokens=64, messages=hello(), stop_sequences=["END!"]
    ) as stream:
        assert "".join(stream.text_stream) == block.text
        final = stream.get_final_message()
    assert (final.stop_reason, final.stop_sequence) == ("stop_sequence", "END!")
    assert final.usage == whole.usage
    assert whole.usage.cache_read_input_tokens == 4


def test_calls_and_their_results(client: anthropic.Anthropic, driver: FakeDriver) -> None:
    driver.replies[None] = HERMES
    with client.messages.stream(
        model="tiny", max_tokens=500, messages=hello(), tools=[TOOL]
    ) as stream:
        inputs = [event.snapshot for event in stream if event.type == "input_json"]
        final = stream.get_final_message()
    text, call = final.content
    assert isinstance(call, anthropic.types.ToolUseBlock)
    assert call.input == {"town": "Paris"} == inputs[-1]
    assert (text.type, final.stop_reason) == ("text", "tool_use")
    driver.replies[None] = "Sunny."
    answer = client.messages.create(
        model="tiny",
        max_tokens=50,
        tools=[TOOL],
        messages=[
            *hello(),
            final.to_param(),
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": call.id, "content": "21 °C"}]},
        ],
    )  # fmt: skip
    assert answer.stop_reason == "end_turn"
    prompt = driver.tokenizer.decode(driver.requests[-1].sequences[0].prompt)
    assert "21 °C" in prompt
    assert '"town": "Paris"' in prompt


def test_the_tool_runner_goes_on_until_there_is_an_answer(
    client: anthropic.Anthropic, driver: FakeDriver
) -> None:
    towns: list[str] = []

    @beta_tool
    def get_weather(town: str) -> str:
        """The weather.

        Args:
            town: where
        """
        towns.append(town)
        driver.replies[None] = "Sunny."
        return "21 °C"

    driver.replies[None] = HERMES
    runner = client.beta.messages.tool_runner(
        model="tiny",
        max_tokens=500,
        tools=[get_weather],
        messages=[{"role": "user", "content": "hello"}],
    )
    assert runner.until_done().stop_reason == "end_turn"
    assert towns == ["Paris"]


def test_an_answer_is_parsed_into_a_class(client: anthropic.Anthropic, driver: FakeDriver) -> None:
    class Town(BaseModel):
        name: str
        people: int

    driver.replies[None] = '{"name": "Paris", "people": 2}'
    answer = client.messages.parse(
        model="tiny", max_tokens=64, messages=hello(), output_format=Town
    )
    assert answer.parsed_output == Town(name="Paris", people=2)
    assert '"people"' in driver.requests[-1].sequences[0].sampling.json_schema


def test_tokens_are_counted_and_models_listed(client: anthropic.Anthropic) -> None:
    count = client.messages.count_tokens(model="tiny", messages=hello(), tools=[TOOL])
    answer = client.messages.create(model="tiny", messages=hello(), tools=[TOOL], max_tokens=9)
    assert answer.usage.cache_read_input_tokens == 4
    assert count.input_tokens == answer.usage.input_tokens + 4
    assert [model.id for model in client.models.list()][:2] == ["tiny", "org/pirate"]


def test_an_adapter_is_a_model(client: anthropic.Anthropic, driver: FakeDriver) -> None:
    client.messages.create(model="org/pirate", max_tokens=9, messages=hello())
    adapter = driver.requests[-1].adapter
    assert adapter is not None
    assert adapter.id == "org/pirate"


@pytest.mark.parametrize(
    ("kind", "error"),
    [
        (ErrorKind.OVERLOADED, anthropic.OverloadedError),
        (ErrorKind.ADAPTER_NOT_FOUND, anthropic.NotFoundError),
        (ErrorKind.ADAPTER_FORBIDDEN, anthropic.PermissionDeniedError),
        (ErrorKind.GENERATION, anthropic.InternalServerError),
        (ErrorKind.UNAVAILABLE, anthropic.ServiceUnavailableError),
        (ErrorKind.QUOTA, anthropic.RateLimitError),
    ],
)
def test_failures_are_the_clients_own_errors(
    client: anthropic.Anthropic,
    driver: FakeDriver,
    kind: ErrorKind,
    error: type[anthropic.APIStatusError],
) -> None:
    driver.faults[None] = Failed(kind, "no luck")
    with pytest.raises(error, match="no luck"):
        client.messages.create(model="tiny", max_tokens=9, messages=hello())
    driver.fail_after = 2
    with (
        pytest.raises(anthropic.APIStatusError, match="no luck"),
        client.messages.stream(model="tiny", max_tokens=9, messages=hello()) as stream,
    ):
        stream.until_done()


def test_a_key_may_come_in_either_header(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", "sk-1")
    api = ApiConfig(keys=(KeyConfig(name="one", env="THE_KEY"),))
    server.fresh_app(replace(IngressSettings(), api=api))
    for key, token in (("sk-1", None), (None, "sk-1")):
        with anthropic.Anthropic(base_url=server.url, api_key=key, auth_token=token) as client:
            assert client.messages.create(model="tiny", max_tokens=9, messages=hello()).content
    with (
        anthropic.Anthropic(base_url=server.url, api_key="sk-2", max_retries=0) as client,
        pytest.raises(anthropic.AuthenticationError, match="no valid API key"),
    ):
        client.messages.create(model="tiny", max_tokens=9, messages=hello())


def test_errors_before_the_route_have_anthropics_shape(server: Server, http: httpx.Client) -> None:
    def error(reply: httpx.Response) -> tuple[int, str]:
        assert reply.json()["type"] == "error"
        return reply.status_code, reply.json()["error"]["type"]

    assert error(http.get(PATH)) == (405, "invalid_request_error")
    assert error(http.get(f"{PATH}/nothing")) == (404, "not_found_error")
    assert error(http.post(PATH, content=b"{")) == (415, "invalid_request_error")
    assert error(http.post(PATH, json=[])) == (400, "invalid_request_error")
    server.fresh_app(replace(IngressSettings(), api=ApiConfig(max_body_bytes=50)))
    assert error(http.post(PATH, json=BODY)) == (413, "request_too_large")
