"""The queue of a rendering process: fair, bounded, and safe when clients leave."""

import asyncio

import pytest

from deployments.ingress.chat_templates.render_lanes import RenderLane
from deployments.ingress.processes.fair_queue import FairQueue, QueueFull

A, B = b"a", b"b"


async def _settle() -> None:
    """Let all tasks go as far as they can."""
    for _ in range(10):
        await asyncio.sleep(0)


def test_keys_are_served_round_robin() -> None:
    order: list[str] = []

    async def one(queue: FairQueue, key: bytes, name: str) -> None:
        await queue.acquire(key)
        order.append(name)

    async def story() -> None:
        queue = FairQueue(max_each=9, max_all=9)
        names = [(A, "a0"), (A, "a1"), (A, "a2"), (B, "b0"), (A, "a3"), (B, "b1")]
        tasks = [asyncio.ensure_future(one(queue, key, name)) for key, name in names]
        for _ in tasks:
            await _settle()
            queue.release()
        await asyncio.gather(*tasks)
        await queue.acquire(A)  # Free again.

    asyncio.run(story())
    assert order == ["a0", "a1", "b0", "a2", "b1", "a3"]


def test_waiting_tasks_are_bounded_by_key_and_in_total() -> None:
    async def story() -> None:
        queue = FairQueue(max_each=2, max_all=3)
        await queue.acquire(A)
        waiting = [asyncio.ensure_future(queue.acquire(key)) for key in (A, A, B)]
        await _settle()
        for key in (A, B):
            with pytest.raises(QueueFull):
                await queue.acquire(key)
        waiting[0].cancel()
        await _settle()
        waiting.append(asyncio.ensure_future(queue.acquire(A)))
        await _settle()
        for _ in range(4):
            queue.release()
        await asyncio.gather(*waiting[1:])

    asyncio.run(story())


def test_a_cancelled_task_lets_the_next_one_run() -> None:
    async def story() -> None:
        queue = FairQueue(max_each=9, max_all=9)
        await queue.acquire(A)
        first, second = (asyncio.ensure_future(queue.acquire(A)) for _ in range(2))
        await _settle()
        queue.release()
        first.cancel()
        await second
        assert first.cancelled()

    asyncio.run(story())


@pytest.mark.parametrize(
    ("command", "fault"),
    [(("/nowhere/python",), FileNotFoundError), (("true",), ConnectionError)],
)
def test_a_process_that_cannot_start_is_reported_and_started_again(
    command: tuple[str, ...], fault: type[OSError]
) -> None:
    """One that is not there, and one that ends at once."""

    async def story() -> None:
        lane = RenderLane(1.0, max_each=1, max_all=1, command=command)
        for _ in range(2):
            with pytest.raises(fault):
                await lane.render(A, b"", lambda: True, lambda late: None)
        await lane.close()

    asyncio.run(story())
