"""The demo over a hub: private adapters serve, and bad ones are refused without harm to others."""

import logging
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from deployments.ingress.generation.engine import IngressSettings
from tests.hub_server import HubServer
from tests.served import demo_app, demo_config, served

PIRATE = {
    path.name: path.read_bytes() for path in Path("configs/demo/adapters/pirate").glob("adapter_*")
}
PATIENT = {"connect_timeout_s": 300, "read_timeout_s": 300}
SECRET = "hf_tokenOfTheCaller"


@pytest.fixture(scope="module")
def hub() -> Iterator[HubServer]:
    with HubServer() as server:
        yield server


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hub")


@pytest.fixture(scope="module")
def http(hub: HubServer, root: Path) -> Iterator[httpx.Client]:
    adapters = {
        "local_roots": ["configs/demo/adapters"],
        "device_pages": 64,
        "max_device_adapters": 16,
        "host_bytes": 2**28,
        "max_file_bytes": 2**26,
        "hub_endpoint": hub.url,
        "fetch": {"cache_dir": str(root / "cache"), "backoff_s": 0.01, "attempts": 2, **PATIENT},
    }
    app = demo_app(demo_config(adapters=adapters), IngressSettings())
    with served(app) as url, httpx.Client(base_url=url, timeout=300) as client:
        yield client


def say(http: httpx.Client, model: str, token: str | None = None) -> httpx.Response:
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    messages = [{"role": "user", "content": "Who are you?"}]
    body = {"model": model, "temperature": 0, "max_tokens": 12, "messages": messages}
    return http.post("/v1/chat/completions", json=body, headers=headers)


def num_prompt_tokens(answer: httpx.Response) -> int:
    assert answer.status_code == 200, answer.text
    number: int = answer.json()["usage"]["prompt_tokens"]
    return number


def spoken(answer: httpx.Response) -> str:
    assert answer.status_code == 200, answer.text
    text: str = answer.json()["choices"][0]["message"]["content"]
    return text


def test_a_private_adapter_serves_callers_that_may_read_it(
    http: httpx.Client, hub: HubServer, caplog: pytest.LogCaptureFixture
) -> None:
    hub.add("acme/private", PIRATE, readers={SECRET})
    replies = []
    with caplog.at_level(logging.DEBUG):
        assert spoken(say(http, "acme/private", SECRET)) == spoken(say(http, "local:pirate"))
        for token in (None, "hf_other"):
            answer = say(http, "acme/private", token)
            assert answer.status_code == 404
            replies.append(answer.text)
    replies += [caplog.text, http.get("/info").text, http.get("/metrics").text]
    assert not any(SECRET in text for text in replies)


def test_an_adapters_own_template_changes_its_chats_alone(
    http: httpx.Client, hub: HubServer
) -> None:
    template = b"{{ messages[0].content }} Tell me more."
    hub.add("acme/own", {**PIRATE, "chat_template.jinja": template})
    hub.add("acme/plain", PIRATE)
    whole = [num_prompt_tokens(say(http, name)) for name in ("acme/own", "acme/plain")]
    assert whole[0] != whole[1]
    assert spoken(say(http, "acme/plain")) == spoken(say(http, "local:pirate"))
