"""Work runs once for all its callers; its end callback runs when all of them have resumed."""

import asyncio
import threading
from functools import partial

import pytest

from deployments.driver.adapters.single_flight import (
    BlockingCalls,
    Late,
    SingleFlight,
    call_after_callers,
)
from tests.deployments.driver.routing.stories import PATIENCE_S


def test_all_callers_share_a_run_and_resume_before_its_end_callback() -> None:
    replies: list[str] = []

    async def story() -> None:
        flights, may_end = SingleFlight(), asyncio.Event()

        async def work() -> int:
            replies.append("run")
            await may_end.wait()
            call_after_callers(lambda: replies.append("end"))
            return 7

        async def ask() -> None:
            replies.append(f"got {await flights.once('what', work)}")

        requests = [asyncio.create_task(ask()) for _ in range(3)]
        await asyncio.sleep(0)
        requests[0].cancel()
        may_end.set()
        with pytest.raises(asyncio.CancelledError):
            await requests[0]
        await asyncio.gather(*requests[1:])
        await asyncio.sleep(0)
        assert replies == ["run", "got 7", "got 7", "end"]
        replies.clear()
        await ask()
        assert replies[:2] == ["run", "got 7"], "what has ended is run again"

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_a_caller_out_of_patience_leaves_and_the_work_continues() -> None:
    async def story() -> None:
        flights, may_end = SingleFlight(), asyncio.Event()
        runs = 0

        async def work() -> int:
            nonlocal runs
            runs += 1
            await may_end.wait()
            return 7

        with pytest.raises(Late):
            await flights.once("what", work, 0.0)
        patient = asyncio.create_task(flights.once("what", work))
        with pytest.raises(Late):
            await flights.once("what", work, 1e-6)
        may_end.set()
        assert await patient == 7
        assert runs == 1
        assert await flights.once("what", work, PATIENCE_S) == 7

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_work_that_is_late_already_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """However many ask, they wait for `patience_s` in all."""

    async def story() -> None:
        flights, may_end, loop = SingleFlight(), asyncio.Event(), asyncio.get_running_loop()
        first = asyncio.create_task(flights.once("what", may_end.wait))
        await asyncio.sleep(0)
        time = loop.time
        monkeypatch.setattr(loop, "time", lambda: time() + PATIENCE_S / 2)
        with pytest.raises(Late):
            await flights.once("what", may_end.wait, PATIENCE_S / 3)
        may_end.set()
        assert await first

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_calls_that_hang_let_others_start() -> None:
    async def story() -> None:
        may_end = threading.Event()
        calls = BlockingCalls("test", width=2, patience_s=0.01, most=8)
        hanging = [asyncio.create_task(calls.run(may_end.wait)) for _ in range(7)]
        assert await calls.run(lambda: 5) == 5
        assert not any(task.done() for task in hanging)
        may_end.set()
        assert await asyncio.gather(*hanging) == [True] * 7
        calls.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def test_no_more_calls_than_the_width_run_at_once() -> None:
    async def story() -> None:
        calls = BlockingCalls("test", width=2)
        running: list[int] = []
        most: list[int] = []

        def call() -> None:
            running.append(1)
            most.append(len(running))
            running.pop()

        await asyncio.gather(*(calls.run(call) for _ in range(30)))
        assert max(most) <= 2
        with pytest.raises(OSError, match="why"):
            await calls.run(partial(_raise, OSError("why")))
        calls.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))


def _raise(error: Exception) -> None:
    raise error
