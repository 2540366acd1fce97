"""300 requests while ranks, drivers and ingresses are killed and clients leave."""

import asyncio
import os
import random
import signal
import threading

import httpx
import pytest

from scheduler.snapshot import Snapshot
from tests.end_to_end.clients import (
    MODELS,
    Answers,
    StreamError,
    ask_driver,
    ray_metrics,
    stream_text,
)
from tests.end_to_end.conftest import Served
from tests.end_to_end.processes import drivers, processes

NUM_REQUESTS = 300
NUM_CLIENTS = 24
LEAVES = 0.15
PAUSES_SECONDS = (2.0, 4.0)

pytestmark = pytest.mark.ray


class Chaos:
    """A story by a fixed seed; every request ends once, rightly or with a clear error."""

    def __init__(self, served: Served, answers: Answers) -> None:
        self.served, self.answers = served, answers
        self.random = random.Random(7)
        self.num_right = self.num_left = 0
        self.errors: list[str] = []
        self.wrong: list[str] = []
        self.strikes = {"rank": 0, "driver": 0, "ingress": 0}
        self.ended = asyncio.Event()

    async def run(self) -> None:
        """All requests, with the killer beside them."""
        questions = sorted(self.answers["base"])
        waiting = iter(
            [(MODELS[i % 5], questions[i % len(questions)]) for i in range(NUM_REQUESTS)]
        )
        async with httpx.AsyncClient(timeout=120) as client:

            async def ask_on() -> None:
                for model, question in waiting:
                    await self.ask(client, model, question)

            killer = asyncio.create_task(self.kill())
            await asyncio.gather(*(ask_on() for _ in range(NUM_CLIENTS)))
            self.ended.set()
            await killer

    async def ask(self, client: httpx.AsyncClient, model: str, question: str) -> None:
        stream = stream_text(client, self.served.url, model, question)
        task = asyncio.create_task(stream)
        if self.random.random() < LEAVES:
            await asyncio.wait([task], timeout=self.random.random() * 0.5)
        leaves = not task.done() and self.random.random() < LEAVES
        if leaves:
            task.cancel()
        try:
            told = await task
        except asyncio.CancelledError:
            self.num_left += 1
        except StreamError as error:
            self.errors.append(str(error))
            await asyncio.sleep(0.2)  # a client that tries again does not try at once
        else:
            right = told == self.answers[model][question]["raw"]
            self.num_right += right
            if not right:
                self.wrong.append(f"{model} {question}: {told}")

    async def kill(self) -> None:
        """Strike ranks mostly, now and then a driver or an ingress."""
        targets = ["rank", "rank", "driver", "rank", "ingress", "rank"]
        for target in targets:
            pause = self.random.uniform(*PAUSES_SECONDS)
            try:
                await asyncio.wait_for(self.ended.wait(), pause)
            except TimeoutError:
                self.strike(target)
            else:
                return

    def strike(self, target: str) -> None:
        victims = {
            "rank": processes(self.served, "RankActor"),
            "driver": drivers(self.served),
            "ingress": processes(self.served, "ServeReplica:loray:Ingress"),
        }[target]
        if victims:
            os.kill(self.random.choice(victims).pid, signal.SIGKILL)
            self.strikes[target] += 1


def test_chaos(served: Served, answers: Answers) -> None:
    async def play() -> Chaos:
        chaos = Chaos(served, answers)
        await asyncio.wait_for(chaos.run(), 400)
        return chaos

    chaos = asyncio.run(play())
    assert chaos.wrong == []
    assert chaos.num_right + chaos.num_left + len(chaos.errors) == NUM_REQUESTS
    assert sum(chaos.strikes.values()) >= 3, chaos.strikes
    assert chaos.num_right > NUM_REQUESTS / 3, (chaos.num_right, chaos.errors[:5])

    async def settle() -> str:
        async with httpx.AsyncClient(timeout=60) as client:
            while True:
                try:
                    return await stream_text(client, served.url, "base", "Hello")
                except StreamError:
                    await asyncio.sleep(0.5)

    assert asyncio.run(asyncio.wait_for(settle(), 120)) == answers["base"]["Hello"]["raw"]
    assert len(drivers(served)) == 1
    assert len(ask_driver(served, "ranks")) == len(processes(served, "RankActor"))
    left: Snapshot = ask_driver(served, "snapshot")
    assert (left.queued, left.running, left.draining, left.plans_in_flight) == (0, 0, 0, 0)
    assert left.free_blocks == left.num_blocks, "blocks were left behind"


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
    asked = {"inputs": "Hello", "parameters": {"adapter_id": "pirate"}}
    assert httpx.post(f"{served.url}/generate", json=asked, timeout=60).status_code == 200
    pause = threading.Event()
    for _ in range(30):  # Ray's agents collect every few seconds
        told = ray_metrics(served)
        missing = [name for name in names if f"ray_{name}" not in told]
        if not missing:
            return
        pause.wait(2.0)
    pytest.fail(f"{missing} are not among the metrics")
