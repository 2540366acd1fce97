"""What is measured: kills, stops, starts, scaling, cold adapters."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import aiohttp
import httpx

from benchmarks.recovery.load import Load, Question, back_after, rounded, summary
from benchmarks.recovery.server import RecoveryServer, until
from benchmarks.serving import percentile

BEFORE_S, AFTER_S = 5.0, 5.0
BACK_S = 300.0
BESIDE, BESIDE_TOKENS, BESIDE_ADAPTERS, QUIET_S = 60, 2000, 8, 2.0
"""Streams beside a cold adapter, their most tokens, how many adapters come, seconds before them."""
PROMPT_TOKENS, FIRST_TOKENS = 64, 4
BLOWS = {
    "rank": ("rank", signal.SIGKILL),
    "driver": ("driver", signal.SIGKILL),
    "ingress": ("ingress", signal.SIGKILL),
    "front": ("front", signal.SIGKILL),
    "controller": ("controller", signal.SIGKILL),
    "manager": ("manager", signal.SIGKILL),
    "hang": ("rank", signal.SIGSTOP),
}
"""What is struck, and by which signal."""

Row = dict[str, Any]


async def struck(
    server: RecoveryServer, questions: Sequence[Question], rate: float, blow: Callable[[], None]
) -> Row:
    """Load, a blow, and load until requests sent after it are answered again."""
    load, ended = Load(server.url, questions, rate, tries=600), asyncio.Event()
    running = asyncio.create_task(load.run(ended))
    await asyncio.sleep(BEFORE_S)
    blow()
    at = time.monotonic()
    with suppress(TimeoutError):
        async with asyncio.timeout(BACK_S):
            await load.answered_after(at)
    await asyncio.sleep(AFTER_S)
    ended.set()
    await running
    return {"rate": rate, "back_s": back_after(load.stories, at), **summary(load.stories)}


def kill(
    server: RecoveryServer, questions: Sequence[Question], rate: float, blows: Sequence[str]
) -> Iterator[Row]:
    """One process after the other is struck; blows: keys of BLOWS."""
    for kind, sign in (BLOWS[blow] for blow in blows):
        victim = random.Random(5).choice(server.victims(kind))
        row = asyncio.run(struck(server, questions, rate, lambda: victim.send_signal(sign)))  # noqa: B023
        yield {"case": "kill", "what": kind, "signal": sign.name, **row}
        until(lambda: is_healthy(server))


def scale(server: RecoveryServer) -> Iterator[Row]:
    """From a changed config to a second replica."""
    began = time.monotonic()
    server.scale(2)
    until(lambda: replicas(server) == 2)
    yield {"case": "scale", "what": "1 to 2", "seconds": rounded(time.monotonic() - began)}
    server.scale(1)
    until(lambda: is_healthy(server))


def zero(server: RecoveryServer, questions: Sequence[Question]) -> Iterator[Row]:
    """From no replica to the first answer."""
    server.scale(1, least=0)
    until(lambda: not server.processes("driver"))
    began = time.monotonic()
    right = answer(server, questions[0]) == questions[0].answer
    seconds = rounded(time.monotonic() - began)
    yield {"case": "zero", "seconds": seconds, "wrong": int(not right)}
    server.scale(1)
    until(lambda: is_healthy(server))


def cold(server: RecoveryServer, questions: Sequence[Question], rounds: int = 5) -> Iterator[Row]:
    """First tokens of all adapters at once, dropped from memory before; files are in the cache.

    Then one after the other beside BESIDE streams of the base model.
    """
    few = (replace(question, tokens=FIRST_TOKENS) for question in questions)
    own = {q.adapter: q for q in few if q.adapter is not None}
    if not own:
        return
    rows = [asyncio.run(first_tokens(server.url, list(own.values())))]
    for _ in range(rounds):
        drop(server, own)
        rows.append(asyncio.run(first_tokens(server.url, list(own.values()))))
    firsts = [seconds for row in rows[1:] for seconds in row]
    yield {
        "case": "cold",
        "adapters": len(own),
        "rounds": rounds,
        "never_seen_p50_ms": percentile(rows[0], 0.5),
        "never_seen_p99_ms": percentile(rows[0], 0.99),
        "first_token_p50_ms": percentile(firsts, 0.5),
        "first_token_p99_ms": percentile(firsts, 0.99),
    }
    drop(server, own)
    info = httpx.get(f"{server.url}/info", timeout=60).raise_for_status().json()
    row = asyncio.run(beside(server.url, list(own.values()), info["max_total_tokens"]))
    yield {"case": "cold", "beside": BESIDE, **row}


def drop(server: RecoveryServer, names: Iterable[str]) -> None:
    """Have the server forget adapters' copies in host and device memory."""
    for name in names:
        httpx.delete(f"{server.url}/v1/adapters/{name}", timeout=60).raise_for_status()


async def beside(url: str, questions: Sequence[Question], longest: int) -> Row:
    """First tokens of single adapters beside long streams, and those streams' gaps meanwhile.

    longest: tokens of a sequence.
    """
    gaps: dict[bool, list[float]] = {False: [], True: []}
    loading, firsts = asyncio.Event(), []

    async def stream(session: aiohttp.ClientSession) -> None:
        last = None
        wanted = {
            "max_new_tokens": min(BESIDE_TOKENS, longest - PROMPT_TOKENS),
            "ignore_eos_token": True,
        }
        body = {"inputs": questions[0].prompt, "parameters": wanted}
        async with session.post(f"{url}/generate_stream", json=body) as reply:
            reply.raise_for_status()
            async for line in reply.content:
                if line.startswith(b"data:"):
                    now = time.monotonic()
                    if last is not None:
                        gaps[loading.is_set()].append(now - last)
                    last = now

    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as session:
        streams = [asyncio.create_task(stream(session)) for _ in range(BESIDE)]
        await asyncio.sleep(QUIET_S)
        for question in questions[:BESIDE_ADAPTERS]:
            loading.set()
            firsts += await first_tokens(url, [question])
            loading.clear()
            await asyncio.sleep(QUIET_S / 4)
        alive = sum(not each.done() for each in streams)
        for each in streams:
            each.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
    return {
        "streams_alive": alive,
        "first_token_p50_ms": percentile(firsts, 0.5),
        "first_token_max_ms": percentile(firsts, 1.0),
        "gap_p99_ms": percentile(gaps[False], 0.99),
        "gap_p99_meanwhile_ms": percentile(gaps[True], 0.99),
        "gap_max_meanwhile_ms": percentile(gaps[True], 1.0),
    }


async def first_tokens(url: str, questions: Sequence[Question]) -> list[float]:
    """Seconds to the first event of one stream for each question, all at once."""

    async def one(session: aiohttp.ClientSession, question: Question) -> float:
        began, first = time.monotonic(), None
        async with session.post(f"{url}/generate_stream", json=question.body) as reply:
            async for line in reply.content:
                if first is None and line.startswith(b"data:"):
                    first = time.monotonic() - began
        assert first is not None, "a stream without an event"
        return first

    async with aiohttp.ClientSession() as session:
        return await asyncio.gather(*(one(session, question) for question in questions))


def answer(server: RecoveryServer, question: Question) -> str:
    """The whole answer to a question."""
    reply = httpx.post(f"{server.url}/generate", json=question.body, timeout=600)
    text: str = reply.raise_for_status().json()["generated_text"]
    return text


def is_healthy(server: RecoveryServer) -> bool:
    """Whether /health is 200."""
    try:
        return httpx.get(f"{server.url}/health", timeout=30).status_code == 200
    except httpx.HTTPError:
        return False


def replicas(server: RecoveryServer) -> int:
    """How many driver replicas report their adapters."""
    rows = httpx.get(f"{server.url}/v1/adapters", timeout=60).raise_for_status().json()["data"]
    return len({name for row in rows for name in row["replicas"]})
