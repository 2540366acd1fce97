"""Admin commands over a Serve handle: they go to every replica, and are saved."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.admin_commands import AdminStoreError
from deployments.contract import AdapterReport, ErrorKind, Failed, PinAdapter
from deployments.engine_commands import EngineCommand
from deployments.frames import FrameReceiver
from deployments.ingress.deployment import HandleDriver
from deployments.ingress.http.errors import RequestError

RED = AdapterReference(AdapterSource.LOCAL, "red")
PIN = PinAdapter(RED)
GONE = ActorUnavailableError("it died", b"x" * 16)


class Handle:
    """A deployment's handle with these replies of its replicas."""

    def __init__(self, *replies: object) -> None:
        self.replies = replies

    def broadcast(self, method: str, command: EngineCommand) -> "Handle":
        assert method == "adapters"
        return self

    async def results_async(self, return_exceptions: bool) -> Sequence[object]:
        assert return_exceptions
        return self.replies


class MemoryStore:
    """A store in memory; `closed`: it does not answer."""

    def __init__(self, closed: bool = False) -> None:
        self.closed = closed
        self.entries: dict[str, bytes] = {}

    def put(self, key: str, entry: bytes) -> None:
        if self.closed:
            raise AdminStoreError("Ray's store is away")
        self.entries[key] = entry

    def remove(self, key: str) -> None:
        del self.entries[key]

    def read(self) -> dict[str, bytes]:
        return self.entries


def run(store: MemoryStore, *replies: object) -> list[AdapterReport]:
    """Have the replicas pin an adapter."""
    handle: Any = Handle(*replies)
    driver = HandleDriver(handle, FrameReceiver(lambda frame: None), store)
    return asyncio.run(driver.adapters(PIN))


def test_a_pin_is_saved_when_all_living_replicas_have_done_it() -> None:
    store = MemoryStore()
    assert len(run(store, AdapterReport("a"), AdapterReport("b"), GONE)) == 2
    assert len(store.entries) == 1


def test_a_failure_is_reported_and_nothing_is_saved() -> None:
    store = MemoryStore()
    refused = AdapterReport("b", failure=Failed(ErrorKind.ADAPTER_UNAVAILABLE, "the disk is full"))
    assert run(store, AdapterReport("a"), refused)[1] is refused
    assert store.entries == {}


def test_no_replica_replies() -> None:
    for replies in ((), (GONE,)):
        with pytest.raises(RequestError) as error:
            run(MemoryStore(), *replies)
        assert error.value.kind is ErrorKind.UNAVAILABLE


def test_a_command_that_was_not_saved_is_an_error() -> None:
    with pytest.raises(
        RequestError, match=r"start later will not know.*Ray's store is away"
    ) as error:
        run(MemoryStore(closed=True), AdapterReport("a"))
    assert error.value.kind is ErrorKind.UNAVAILABLE
