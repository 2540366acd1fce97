"""Processes are killed under load: what can go on goes on, what cannot ends with a clear error."""

import asyncio
import os
import signal
from collections.abc import Callable
from functools import partial

import httpx
import psutil
import pytest

from deployments.rank.messages import LoadReport
from tests.end_to_end.clients import (
    MODELS,
    Answers,
    StreamError,
    ask_driver,
    longest_questions,
    stream_text,
)
from tests.end_to_end.conftest import Served
from tests.end_to_end.processes import drivers, processes

NUM_STREAMS = 10
TOKENS_BEFORE = 3

pytestmark = pytest.mark.ray


def rank_pids(served: Served) -> list[int]:
    reports: list[LoadReport] = ask_driver(served, "ranks")
    return [report.pid for report in reports]


def struck(
    served: Served, answers: Answers, strike: Callable[[], None]
) -> tuple[list[str | StreamError], list[str], set[int]]:
    """Open streams, strike once each has said some tokens; (told, expected, health statuses)."""
    questions = longest_questions(answers, 2)
    asked = [(MODELS[i % 5], questions[i % 2]) for i in range(NUM_STREAMS)]
    counts = [0] * NUM_STREAMS
    speaking = asyncio.Event()

    def heard(i: int) -> None:
        counts[i] += 1
        if min(counts) >= TOKENS_BEFORE:
            speaking.set()

    async def play() -> tuple[list[str | StreamError], set[int]]:
        statuses: set[int] = set()
        async with httpx.AsyncClient(timeout=120) as client:
            streams = [
                asyncio.create_task(stream_text(client, served.url, model, q, partial(heard, i)))
                for i, (model, q) in enumerate(asked)
            ]
            await asyncio.wait_for(speaking.wait(), 60)
            strike()
            everything = asyncio.gather(*streams, return_exceptions=True)
            while not everything.done():
                with_health = await client.get(f"{served.url}/health")
                statuses.add(with_health.status_code)
                await asyncio.sleep(0.1)
            told = []
            for result in everything.result():
                assert isinstance(result, str | StreamError), repr(result)
                told.append(result)
            return told, statuses

    told, statuses = asyncio.run(play())
    return told, [answers[model][q]["raw"] for model, q in asked], statuses


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_dies_or_hangs_and_every_stream_goes_on(
    served: Served, answers: Answers, rank: int, blow: signal.Signals
) -> None:
    pids = rank_pids(served)
    victim = pids[rank % len(pids)]
    [driver] = drivers(served)
    told, expected, statuses = struck(served, answers, lambda: os.kill(victim, blow))
    assert told == expected
    assert 503 in statuses, "/health did not say that the ranks were being rebuilt"
    assert not set(rank_pids(served)) & set(pids), "the ranks were not replaced"
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "old ranks were left behind"
    assert drivers(served) == [driver]
    assert httpx.get(f"{served.url}/health").status_code == 200


def wait_until_healthy(served: Served) -> None:
    async def poll() -> None:
        async with httpx.AsyncClient() as client:
            while True:
                try:
                    if (await client.get(f"{served.url}/health")).status_code == 200:
                        return
                except httpx.HTTPError:
                    pass
                await asyncio.sleep(0.2)

    asyncio.run(asyncio.wait_for(poll(), 90))


def test_a_driver_dies_and_its_streams_end_with_an_error(served: Served, answers: Answers) -> None:
    pids = rank_pids(served)
    [driver] = drivers(served)
    told, expected, _ = struck(served, answers, driver.kill)
    for said, right in zip(told, expected, strict=True):
        assert said == right or isinstance(said, StreamError), said
    assert any(isinstance(said, StreamError) for said in told)
    psutil.wait_procs([psutil.Process(pid) for pid in pids if psutil.pid_exists(pid)], timeout=20)
    assert not [pid for pid in pids if psutil.pid_exists(pid)], "ranks outlived their driver"
    wait_until_healthy(served)
    told, expected, _ = struck(served, answers, lambda: None)
    assert told == expected


def test_an_ingress_dies_and_comes_back(served: Served, answers: Answers) -> None:
    pids = rank_pids(served)
    [ingress] = processes(served, "ServeReplica:loray:Ingress")
    told, expected, _ = struck(served, answers, lambda: None)
    assert told == expected
    ingress.kill()
    wait_until_healthy(served)
    told, expected, _ = struck(served, answers, lambda: None)
    assert told == expected
    assert rank_pids(served) == pids, "the ranks were touched"
