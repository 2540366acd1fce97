"""Stories of an adapter directory over a local hub."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from configs.adapters import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    AdapterSource,
)
from deployments.driver.adapters.directory import AdapterDirectory
from sources.adapters import AdapterSources
from sources.base import Token
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.sources.adapter_files import adapters_config

LINGER_S = 0.02
SQL = AdapterReference(AdapterSource.HUB, "acme/sql")
Story = Callable[[AdapterDirectory], Awaitable[None]]


def patient_config(
    root: Path, fetch: Mapping[str, object] | None = None, **others: object
) -> AdaptersConfig:
    """No answer comes too late, or grows old, unless a test wants it so."""
    limits = ("connect_timeout_s", "read_timeout_s", "recheck_s", "refusal_s")
    patient = dict.fromkeys(limits, PATIENCE_S)
    return adapters_config(root, {**patient, **(fetch or {})}, **others)


def pass_by(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Let time pass on the event loop's clock."""
    loop = asyncio.get_running_loop()
    time = loop.time
    monkeypatch.setattr(loop, "time", lambda: time() + seconds)


def play(config: AdaptersConfig, story: Story) -> AdapterDirectory:
    """Run a story; afterwards all maps must agree and no file be kept without a holder."""

    async def act() -> AdapterDirectory:
        directory = AdapterDirectory(AdapterSources(config), config, linger_s=LINGER_S)
        await story(directory)
        directory.check()
        directory.close()
        return directory

    directory = asyncio.run(asyncio.wait_for(act(), PATIENCE_S))
    directory._sources.cache.check()
    return directory


async def used(
    directory: AdapterDirectory, reference: AdapterReference, token: Token = False
) -> AdapterKey:
    """Resolve, and hold the key no longer."""
    key = await directory.resolve(reference, token)
    directory.release(key)
    return key


def is_on_disk(directory: AdapterDirectory, key: AdapterKey) -> bool:
    return Path(directory.fetched(key).folder).exists()


async def used_at_last(directory: AdapterDirectory, reference: AdapterReference) -> AdapterKey:
    """Try until it is to be had."""
    while True:
        try:
            return await used(directory, reference)
        except AdapterError:
            await asyncio.sleep(0.01)


async def refusal(
    directory: AdapterDirectory, reference: AdapterReference, token: Token = False
) -> AdapterRefusal:
    with pytest.raises(AdapterError) as caught:
        await directory.resolve(reference, token)
    return caught.value.refusal
