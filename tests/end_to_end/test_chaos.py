"""300 requests and more while ranks, drivers and ingresses are killed and clients leave."""

import asyncio
import random
from collections.abc import Iterator
from contextlib import suppress

import httpx
import psutil
import pytest

from deployments.rank.messages import LoadReport
from scheduler.snapshot import Snapshot
from tests.end_to_end.clients import (
    MODELS,
    Answers,
    StreamError,
    ask_driver,
    ray_metrics_url,
    stream_text,
    wait_for,
)
from tests.end_to_end.processes import drivers, processes, ranks
from tests.end_to_end.serving import PATIENCE_SECONDS, Served

NUM_REQUESTS = 300
NUM_CLIENTS = 24
LEAVES = 0.15
PAUSES_SECONDS = (2.0, 4.0)

pytestmark = pytest.mark.ray


class Chaos:
    """Every request ends with the right answer, after retries, or its client leaves."""

    def __init__(self, served: Served, answers: Answers) -> None:
        self.served, self.answers = served, answers
        self.num_requests = self.num_right = self.num_left = 0
        self.wrong: list[str] = []
        self.strikes = {"rank": 0, "driver": 0, "ingress": 0}

    async def run(self) -> None:
        """All requests, with the killer beside them; they do not end before its last strike."""
        killer = asyncio.create_task(self.kill())
        waiting = self.requests(killer)
        async with httpx.AsyncClient(timeout=120) as client:

            async def ask_on() -> None:
                for number, model, question in waiting:
                    chance = random.Random(number)
                    leaves = 0.5 * chance.random() if chance.random() < LEAVES else None
                    while not await self.is_over(client, model, question, leaves):
                        leaves = None
                        await asyncio.sleep(0.2)  # a retry waits a moment

            await asyncio.gather(*(ask_on() for _ in range(NUM_CLIENTS)))
        await killer

    def requests(self, killer: asyncio.Task[None]) -> Iterator[tuple[int, str, str]]:
        questions = sorted(self.answers["base"])
        while self.num_requests < NUM_REQUESTS or not killer.done():
            i = self.num_requests
            self.num_requests += 1
            yield i, MODELS[i % 5], questions[i % len(questions)]

    async def is_over(
        self, client: httpx.AsyncClient, model: str, question: str, leaves: float | None
    ) -> bool:
        """Ask once, and leave after so many seconds if any; False after an error."""
        task = asyncio.create_task(stream_text(client, self.served.url, model, question))
        if leaves is not None:
            await asyncio.wait([task], timeout=leaves)
            task.cancel()
        try:
            reply = await task
        except asyncio.CancelledError:
            if leaves is None:
                raise
            self.num_left += 1
            return True
        except StreamError:
            return False
        right = reply == self.answers[model][question]["raw"]
        self.num_right += right
        if not right:
            self.wrong.append(f"{model} {question}: {reply}")
        return True

    async def kill(self) -> None:
        """Strike ranks mostly, now and then a driver or an ingress."""
        chance = random.Random(7)
        for target in ("rank", "rank", "driver", "rank", "ingress", "rank"):
            await asyncio.sleep(chance.uniform(*PAUSES_SECONDS))
            self.strike(target, chance)

    def strike(self, target: str, chance: random.Random) -> None:
        victims = {
            "rank": ranks(self.served),
            "driver": drivers(self.served),
            "ingress": processes(self.served, "ServeReplica:loray:Ingress"),
        }[target]
        if victims:
            with suppress(psutil.NoSuchProcess):
                chance.choice(victims).kill()
                self.strikes[target] += 1


@pytest.mark.sweep
def test_chaos(served: Served, answers: Answers) -> None:
    async def play() -> Chaos:
        chaos = Chaos(served, answers)
        await asyncio.wait_for(chaos.run(), PATIENCE_SECONDS)
        return chaos

    chaos = asyncio.run(play())
    assert chaos.wrong == []
    assert chaos.num_right + chaos.num_left == chaos.num_requests >= NUM_REQUESTS
    assert sum(chaos.strikes.values()) >= 3, chaos.strikes
    assert chaos.num_right > NUM_REQUESTS / 3, chaos.num_right

    def result() -> object:
        reply = httpx.post(f"{served.url}/generate", json={"inputs": "Hello"}, timeout=120)
        return reply.raise_for_status().json()

    wait_for(lambda: result() == {"generated_text": answers["base"]["Hello"]["raw"]})
    wait_for(lambda: len(drivers(served)) == 1)
    wait_for(lambda: are_all_of_one_group(served))
    wait_for(lambda: is_at_rest(ask_driver(served, "snapshot")))


def are_all_of_one_group(served: Served) -> bool:
    """Whether the driver's ranks are there, and beside them at most a standby process for each."""
    reports: list[LoadReport] = ask_driver(served, "ranks")
    pids = {process.pid for process in ranks(served)}
    return {report.pid for report in reports} <= pids and len(pids) <= 2 * len(reports)


def is_at_rest(left: Snapshot) -> bool:
    """No request waits or runs, and all blocks are free."""
    idle = (left.queued, left.running, left.draining, left.plans_in_flight) == (0, 0, 0, 0)
    return idle and left.free_blocks == left.num_blocks


def test_metrics_are_in_rays_endpoint(served: Served) -> None:
    names = (
        "loray_running_requests",
        "loray_generated_tokens",
        "loray_step_seconds_bucket",
        "loray_adapter_requests",
        "loray_adapter_first_token_seconds_bucket",
        "loray_adapter_load_seconds_bucket",
        "loray_adapter_device_pages",
    )
    body = {"inputs": "Hello", "parameters": {"adapter_id": "pirate"}}
    reply = httpx.post(f"{served.url}/generate", json=body, timeout=PATIENCE_SECONDS)
    assert reply.status_code == 200
    url = ray_metrics_url(served)

    def missing() -> list[str]:
        result = httpx.get(url, timeout=30).text
        return [name for name in names if f"ray_{name}" not in result]

    wait_for(lambda: not missing())  # Ray's agents collect every few seconds
