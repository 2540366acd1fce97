"""Processes are killed under load: what can go on goes on, what cannot ends with a clear error."""

import asyncio
import signal
from collections.abc import Callable, Sequence
from contextlib import suppress
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
    is_healthy,
    longest_questions,
    stream_text,
    until_open,
    wait_for,
)
from tests.end_to_end.processes import drivers, processes, stopped_processes
from tests.end_to_end.processes import ranks as rank_processes
from tests.end_to_end.serving import PATIENCE_SECONDS, Served

NUM_STREAMS = 10
TOKENS_BEFORE = 3
HELD_MODEL = "pirate"

pytestmark = pytest.mark.ray


def present_ranks(served: Served) -> list[psutil.Process]:
    """The driver's ranks, in their order."""
    reports: list[LoadReport] = ask_driver(served, "ranks")
    return [psutil.Process(report.pid) for report in reports]


def ranks_and_standby(served: Served) -> tuple[list[psutil.Process], set[psutil.Process]]:
    """The driver's ranks, and the processes that stand by, once all of those are there."""
    ranks = present_ranks(served)
    wait_for(lambda: len(rank_processes(served)) == 2 * len(ranks))
    return ranks, set(rank_processes(served)) - set(ranks)


def are_gone(those: Sequence[psutil.Process]) -> bool:
    """Whether all have ended, once the kernel had the time for it."""
    _, alive = psutil.wait_procs(those, timeout=PATIENCE_SECONDS)
    return not alive


def struck(
    served: Served,
    answers: Answers,
    strike: Callable[[], None],
    held: Sequence[psutil.Process] = (),
) -> tuple[list[str | StreamError], list[str], set[int]]:
    """Open streams, call `strike` once each has some tokens; (replies, expected, health statuses).

    With the blow comes one stream more. held: ranks that stand still until the blow has fallen,
    so that a stream is open then for sure; without them the last one comes just after it.
    """
    questions = longest_questions(answers, 2)
    requests = [(MODELS[i % 5], questions[i % 2]) for i in range(NUM_STREAMS)]
    requests.append((HELD_MODEL, questions[0]))
    counts = [0] * len(requests)
    speaking = asyncio.Event()

    def heard(i: int) -> None:
        counts[i] += 1
        if min(counts[:NUM_STREAMS]) >= TOKENS_BEFORE:
            speaking.set()

    async def play() -> tuple[list[str | StreamError], set[int]]:
        statuses: set[int] = set()
        async with httpx.AsyncClient(timeout=PATIENCE_SECONDS) as client:
            stories = [
                stream_text(client, served.url, model, question, partial(heard, i))
                for i, (model, question) in enumerate(requests)
            ]
            streams = [asyncio.create_task(story) for story in stories[:NUM_STREAMS]]
            await asyncio.wait_for(speaking.wait(), PATIENCE_SECONDS)
            with stopped_processes(held):
                streams.append(asyncio.create_task(stories[NUM_STREAMS]))
                if held:
                    await until_open(client, served.url, HELD_MODEL)
                strike()
            everything = asyncio.gather(*streams, return_exceptions=True)
            while not everything.done():
                with suppress(httpx.HTTPError):
                    statuses.add((await client.get(f"{served.url}/health")).status_code)
                await asyncio.sleep(0.1)
            replies = []
            for result in everything.result():
                assert isinstance(result, str | StreamError), repr(result)
                replies.append(result)
            return replies, statuses

    replies, statuses = asyncio.run(play())
    return replies, [answers[model][q]["raw"] for model, q in requests], statuses


@pytest.mark.parametrize(("rank", "blow"), [(0, signal.SIGKILL), (1, signal.SIGSTOP)])
def test_a_rank_dies_or_hangs_and_every_stream_goes_on(
    served: Served, answers: Answers, rank: int, blow: signal.Signals
) -> None:
    ranks, standby = ranks_and_standby(served)
    victim = ranks[rank % len(ranks)]
    [driver] = drivers(served)
    reply, expected, statuses = struck(served, answers, lambda: victim.send_signal(blow))
    assert reply == expected
    assert statuses <= {200, 503}
    assert set(present_ranks(served)) == standby, "the standby processes did not take over"
    assert are_gone(ranks), "old ranks were left behind"
    assert drivers(served) == [driver]
    wait_for(lambda: is_healthy(served))


def test_a_driver_dies_and_every_stream_goes_on(served: Served, answers: Answers) -> None:
    """With another driver, after the tokens that the clients have."""
    ranks, standby = ranks_and_standby(served)
    [driver] = drivers(served)
    reply, expected, _ = struck(served, answers, driver.kill, held=ranks)
    assert reply == expected
    assert drivers(served) != [driver], "the driver was not killed"
    assert set(present_ranks(served)) == standby, "the standby processes did not take over"
    assert are_gone(ranks), "ranks outlived their driver"
    wait_for(lambda: is_healthy(served))
    reply, expected, _ = struck(served, answers, lambda: None)
    assert reply == expected


def test_an_ingress_dies_and_comes_back(served: Served, answers: Answers) -> None:
    ranks = present_ranks(served)
    [ingress] = processes(served, "ServeReplica:loray:Ingress")
    reply, expected, _ = struck(served, answers, lambda: None)
    assert reply == expected
    ingress.kill()
    wait_for(lambda: is_healthy(served))
    reply, expected, _ = struck(served, answers, lambda: None)
    assert reply == expected
    assert present_ranks(served) == ranks, "the ranks were touched"


def test_a_server_sleeps_and_its_streams_go_on_when_it_wakes(
    served: Served, answers: Answers
) -> None:
    ranks = present_ranks(served)
    [question] = longest_questions(answers, 1)

    async def play() -> str | StreamError:
        async with httpx.AsyncClient(base_url=served.url, timeout=PATIENCE_SECONDS) as client:
            begun = asyncio.Event()
            story = stream_text(client, served.url, HELD_MODEL, question, begun.set)
            stream = asyncio.create_task(story)
            await asyncio.wait_for(begun.wait(), PATIENCE_SECONDS)
            assert (await client.post("/sleep?level=2&mode=keep")).status_code == 200
            present = rank_processes(served)
            asleep = await client.get("/is_sleeping")
            refused = await client.post("/generate", json={"inputs": question})
            # Awake again, whatever is asserted: other tests use this server.
            assert (await client.post("/wake_up")).status_code == 200
            assert are_gone(ranks), "the device's memory is in use"
            assert present == [], "standby processes hold device memory"
            assert asleep.json() == {"is_sleeping": True}
            assert (refused.status_code, "retry-after" in refused.headers) == (503, True)
            assert (await client.get("/is_sleeping")).json() == {"is_sleeping": False}
            return await stream

    assert asyncio.run(play()) == answers[HELD_MODEL][question]["raw"]
    assert not set(present_ranks(served)) & set(ranks)
