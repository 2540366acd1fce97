"""A real HTTP server over a fake driver, in a thread."""

import threading
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest
import uvicorn
from fastapi import FastAPI

from deployments.contract import ReplyAddress
from deployments.ingress.api import build_app
from deployments.ingress.engine import IngressSettings
from deployments.ingress.frames import Mailbox
from deployments.ingress.text import Text
from tests.fakes import FakeDriver, engine_info, write_tokenizer


class Server:
    """One ingress on 127.0.0.1; `driver` is replaced before each test."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = write_tokenizer(folder)
        self.text = Text.load(str(folder))
        self._folder = folder
        self.mailbox = Mailbox()
        self.driver = FakeDriver(engine_info(folder, self.tokenizer), self.tokenizer)
        self._uvicorn = uvicorn.Server(
            uvicorn.Config(
                self._route, port=0, log_level="critical", ws="none", loop="asyncio",
                lifespan="off", interface="asgi3",
            )
        )  # fmt: skip
        self._thread = threading.Thread(target=self._uvicorn.run, daemon=True)
        self._app = self.fresh_app()

    def fresh_app(self, settings: IngressSettings = IngressSettings()) -> FastAPI:  # noqa: B008
        """A new driver and a new application over it, behind the same port."""
        self.driver = FakeDriver(engine_info(self._folder, self.tokenizer), self.tokenizer)
        self.mailbox = Mailbox()
        self.driver.deliver = self.mailbox.deliver
        self._app = build_app(
            self.driver,
            self.mailbox,
            lambda: ReplyAddress("127.0.0.1", 1, "hush"),
            settings,
        )
        return self._app

    async def _route(self, scope: object, receive: object, send: object) -> None:
        await self._app(scope, receive, send)  # type: ignore[arg-type]

    def start(self) -> None:
        started = threading.Event()
        announce = self._uvicorn.startup

        async def startup(sockets: object = None) -> None:
            await announce(sockets)  # type: ignore[arg-type]
            started.set()

        self._uvicorn.startup = startup  # type: ignore[method-assign]
        self._thread.start()
        assert started.wait(timeout=30)

    def stop(self) -> None:
        self._uvicorn.should_exit = True
        self._thread.join(timeout=30)

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
    """The server with a driver that nobody has used."""
    _server.fresh_app()
    return _server


@pytest.fixture
def driver(server: Server) -> FakeDriver:
    return server.driver


@pytest.fixture
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


def spoken(driver: FakeDriver, index: int = 0) -> str:
    """What a sequence of the fake's last request comes to, decoded at once."""
    request = driver.requests[-1]
    ids = driver.answer(request.sequences[index], request.adapter)
    text: str = driver.tokenizer.decode(ids, skip_special_tokens=True)
    return text
