import asyncio
import threading
from pathlib import Path

import pytest

from deployments.contract import EngineInfo, ErrorKind, ReplyAddress
from deployments.ingress.generation.engine import EngineClient, IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.errors import RequestError
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.clocks import Clock
from tests.deployments.ingress.conftest import PATIENCE
from tests.fakes import FakeDriver, engine_info, write_tokenizer


@pytest.fixture
def driver(tmp_path: Path) -> FakeDriver:
    tokenizer = write_tokenizer(tmp_path)
    return FakeDriver(engine_info(tmp_path, tokenizer), tokenizer)


def _engine(driver: FakeDriver, clock: Clock) -> EngineClient:
    settings = IngressSettings(clock=clock)
    return EngineClient(driver, RequestInboxes(), lambda: ReplyAddress("h", 1, "hush"), settings)


def test_concurrent_requests_share_one_description(driver: FakeDriver) -> None:
    async def story() -> None:
        clock = Clock()
        engine = _engine(driver, clock)
        answers = await asyncio.gather(*(engine.served() for _ in range(20)))
        assert {id(served.tokenizer) for served in answers} == {id(answers[0].tokenizer)}
        infos: list[EngineInfo] = await asyncio.gather(*(engine.info() for _ in range(20)))
        assert infos == [driver.info] * 20
        assert driver.descriptions == 1
        clock.now += 1.5
        await asyncio.gather(*(engine.served() for _ in range(20)))
        assert driver.descriptions == 1
        await asyncio.gather(*(engine.info() for _ in range(20)))
        assert driver.descriptions == 2

    asyncio.run(story())


def test_a_failed_description_is_requested_again(driver: FakeDriver) -> None:
    async def story() -> None:
        engine = _engine(driver, Clock())
        driver.broken = ConnectionError("starting")
        with pytest.raises(RequestError, match="did not answer") as caught:
            await engine.served()
        assert caught.value.kind is ErrorKind.UNAVAILABLE
        driver.broken = None
        assert (await engine.served()).info == driver.info

    asyncio.run(story())


def test_callers_that_leave_do_not_have_the_tokenizer_read_again(
    driver: FakeDriver,
) -> None:
    may_end = threading.Event()
    read: list[str] = []

    def reading(folder: str) -> ModelTokenizer:
        read.append(folder)
        may_end.wait(PATIENCE)
        return ModelTokenizer.load(folder)

    async def story() -> None:
        settings = IngressSettings(clock=Clock(), read_text=reading)
        engine = EngineClient(
            driver, RequestInboxes(), lambda: ReplyAddress("h", 1, "hush"), settings
        )
        for _ in range(2):
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(engine.info(), 0.05)
        may_end.set()
        assert await engine.info() is driver.info
        assert len(read) == 1

    asyncio.run(story())


def test_a_tokenizer_is_read_before_the_driver_answers(driver: FakeDriver, tmp_path: Path) -> None:
    """Once, if the driver names the same folder."""
    read: list[str] = []
    begun = threading.Event()

    def reading(folder: str) -> ModelTokenizer:
        read.append(folder)
        begun.set()
        return ModelTokenizer.load(folder)

    async def story(ahead: str) -> None:
        settings = IngressSettings(clock=Clock(), read_text=reading, model_folder=ahead)
        engine = EngineClient(
            driver, RequestInboxes(), lambda: ReplyAddress("h", 1, "hush"), settings
        )
        engine.read_ahead()
        assert await asyncio.to_thread(begun.wait, PATIENCE)
        assert await engine.info() is driver.info

    asyncio.run(story(driver.info.tokenizer))
    assert read == [driver.info.tokenizer]
    read.clear()
    begun.clear()
    asyncio.run(story(str(tmp_path / "another")))
    assert read == [str(tmp_path / "another"), driver.info.tokenizer]


def test_an_unsupported_tokenizer_is_reported_and_read_once(
    driver: FakeDriver, tmp_path: Path
) -> None:
    read: list[str] = []

    def reading(folder: str) -> ModelTokenizer:
        read.append(folder)
        raise ValueError("this tokenizer is not served")

    async def story() -> None:
        settings = IngressSettings(clock=Clock(), read_text=reading)
        engine = EngineClient(
            driver, RequestInboxes(), lambda: ReplyAddress("h", 1, "hush"), settings
        )
        for _ in range(3):
            with pytest.raises(RequestError, match="this tokenizer is not served") as caught:
                await engine.served()
            assert caught.value.kind is ErrorKind.UNAVAILABLE
        assert read == [str(tmp_path)]

    asyncio.run(story())
