"""A driver that does not reply is called once, not by every probe."""

import asyncio
from pathlib import Path

import pytest

from deployments.contract import EngineInfo, ErrorKind, ReplyAddress
from deployments.ingress.generation.engine import EngineClient, IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.errors import RequestError
from tests.fakes import FakeDriver, byte_level_tokenizer, engine_info


class SilentDriver(FakeDriver):
    """Fails after the other probes have come."""

    async def describe(self) -> EngineInfo:
        await asyncio.sleep(0)
        return await super().describe()


def test_probes_share_one_failed_description() -> None:
    tokenizer = byte_level_tokenizer()
    driver = SilentDriver(engine_info(Path(), tokenizer), tokenizer)
    driver.broken = ConnectionError("gone")
    nowhere = ReplyAddress("127.0.0.1", 1, "")
    engine = EngineClient(driver, RequestInboxes(), lambda: nowhere, IngressSettings())

    async def probe() -> ErrorKind:
        with pytest.raises(RequestError) as caught:
            await engine.info()
        return caught.value.kind

    async def all_at_once() -> list[ErrorKind]:
        return await asyncio.gather(*(probe() for _ in range(20)))

    assert asyncio.run(all_at_once()) == [ErrorKind.UNAVAILABLE] * 20
    assert driver.descriptions == 1
