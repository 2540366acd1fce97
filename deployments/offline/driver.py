"""The driver's interface over an engine in the same process."""

from configs.wire.adapters import AdapterReference
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.driver.engine import DriverEngine
from deployments.engine_commands import EngineCommand


class EngineDriver:
    """`Driver` over one engine on the same event loop."""

    def __init__(self, engine: DriverEngine) -> None:
        self._engine = engine

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end."""
        return await self._engine.generate(request, reply_to)

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """End a sequence after `at` tokens."""
        await self._engine.finish(request_id, index, at)

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """The adapter's own chat template."""
        return await self._engine.chat_template(adapter, api_token, allowed, payer)

    async def loads(self) -> list[EngineLoad]:
        """What the engine has to do now."""
        return [await self._engine.load()]

    async def describe(self) -> EngineInfo:
        """What is served."""
        return await self._engine.describe()

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        """Execute an admin command: about adapters, or to sleep or wake."""
        return [await self._engine.adapters(command)]
