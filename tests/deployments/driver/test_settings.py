"""An operator's `user_config` with a fault changes nothing, and ends no replica."""

import asyncio
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

import pytest

from configs.runtime import RuntimeConfig
from deployments.admin_commands import AdminStoreError
from deployments.contract import (
    ListAdapters,
)
from deployments.driver.engine import DriverEngine
from deployments.driver.settings import OperatorSettings
from tests.deployments.driver.fake_ranks import FakeGroup
from tests.deployments.driver.routing.stories import NOWHERE, play, request

LIST = ListAdapters()
TYPOS = [
    {"pined_adapters": ["red"]},
    {"max_queued": -1},
    {"pinned_adapters": ["nobody"]},
    {"names": {"sql": " "}},
    {"adapters": {"red": {"wait": 1}}},
    {"max_step_tokens": 0, "pinned_adapters": ["red"]},
]


class Shelf:
    """A store in memory; `down`: it cannot be reached."""

    def __init__(self) -> None:
        self.kept: dict[str, bytes] = {}
        self.down = False

    def put(self, key: str, order: bytes) -> None:
        self._ask()
        self.kept[key] = order

    def remove(self, key: str) -> None:
        del self.kept[key]

    def read(self) -> Mapping[str, bytes]:
        self._ask()
        return self.kept

    def _ask(self) -> None:
        if self.down:
            raise AdminStoreError("no answer")


async def pinned(engine: DriverEngine) -> set[str]:
    report = await engine.adapters(LIST)
    return {status.reference.id for status in report.adapters if status.pinned}


def played(root: Path, story: Callable[[DriverEngine, Shelf], Awaitable[None]]) -> None:
    shelf = Shelf()

    async def whole(engine: DriverEngine, group: FakeGroup) -> None:
        await story(engine, shelf)

    play(root, whole)


@pytest.mark.parametrize("typo", TYPOS)
def test_a_fault_on_a_running_replica_keeps_all_its_settings(
    root: Path, typo: dict[str, object]
) -> None:
    async def story(engine: DriverEngine, shelf: Shelf) -> None:
        settings = OperatorSettings(engine.reconfigure, shelf)
        await settings.take({"pinned_adapters": ["blue"], "max_queued": 77})
        await settings.take({"max_queued": 5, "names": {"sql": "local:red"}} | typo)
        assert settings.refused
        assert await pinned(engine) == {"blue"}
        assert (await engine.describe()).max_queued == 77
        assert not any(one.id == "sql" for one in (await engine.describe()).adapters)
        assert (await engine.generate(request("r", [1], 2, "red"), NOWHERE)).sequences
        await settings.take({"max_queued": 5})
        assert settings.refused is None
        assert ((await engine.describe()).max_queued, await pinned(engine)) == (5, set())

    played(root, story)


def test_a_pin_that_cannot_be_fetched_does_not_prevent_a_start(root: Path) -> None:
    async def story(engine: DriverEngine, shelf: Shelf) -> None:
        settings = OperatorSettings(engine.reconfigure, shelf)
        await settings.take({"pinned_adapters": ["blue", "nobody", "red"], "max_queued": 77})
        assert settings.refused is not None
        assert "nobody" in settings.refused
        assert await pinned(engine) == {"blue", "red"}
        assert (await engine.describe()).max_queued == 77

    played(root, story)


def test_a_replica_that_starts_under_a_fault_takes_the_last_good_settings(root: Path) -> None:
    async def story(engine: DriverEngine, shelf: Shelf) -> None:
        await OperatorSettings(engine.reconfigure, shelf).take({"pinned_adapters": ["blue"]})
        await engine.reconfigure(RuntimeConfig())
        later = OperatorSettings(engine.reconfigure, shelf)
        await later.take({"pined_adapters": ["red"]})
        assert later.refused is not None
        assert "pined_adapters" in later.refused
        assert await pinned(engine) == {"blue"}

    played(root, story)


@pytest.mark.parametrize("down", [False, True])
def test_a_first_start_under_a_fault_names_the_fault(root: Path, down: bool) -> None:
    async def story(engine: DriverEngine, shelf: Shelf) -> None:
        shelf.down = down
        with pytest.raises(ValueError, match="pined_adapters"):
            await OperatorSettings(engine.reconfigure, shelf).take({"pined_adapters": ["red"]})

    played(root, story)


def test_settings_are_applied_without_a_store(root: Path) -> None:
    async def story(engine: DriverEngine, shelf: Shelf) -> None:
        shelf.down = True
        settings = OperatorSettings(engine.reconfigure, shelf)
        await settings.take({"pinned_adapters": ["blue"]})
        assert (settings.refused, await pinned(engine)) == (None, {"blue"})

    played(root, story)


def test_a_slow_pin_keeps_a_running_replica_from_no_requests() -> None:
    async def story() -> None:
        arrived, ended, applied = asyncio.Event(), asyncio.Event(), []

        async def apply(runtime: RuntimeConfig) -> None:
            if runtime.pinned_adapters == ("slow",):
                await arrived.wait()
                ended.set()
            applied.append(runtime.max_queued)

        settings = OperatorSettings(apply, Shelf(), patience_s=0.01)
        await settings.take({"max_queued": 1})
        slow = {"pinned_adapters": ["slow"]}
        await settings.take({"max_queued": 2, **slow})
        assert settings.is_pending
        await settings.retry()
        await settings.take({"max_queued": 3, **slow})
        assert (settings.is_pending, applied) == (True, [1])
        arrived.set()
        await ended.wait()
        await settings.take({"max_queued": 4, **slow})
        assert (settings.refused, applied) == (None, [1, 3, 4])

    asyncio.run(story())


def test_an_unexpected_fault_after_take_returned_is_reported_and_retried() -> None:
    async def story() -> None:
        goes_on, fails = asyncio.Event(), True

        async def apply(runtime: RuntimeConfig) -> None:
            if runtime.pinned_adapters:
                await goes_on.wait()
                if fails:
                    raise RuntimeError

        settings = OperatorSettings(apply, Shelf(), patience_s=0.01)
        await settings.take({})
        await settings.take({"pinned_adapters": ["slow"]})
        goes_on.set()
        assert settings._attempt is not None
        await asyncio.wait({settings._attempt})
        assert settings.refused == "RuntimeError"
        with pytest.raises(RuntimeError):
            await settings.retry()
        fails = False
        await settings.retry()
        assert settings.refused is None

    asyncio.run(story())


def test_refused_settings_are_tried_again() -> None:
    async def story() -> None:
        tried: list[RuntimeConfig] = []

        async def apply(runtime: RuntimeConfig) -> None:
            tried.append(runtime)
            if len(tried) == 2:
                raise ValueError("not now")

        settings = OperatorSettings(apply, Shelf())
        await settings.take({})
        await settings.take({"max_queued": 3})
        assert settings.refused == "not now"
        await settings.retry()
        assert settings.refused is None
        await settings.retry()
        assert [one.max_queued for one in tried] == [None, 3, 3]

    asyncio.run(story())
