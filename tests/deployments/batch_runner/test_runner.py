"""Batches from their input to their output, through ends of the process and of the batch."""

import asyncio
import io
import json
import time
from collections.abc import Coroutine
from contextlib import suppress
from pathlib import Path
from typing import Any

import boto3
import pytest

from configs.api import ApiConfig, KeyConfig
from deployments.batch_runner import work
from deployments.contract import ErrorKind, Failed
from deployments.ingress.batches.lines import raw_lines
from deployments.ingress.batches.records import BatchRecord
from deployments.ingress.batches.store import owner_of
from tests.deployments.batch_runner.world import OWNER, World, in_a_hurry, line, when
from tests.s3_server import s3_server


@pytest.fixture(autouse=True)
def _in_a_hurry(monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_hurry(monkeypatch)


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def run(story: Coroutine[Any, Any, None]) -> None:
    asyncio.run(story)


def test_every_line_has_its_result_and_runs_in_the_background(world: World) -> None:
    async def story() -> None:
        id = world.batch([line("a"), "", line("b", n=2), line("c", max_tokens=0)])
        async with world.running():
            record = await world.until(id, "completed")
            await when(lambda: not world.store.open_batches())
        counts = record.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 1)
        good, bad = world.results(record.output_file_id), world.results(record.error_file_id)
        assert set(good) == {"a", "b"}
        body = good["b"]["response"]["body"]
        assert [choice["message"]["content"] for choice in body["choices"]] == ["The fox."] * 2
        assert (good["a"]["response"]["status_code"], good["a"]["error"]) == (200, None)
        assert bad["c"]["response"]["status_code"] == 400
        assert all(request.background for request in world.driver.requests)
        assert world.store.file(OWNER, record.output_file_id or "").purpose == "batch_output"
        reported = [each["response"]["body"]["usage"] for each in good.values()]
        assert record.usage is not None
        assert record.usage.total_tokens == sum(each["total_tokens"] for each in reported)
        assert record.usage.input_tokens == sum(each["prompt_tokens"] for each in reported)

    run(story())


def test_a_batch_goes_on_where_an_ended_process_left_it(tmp_path: Path) -> None:
    world = World(tmp_path, max_running=4)
    ids = [f"line {number}" for number in range(20)]

    async def story() -> None:
        id = world.batch([line(each) for each in ids])
        async with world.running(replies=9):
            await when(lambda: world.record(id).request_counts.completed == 9)
        assert world.record(id).status == "in_progress"
        assert len(world.driver.requests) == 9
        async with world.running():
            record = await world.until(id, "completed")
        assert set(world.results(record.output_file_id)) == set(ids)
        assert record.request_counts.completed == len(ids)
        # What was kept is not computed again.
        assert len(world.driver.requests) == len(ids)

    run(story())


def test_a_cancelled_batch_has_the_results_so_far(world: World) -> None:
    async def story() -> None:
        world.driver.hold_after = 2
        id = world.batch([line(each) for each in "abc"])
        async with world.running():
            await when(lambda: world.driver.requests)
            assert world.store.cancel(OWNER, id).status == "cancelling"
            record = await world.until(id, "cancelled")
        assert world.driver.cancelled.is_set()
        assert record.output_file_id is None
        errors = world.results(record.error_file_id)
        assert {each["error"]["code"] for each in errors.values()} == {"batch_cancelled"}
        assert world.store.cancel(OWNER, id).status == "cancelled"

    run(story())


def test_a_batch_that_takes_too_long_expires(world: World) -> None:
    async def story() -> None:
        world.driver.hold_after = 2
        id = world.batch([line("a")])
        async with world.running():
            await when(lambda: world.driver.requests)
            world.now += 86_400
            record = await world.until(id, "expired")
        errors = world.results(record.error_file_id)
        assert errors["a"]["error"]["code"] == "batch_expired"

    run(story())


@pytest.mark.parametrize("kind", [ErrorKind.OVERLOADED, ErrorKind.UNAVAILABLE])
def test_a_busy_server_is_sent_the_line_again(world: World, kind: ErrorKind) -> None:
    async def story() -> None:
        world.driver.faults[None] = Failed(kind, "not now", retry_after_s=0.01)
        id = world.batch([line("a")])
        async with world.running():
            await when(lambda: world.driver.requests)
            world.driver.faults.clear()
            record = await world.until(id, "completed")
        assert set(world.results(record.output_file_id)) == {"a"}

    run(story())


@pytest.mark.parametrize(
    ("lines", "code", "number"),
    [
        (["not json"], "invalid_json_line", 1),
        ([line("a"), line("a")], "duplicate_custom_id", 2),
        ([{**line("a"), "url": "/v1/embeddings"}], "mismatched_endpoint", 1),
        ([{**line("a"), "method": "GET"}], "invalid_method", 1),
        ([{**line("a"), "custom_id": ""}], "invalid_custom_id", 1),
        ([{**line("a"), "body": [1]}], "invalid_body", 1),
        (["", json.dumps({"custom_id": "a"})], "invalid_json_line", 2),
        (['{"custom_id":"a","url":"/x","body":' + "[" * 100_000], "invalid_json_line", 1),
        (["x" * 9_000_000], "line_too_long", 1),
        ([], "empty_file", None),
        ([line(str(number)) for number in range(51)], "too_many_lines", None),
    ],
)
def test_a_wrong_input_fails_before_any_request(
    tmp_path: Path, lines: list[Any], code: str, number: int | None
) -> None:
    world = World(tmp_path, max_lines=50)

    async def story() -> None:
        id = world.batch(lines)
        async with world.running():
            await when(lambda: world.record(id).status == "failed")
        errors = world.record(id).errors
        assert errors is not None
        assert [(each.code, each.line) for each in errors.data] == [(code, number)]
        assert world.driver.requests == []

    run(story())


def test_a_line_cannot_stream(world: World) -> None:
    async def story() -> None:
        id = world.batch([line("a", stream=True)])
        async with world.running():
            record = await world.until(id, "completed")
        assert world.results(record.error_file_id)["a"]["response"]["status_code"] == 400

    run(story())


def test_a_batch_has_the_permissions_of_its_key(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-1")
    key = KeyConfig(name="team", env="THE_KEY", adapters=("hub:org/*",))
    world.api = ApiConfig(keys=(key,))

    async def story() -> None:
        id = world.batch([line("a", model="org/x"), line("b", model="acme/x")], "team")
        gone = world.batch([line("a")], "left")
        async with world.running():
            record = await world.until(id, "completed", owner_of("team"))
            await when(lambda: world.record(gone, owner_of("left")).status == "failed")
        assert (record.request_counts.completed, record.request_counts.failed) == (1, 1)
        assert [request.payer for request in world.driver.requests] == ["team"]

    run(story())


@pytest.mark.parametrize("lost", ["input", "key"])
def test_a_batch_that_cannot_go_on_fails_with_the_results_so_far(
    world: World, monkeypatch: pytest.MonkeyPatch, lost: str
) -> None:
    monkeypatch.setenv("THE_KEY", "sk-1")
    world.api = ApiConfig(keys=(KeyConfig(name="team", env="THE_KEY"),))
    owner = owner_of("team")

    async def story() -> None:
        id = world.batch([line(each) for each in "abc"], "team")
        async with world.running(replies=2):
            await when(lambda: world.record(id, owner).request_counts.completed == 2)
        if lost == "input":
            world.store.delete_file(owner, world.record(id, owner).input_file_id)
        else:
            world.api = ApiConfig(keys=(KeyConfig(name="other", env="THE_KEY"),))
        async with world.running():
            await when(lambda: world.record(id, owner).status == "failed")
            await when(lambda: not world.store.open_batches())
        record = world.record(id, owner)
        counts = record.request_counts
        assert (counts.total, counts.completed, counts.failed) == (3, 2, 0)
        assert len(world.results(record.output_file_id, owner)) == 2
        assert record.errors is not None
        if lost == "key":
            assert [each.code for each in record.errors.data] == ["unknown_key"]
            unsent = world.results(record.error_file_id, owner)
            assert [each["error"]["code"] for each in unsent.values()] == ["batch_failed"]
        else:
            assert [each.code for each in record.errors.data] == ["invalid_input_file"]
            assert record.error_file_id is None

    run(story())


def test_a_cancelled_batch_ends_though_its_input_is_deleted(world: World) -> None:
    async def story() -> None:
        world.driver.hold_after = 2
        id = world.batch([line("a"), line("b")])
        async with world.running():
            await when(lambda: world.driver.requests)
            world.store.delete_file(OWNER, world.record(id).input_file_id)
            world.store.cancel(OWNER, id)
            await world.until(id, "cancelled")

    run(story())


def test_a_storage_that_is_away_for_a_while_fails_no_batch(world: World) -> None:
    async def story() -> None:
        id = world.batch([line("a")])
        input = f"{OWNER}/files/{world.record(id).input_file_id}.json"
        whole = world.store.storage.read(input) or b""
        world.store.storage.write(input, b"")
        async with world.running():
            await asyncio.sleep(0.1)
            world.store.storage.write(input, whole)
            await world.until(id, "completed")

    run(story())


def test_large_results_are_written_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World(tmp_path, max_running=1)
    monkeypatch.setattr(work, "_PART_SECONDS", 3600.0)
    monkeypatch.setattr(work, "_PART_BYTES", 1)

    async def story() -> None:
        id = world.batch([line(each) for each in "abcdef"])
        async with world.running(replies=5):
            await when(lambda: world.record(id).request_counts.completed >= 4)

    run(story())


def test_old_files_and_batches_are_deleted(world: World) -> None:
    async def story() -> None:
        id = world.batch([line("a")])
        async with world.running():
            record = await world.until(id, "completed")
            await when(lambda: not world.store.open_batches())
        running = world.batch([line("b")])
        world.now += 31 * 86_400
        world.store.delete_expired()
        assert [each.id for each in world.store.batches(OWNER, None, 10)] == [running]
        kept = world.record(running).input_file_id
        assert [each.id for each in world.store.files(OWNER, None, 10, True)] == [kept]
        assert record.output_file_id is not None
        assert len(world.store.storage.objects(f"{OWNER}/files")) == 2

    run(story())


def test_a_bucket_keeps_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    with s3_server() as url:
        boto3.client("s3", endpoint_url=url).create_bucket(Bucket="kept")
        host = url.removeprefix("http://")
        storage = f"s3://kept/loray?scheme=http&endpoint_override={host}&region=us-east-1"
        world = World(tmp_path, storage)

        def none_is_open() -> bool:
            with suppress(OSError):  # The test's server cuts off an object that is just removed.
                return not world.store.open_batches()
            return False

        async def story() -> None:
            id = world.batch([line("a"), line("b")])
            async with world.running():
                record = await world.until(id, "completed")
                await when(none_is_open)
            assert set(world.results(record.output_file_id)) == {"a", "b"}

        run(story())


def test_lines_are_cut_at_the_same_borders_however_they_are_read() -> None:
    class Slow:
        def __init__(self, content: bytes) -> None:
            self.content = content

        def read(self, _: int) -> bytes:
            piece, self.content = self.content[:3], self.content[3:]
            return piece

    text = b"\xef\xbb\xbfone\n\n  \ntwo\r\n" + b"x" * 30 + b"\nthree"
    found = list(raw_lines(Slow(text), 10))  # type: ignore[arg-type]
    assert [number for number, _ in found] == [1, 4, 5, 6]
    assert [raw for _, raw in found][:2] == [b"one", b"two\r"]
    assert len(found[2][1]) > 10
    assert found[3][1] == b"three"


def test_reading_a_long_line_takes_time_in_proportion_to_its_length() -> None:
    def seconds(megabytes: int) -> float:
        content = io.BytesIO(b"x" * megabytes * 2**20 + b"\n")
        began = time.process_time()
        assert len(list(raw_lines(content, 2**30))) == 1
        return time.process_time() - began

    # Joined anew with each piece, 16 MiB took 250 times as long as 1 MiB.
    assert min(seconds(16) for _ in range(3)) < 80 * min(seconds(1) for _ in range(3))


def test_no_result_is_lost_while_its_part_is_still_written(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = work.BatchWork._write_part

    def slowly(self: work.BatchWork, finished: bytes, record: BatchRecord) -> None:
        time.sleep(0.2)
        write(self, finished, record)

    monkeypatch.setattr(work.BatchWork, "_write_part", slowly)

    async def story() -> None:
        id = world.batch([line(str(number)) for number in range(12)])
        async with world.running():
            record = await world.until(id, "completed")
        assert len(world.results(record.output_file_id)) == 12

    run(story())
