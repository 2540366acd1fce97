import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import httpx
import pytest
from fastapi import FastAPI

from deployments.contract import ReplyAddress
from deployments.ingress.app import build_app
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from tests.fakes import FakeDriver, engine_info, write_tokenizer


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    tokenizer = write_tokenizer(tmp_path)
    return FakeDriver(engine_info(tmp_path, tokenizer), tokenizer)


def _client(app: FastAPI) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://ingress")


def test_an_unexpected_exception_is_a_500_without_details(driver: FakeDriver) -> None:
    def nowhere() -> ReplyAddress:
        raise LookupError("a secret path")

    async def story() -> None:
        app = build_app(driver, RequestInboxes(), nowhere, IngressSettings())
        async with _client(app) as http:
            body = {"model": "tiny", "prompt": "a"}
            reply = await http.post("/v1/completions", json=body)
            assert (reply.status_code, reply.json()["error"]["message"]) == (500, "internal error")
            reply = await http.post("/generate", json={"inputs": "a"})
            assert reply.status_code == 500
            assert "secret" not in reply.text

    asyncio.run(story())


def test_the_address_may_be_bound_in_the_lifespan(driver: FakeDriver) -> None:
    bound: list[ReplyAddress] = []

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        bound.append(ReplyAddress("127.0.0.1", 1, "hush"))
        yield
        bound.clear()

    async def story() -> None:
        inboxes = RequestInboxes()
        driver.deliver = inboxes.deliver
        app = build_app(driver, inboxes, lambda: bound[-1], IngressSettings(), lifespan)
        async with app.router.lifespan_context(app), _client(app) as http:
            body = {"model": "tiny", "prompt": "a"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert bound == []

    asyncio.run(story())


def test_a_prefix_of_the_proxy_does_not_change_the_dialect(driver: FakeDriver) -> None:
    async def story() -> None:
        app = build_app(
            driver, RequestInboxes(), lambda: ReplyAddress("h", 1, "x"), IngressSettings()
        )
        transport = httpx.ASGITransport(app, root_path="/llm")
        async with httpx.AsyncClient(transport=transport, base_url="http://ingress") as http:
            reply = await http.post("/llm/v1/completions", json={})
            assert (reply.status_code, reply.json()["error"]["param"]) == (400, "model")
            reply = await http.post("/llm/generate", json={})
            assert (reply.status_code, reply.json()["error_type"]) == (422, "validation")

    asyncio.run(story())
