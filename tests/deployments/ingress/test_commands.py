"""Commands over a Serve handle: to every replica, and what lasts of them into the ledger."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError

from configs.wire.adapters import AdapterReference, AdapterSource
from deployments.admin_commands import AdminStoreError
from deployments.contract import AdapterAction, AdapterCommand, AdapterReport, ErrorKind, Failed
from deployments.frames import FrameReceiver
from deployments.ingress.deployment import HandleDriver
from deployments.ingress.http.errors import RequestError

RED = AdapterReference(AdapterSource.LOCAL, "red")
PIN = AdapterCommand(AdapterAction.PIN, RED)
GONE = ActorUnavailableError("it died", b"x" * 16)


class Handle:
    """A deployment's handle whose replicas answer so."""

    def __init__(self, *answers: object) -> None:
        self.answers = answers

    def broadcast(self, method: str, command: AdapterCommand) -> "Handle":
        assert method == "adapters"
        return self

    async def results_async(self, return_exceptions: bool) -> Sequence[object]:
        assert return_exceptions
        return self.answers


class Book:
    """A ledger; `closed`: it does not answer."""

    def __init__(self, closed: bool = False) -> None:
        self.closed = closed
        self.orders: dict[str, bytes] = {}

    def put(self, key: str, order: bytes) -> None:
        if self.closed:
            raise AdminStoreError("Ray's store is away")
        self.orders[key] = order

    def remove(self, key: str) -> None:
        del self.orders[key]

    def read(self) -> dict[str, bytes]:
        return self.orders


def run(book: Book, *answers: object) -> list[AdapterReport]:
    """Have the replicas pin an adapter."""
    handle: Any = Handle(*answers)
    driver = HandleDriver(handle, FrameReceiver(lambda frame: None), book)
    return asyncio.run(driver.adapters(PIN))


def test_a_pin_is_written_down_when_all_that_live_have_done_it() -> None:
    book = Book()
    assert len(run(book, AdapterReport("a"), AdapterReport("b"), GONE)) == 2
    assert len(book.orders) == 1


def test_one_that_refuses_is_reported_and_nothing_written_down() -> None:
    book = Book()
    refused = AdapterReport("b", failure=Failed(ErrorKind.ADAPTER_UNAVAILABLE, "the disk is full"))
    assert run(book, AdapterReport("a"), refused)[1] is refused
    assert book.orders == {}


def test_nobody_answers() -> None:
    for answers in ((), (GONE,)):
        with pytest.raises(RequestError) as told:
            run(Book(), *answers)
        assert told.value.kind is ErrorKind.UNAVAILABLE


def test_what_could_not_be_written_down_is_said() -> None:
    with pytest.raises(
        RequestError, match=r"start later will not know.*Ray's store is away"
    ) as told:
        run(Book(closed=True), AdapterReport("a"))
    assert told.value.kind is ErrorKind.UNAVAILABLE
