"""Batches that wait: for their key's quota, for a busy server, for their turn."""

import asyncio
import gc
import tracemalloc
from collections.abc import Coroutine
from pathlib import Path
from typing import Any

import pytest

from configs.api import ApiConfig, KeyConfig
from deployments.batch_runner.runner import _MAX_BATCHES
from deployments.contract import ErrorKind, Failed
from deployments.ingress.batches.records import BatchStatus
from deployments.ingress.batches.store import owner_of
from tests.deployments.batch_runner.world import OWNER, World, in_a_hurry, line, when

TEAM, OTHERS = owner_of("team"), owner_of("others")


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_hurry(monkeypatch)


@pytest.fixture
def keys(monkeypatch: pytest.MonkeyPatch) -> ApiConfig:
    """A key of two requests a minute, and one without a quota."""
    for name in ("TEAM", "OTHERS"):
        monkeypatch.setenv(name, name)
    team = KeyConfig(name="team", env="TEAM", requests_per_minute=2)
    return ApiConfig(keys=(team, KeyConfig(name="others", env="OTHERS")))


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def lines(count: int) -> list[dict[str, Any]]:
    return [line(f"line {number}") for number in range(count)]


def test_a_key_over_its_quota_waits_alone(tmp_path: Path, keys: ApiConfig) -> None:
    world = World(tmp_path, max_running=1)
    world.api = keys

    async def story() -> None:
        slow = [world.batch(lines(4), "team") for _ in range(_MAX_BATCHES)]
        async with world.running():
            await when(lambda: len(world.driver.requests) == 2)
            quick = world.batch(lines(3), "others")
            await world.until(quick, "completed", OTHERS)
            attempts = world.attempts
            # Each batch has tried one line, and none tries again before its time.
            assert attempts <= 2 + len(slow) + 3
            await asyncio.sleep(0.3)
            assert world.attempts == attempts
        payers = [request.payer for request in world.driver.requests]
        assert payers == ["team"] * 2 + ["others"] * 3
        assert sum(world.record(each, TEAM).request_counts.completed for each in slow) == 2

    run(story())


def test_a_batch_that_waits_keeps_few_lines_in_memory(tmp_path: Path, keys: ApiConfig) -> None:
    world = World(tmp_path)
    world.api = keys

    async def story() -> None:
        world.batch([line(str(each), user="x" * 2**20) for each in range(40)], "team")
        tracemalloc.start()
        try:
            async with world.running():
                await when(lambda: world.attempts > 2)
                await asyncio.sleep(0.5)
                gc.collect()
                kept, _ = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
        assert len(world.driver.requests) == 2
        assert kept < 16 * 2**20

    run(story())


def test_lines_that_were_refused_are_sent_again_and_answered_once(tmp_path: Path) -> None:
    world = World(tmp_path, max_running=4)
    ids = {each["custom_id"] for each in lines(60)}

    async def story() -> None:
        id = world.batch(lines(60))
        async with world.running(replies=40, refuses=lambda number: number % 3 == 1):
            await when(lambda: world.record(id).request_counts.completed >= 20)
        async with world.running(refuses=lambda number: number % 3 == 1):
            record = await world.until(id, "completed")
        assert set(world.results(record.output_file_id)) == ids
        assert record.request_counts.completed == len(ids)

    run(story())


def test_a_refused_line_does_not_stop_the_others_for_long(tmp_path: Path) -> None:
    """As one over an adapter that cannot be had now."""
    world = World(tmp_path, max_running=2)
    away = Failed(ErrorKind.ADAPTER_UNAVAILABLE, "not now", retry_after_s=0.01)

    async def story() -> None:
        world.driver.faults["org/x"] = away
        id = world.batch([line("x", model="org/x"), line("y", model="org/x"), *lines(6)])
        async with world.running():
            await when(lambda: world.record(id).request_counts.completed == 6)
            world.driver.faults.clear()
            record = await world.until(id, "completed")
        assert len(world.results(record.output_file_id)) == 8

    run(story())


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_waits_ends_at_once(tmp_path: Path, keys: ApiConfig, end: BatchStatus) -> None:
    world = World(tmp_path)
    world.api = keys

    async def story() -> None:
        id = world.batch(lines(5), "team")
        async with world.running():
            await when(lambda: world.record(id, TEAM).request_counts.completed == 2)
            _end(world, id, end, TEAM)
            await when(lambda: world.record(id, TEAM).status == end)
        record = world.record(id, TEAM)
        assert len(world.results(record.output_file_id, TEAM)) == 2
        errors = world.results(record.error_file_id, TEAM)
        assert {each["error"]["code"] for each in errors.values()} == {f"batch_{end}"}
        assert len(errors) == 3

    run(story())


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_without_a_turn_ends_at_once(
    tmp_path: Path, keys: ApiConfig, end: BatchStatus
) -> None:
    world = World(tmp_path)
    world.api = keys

    async def story() -> None:
        slow = [world.batch(lines(4), "team") for _ in range(_MAX_BATCHES)]
        async with world.running():
            await when(lambda: len(world.driver.requests) == 2)
            world.now += 1
            last = world.batch(lines(2), "team")
            await asyncio.sleep(0.1)
            assert world.record(last, TEAM).status == "validating"
            if end == "expired":
                record = world.record(last, TEAM)
                record.expires_at = world.store.now
                world.store.save_batch(TEAM, record)
            else:
                world.store.cancel(TEAM, last)
            await when(lambda: world.record(last, TEAM).status == end)
            assert {world.record(each, TEAM).status for each in slow} == {"in_progress"}
        assert len(world.driver.requests) == 2

    run(story())


@pytest.mark.parametrize("end", ["cancelled", "expired"])
def test_a_batch_that_is_to_end_sends_nothing(world: World, end: BatchStatus) -> None:
    async def story() -> None:
        id = world.batch(lines(5))
        _end(world, id, end)
        async with world.running():
            await when(lambda: world.record(id).status == end)
        assert world.attempts == 0

    run(story())


def _end(world: World, id: str, end: BatchStatus, owner: str = OWNER) -> None:
    """Cancel a batch, or let its time be over."""
    if end == "cancelled":
        world.store.cancel(owner, id)
    else:
        world.now += 86_400
