"""Head starts over a Serve handle: to the replica that Serve chose last, and taken back in time."""

import asyncio
import threading
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import pytest
from ray.exceptions import ActorUnavailableError
from ray.serve.exceptions import BackPressureError, DeploymentUnavailableError

from deployments.contract import Completion, GenerateRequest, ReplyAddress
from deployments.early_submit import _listener, replica_listener, replica_selected
from deployments.ingress.deployment import HandleDriver
from deployments.ingress.http.errors import RequestError
from tests.deployments.driver.routing.stories import PATIENCE_S

HERE = ReplyAddress("h", 1, "hush")
REQUEST, COMPLETION = GenerateRequest("r", []), Completion([])


class Receiver:
    """Takes what would go by socket; `away` replicas have not dialled."""

    def __init__(self, *away: str) -> None:
        self.away = away
        self.sent: list[str] = []

    def submit_early(self, replica: str, request: GenerateRequest) -> bool:
        assert request is REQUEST
        if replica in self.away:
            return False
        self.sent.append(f"{replica} begins")
        return True

    def withdraw(self, replica: str, request_id: str) -> None:
        assert request_id == "r"
        self.sent.append(f"{replica} ends")


class Response:
    """What a call of a handle returns."""

    def __init__(self, task: "asyncio.Task[Completion]") -> None:
        self.task = task

    def __await__(self) -> Generator[Any, None, Completion]:
        return self.task.__await__()

    def cancel(self) -> None:
        self.task.cancel()


class Handle:
    """A deployment's handle: Serve chooses these replicas one after the other, then answers so."""

    def __init__(self, *selected: str, answer: Completion | Exception = COMPLETION) -> None:
        self.selected = selected
        self.answer = answer
        self.free = asyncio.Event()
        self.replica_reported = asyncio.Event()
        self.free.set()

    @property
    def generate(self) -> "Handle":
        return self

    def remote(self, request: GenerateRequest, reply_to: ReplyAddress) -> Response:
        assert (request, reply_to) == (REQUEST, HERE)
        return Response(asyncio.create_task(self._serve()))

    async def _serve(self) -> Completion:
        for replica in self.selected:
            await asyncio.sleep(0)
            replica_selected(replica)
        self.replica_reported.set()
        await self.free.wait()
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def play(story: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def driver_of(handle: Any, receiver: Any) -> HandleDriver:
    store: Any = None
    return HandleDriver(handle, receiver, store)


@pytest.mark.parametrize(
    ("selected", "sent"),
    [
        ("", []),
        ("a", ["a begins"]),
        ("aa", ["a begins"]),
        ("ab", ["a begins", "a ends", "b begins"]),
        ("aba", ["a begins", "a ends", "b begins", "b ends", "a begins"]),
        ("ax", ["a begins", "a ends"]),
        ("xa", ["a begins"]),
    ],
)
def test_the_last_selected_replica_keeps_the_early_submit(selected: str, sent: list[str]) -> None:
    async def story() -> None:
        receiver = Receiver("x")
        assert await driver_of(Handle(*selected), receiver).generate(REQUEST, HERE) is COMPLETION
        assert receiver.sent == sent

    play(story)


@pytest.mark.parametrize(
    ("fault", "seen"),
    [
        (ActorUnavailableError("it died", b"x" * 16), RequestError),
        (BackPressureError(num_queued_requests=1, max_queued_requests=1), RequestError),
        (DeploymentUnavailableError(None), DeploymentUnavailableError),
    ],
)
def test_a_failed_call_withdraws_its_early_submit(fault: Exception, seen: type[Exception]) -> None:
    async def story() -> None:
        receiver = Receiver()
        with pytest.raises(seen):
            await driver_of(Handle("a", answer=fault), receiver).generate(REQUEST, HERE)
        assert receiver.sent == ["a begins", "a ends"]

    play(story)


def test_a_client_that_leaves_withdraws_its_early_submit() -> None:
    async def story() -> None:
        receiver, handle = Receiver(), Handle("a")
        handle.free.clear()
        call = asyncio.create_task(driver_of(handle, receiver).generate(REQUEST, HERE))
        await handle.replica_reported.wait()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert receiver.sent == ["a begins", "a ends"]

    play(story)


def test_no_early_submit_from_another_event_loop_or_after_the_call() -> None:
    async def story() -> None:
        receiver = Receiver()
        reported: list[Callable[[str], None]] = []

        class Elsewhere(Handle):
            async def _serve(self) -> Completion:
                async def selected() -> None:
                    replica_selected("a")

                loop = asyncio.new_event_loop()
                await asyncio.to_thread(loop.run_until_complete, selected())
                loop.close()
                return COMPLETION

        class Late(Handle):
            async def _serve(self) -> Completion:
                selected = _listener.get()
                assert selected is not None
                reported.append(selected)
                return COMPLETION

        assert await driver_of(Elsewhere(), receiver).generate(REQUEST, HERE) is COMPLETION
        assert await driver_of(Late(), receiver).generate(REQUEST, HERE) is COMPLETION
        reported[0]("a")
        assert receiver.sent == []

    play(story)


def test_selections_outside_of_a_call_are_not_reported() -> None:
    reported: list[str] = []
    replica_selected("unrequested")
    with replica_listener(reported.append):
        replica_selected("a")
        with replica_listener(lambda replica: None):
            replica_selected("b")
        other = threading.Thread(target=replica_selected, args=("c",))
        other.start()
        other.join()
    replica_selected("d")
    assert reported == ["a"]
