"""A driver that does not reply is called once, not by every probe."""

import asyncio

import pytest

from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.engine_commands import EngineCommand
from deployments.ingress.generation.engine import EngineClient, IngressSettings
from deployments.ingress.generation.frames import RequestInboxes
from deployments.ingress.http.errors import RequestError


class SilentDriver:
    """Counts its calls; every call fails."""

    def __init__(self) -> None:
        self.num_descriptions = 0

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        raise AssertionError("no call should come so far")

    async def finish(self, request_id: str, index: int, at: int) -> None:
        raise AssertionError("no call should come so far")

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        raise NotImplementedError

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        raise NotImplementedError

    async def loads(self) -> list[EngineLoad]:
        raise NotImplementedError

    async def describe(self) -> EngineInfo:
        self.num_descriptions += 1
        await asyncio.sleep(0)
        raise ConnectionError("gone")


def test_probes_share_one_failed_description() -> None:
    driver = SilentDriver()
    nowhere = ReplyAddress("127.0.0.1", 1, "")
    engine = EngineClient(driver, RequestInboxes(), lambda: nowhere, IngressSettings())

    async def probe() -> ErrorKind:
        with pytest.raises(RequestError) as caught:
            await engine.info()
        return caught.value.kind

    async def all_at_once() -> list[ErrorKind]:
        return await asyncio.gather(*(probe() for _ in range(20)))

    assert asyncio.run(all_at_once()) == [ErrorKind.UNAVAILABLE] * 20
    assert driver.num_descriptions == 1
