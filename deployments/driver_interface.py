"""The calls that the ingress makes to a driver; only `ingress/generation/` makes them."""

from typing import Protocol

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
from deployments.engine_commands import EngineCommand


class Driver(Protocol):
    """The driver's methods for the ingress."""

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end; token frames go to `reply_to` meanwhile."""
        ...

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """A stop string was matched: keep `at` tokens of this sequence and end it."""
        ...

    async def adapters(self, command: EngineCommand) -> list[AdapterReport]:
        """Have every driver replica execute an admin command; one report from each."""
        ...

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """The adapter's own chat template; its files are fetched if they are not here.

        allowed, payer: as in `GenerateRequest`.
        """
        ...

    async def loads(self) -> list[EngineLoad]:
        """What every driver replica has to do now."""
        ...

    async def describe(self) -> EngineInfo:
        """What is served, for validation and /info."""
        ...
