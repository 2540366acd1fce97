"""A real HTTP server over a fake driver, in a thread."""

import asyncio
import json
import socket
import threading
from collections.abc import Iterator
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

import httpx
import msgspec
import openai
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.contract import ReplyAddress
from deployments.ingress.app import build_app
from deployments.ingress.chat_templates.renderer import Renderer
from deployments.ingress.generation.engine import IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.clocks import Clock
from tests.deployments.ingress.pages.browser import CHROMIUM, Browser, chromium
from tests.fakes import FakeDriver, engine_info, write_tokenizer

PATIENCE = 300.0
"""Seconds after which something counts as hanging; a busy machine may pause."""


class Server:
    """One ingress on 127.0.0.1; `driver` is replaced before each test. `clock` is its time."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = write_tokenizer(folder)
        self.text = ModelTokenizer.load(str(folder))
        self._folder = folder
        self.inboxes = RequestInboxes()
        self.driver = FakeDriver(engine_info(folder, self.tokenizer), self.tokenizer)
        self.clock = Clock()
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._route, port=0, log_level="critical", ws="none", loop="asyncio",
                lifespan="off", interface="asgi3", timeout_keep_alive=round(PATIENCE),
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._life = AsyncExitStack()

    def fresh_app(self, settings: IngressSettings = IngressSettings()) -> FastAPI:  # noqa: B008
        """A new driver and a new application over it, behind the same port, at the same time."""
        self.driver = FakeDriver(engine_info(self._folder, self.tokenizer), self.tokenizer)
        self.inboxes = RequestInboxes()
        self.driver.deliver = self.inboxes.deliver
        app = build_app(
            self.driver,
            self.inboxes,
            lambda: ReplyAddress("127.0.0.1", 1, "hush"),
            replace(settings, clock=self.clock, read_text=self._read),
        )
        asyncio.run_coroutine_threadsafe(self._begin(app), self.loop).result(PATIENCE)
        return app

    def _read(self, folder: str) -> ModelTokenizer:
        """The tokenizer that most tests share was read at the start."""
        return self.text if folder == str(self._folder) else ModelTokenizer.load(folder)

    async def _begin(self, app: FastAPI) -> None:
        """Serve this application, and end what the one before has started."""
        self._app, before, self._life = app, self._life, AsyncExitStack()
        await before.aclose()
        await self._life.enter_async_context(app.router.lifespan_context(app))

    async def _route(self, scope: object, receive: object, send: object) -> None:
        await self._app(scope, receive, send)  # type: ignore[arg-type]

    def start(self) -> None:
        started = threading.Event()
        announce = self._uvicorn.startup

        async def startup(sockets: object = None) -> None:
            self.loop = asyncio.get_running_loop()
            await announce(sockets)  # type: ignore[arg-type]
            started.set()

        self._uvicorn.startup = startup  # type: ignore[method-assign]
        self._thread.start()
        assert started.wait(PATIENCE)
        self.fresh_app()

    def stop(self) -> None:
        asyncio.run_coroutine_threadsafe(self._life.aclose(), self.loop).result(PATIENCE)
        self._uvicorn.should_exit = True
        self._thread.join(PATIENCE)

    @property
    def app(self) -> FastAPI:
        """The application that is served now."""
        return self._app

    @property
    def renderer(self) -> Renderer:
        """What renders the application's chat templates."""
        renderer: Renderer = self._app.state.renderer
        return renderer

    @property
    def url(self) -> str:
        port = self._uvicorn.servers[0].sockets[0].getsockname()[1]
        return f"http://127.0.0.1:{port}"


@pytest.fixture(scope="package")
def _server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("tokenizer"))
    server.start()
    yield server
    server.stop()


@pytest.fixture
def server(_server: Server) -> Server:
    """The server with a new driver."""
    _server.fresh_app()
    return _server


@pytest.fixture
def driver(server: Server) -> FakeDriver:
    return server.driver


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=PATIENCE) as client:
        yield client


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="EMPTY", max_retries=0) as client:
        yield client


@pytest.fixture
def room_for_tools(driver: FakeDriver) -> None:
    """Tools as text need more tokens than the small engine has."""
    driver.info = msgspec.structs.replace(driver.info, max_total_tokens=2048, max_input_tokens=2000)


@pytest.fixture(scope="package")
def _browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip("there is no chromium here")
    with chromium(tmp_path_factory.mktemp("profile")) as one:
        yield one


@pytest.fixture
def browser(_browser: Browser) -> Browser:
    """The one browser of these tests, which takes seconds to start; its records are empty."""
    _browser.requested.clear()
    _browser.complaints.clear()
    return _browser


def send_by_hand(server: Server, path: str, body: object) -> socket.socket:
    """Send a request; the caller owns the connection, and reads or hangs up when it likes."""
    payload = json.dumps(body).encode()
    address = httpx.URL(server.url)
    connection = socket.create_connection((address.host, address.port or 80), timeout=PATIENCE)
    head = (
        f"POST {path} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n"
        f"content-length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


def spoken(driver: FakeDriver, index: int = 0) -> str:
    """The answer to a sequence of the fake's last request, decoded at once."""
    request = driver.requests[-1]
    ids = driver.answer(request.sequences[index], request.adapter)
    text: str = driver.tokenizer.decode(ids, skip_special_tokens=True)
    return text
