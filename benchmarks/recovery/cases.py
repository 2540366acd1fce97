"""What is measured: kills, stops, starts, scaling, cold adapters."""

import asyncio
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import aiohttp
import httpx

from benchmarks.recovery.beside import beside
from benchmarks.recovery.load import Load, Question, back_after, rounded, summary
from benchmarks.recovery.server import RecoveryServer, until
from benchmarks.serving import percentile

BEFORE_S, AFTER_S = 5.0, 3.0
BACK_S = 300.0
FIRST_TOKENS = 4
BLOWS = {
    "rank": ("rank", signal.SIGKILL),
    "driver": ("driver", signal.SIGKILL),
    "ingress": ("ingress", signal.SIGKILL),
    "front": ("front", signal.SIGKILL),
    "controller": ("controller", signal.SIGKILL),
    "manager": ("manager", signal.SIGKILL),
    "hang": ("rank", signal.SIGSTOP),
    "driver-hang": ("driver", signal.SIGSTOP),
}
"""What is struck, and by which signal."""
SLOW_BLOWS = {"driver-hang"}
"""Serve notices them after a minute or two."""

Row = dict[str, Any]


async def struck(
    server: RecoveryServer,
    questions: Sequence[Question],
    rate: float,
    before_s: float,
    blow: Callable[[], None],
) -> Row:
    """Load, a blow, and load until requests sent after it are answered again."""
    load, ended = Load(server.url, questions, rate, tries=600), asyncio.Event()
    running = asyncio.create_task(load.run(ended))
    await asyncio.sleep(before_s)
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
    server: RecoveryServer, questions: Sequence[Question], rate: float, before_s: float, name: str
) -> Row:
    """One process is struck; name: of BLOWS; before_s: of load alone."""
    until(lambda: is_healthy(server))
    kind, sign = BLOWS[name]
    victim = random.Random(5).choice(server.victims(kind))
    strike = partial(victim.send_signal, sign)
    row = asyncio.run(struck(server, questions, rate, before_s, strike))
    return {"case": "kill", "what": kind, "signal": sign.name, **row}


def scale(server: RecoveryServer) -> Iterator[Row]:
    """From a changed config to a second replica; `command_s`: what the command itself takes."""
    until(lambda: is_healthy(server))
    began = time.monotonic()
    server.scale(2)
    command_s = rounded(time.monotonic() - began)
    until(lambda: replicas(server) == 2)
    seconds = rounded(time.monotonic() - began)
    yield {"case": "scale", "what": "1 to 2", "seconds": seconds, "command_s": command_s}


def zero(server: RecoveryServer, questions: Sequence[Question]) -> Iterator[Row]:
    """From no replica to the first answer."""
    server.scale(1, least=0)
    until(lambda: not server.processes("driver"))
    began = time.monotonic()
    right = answer(server, questions[0]) == questions[0].answer
    seconds = rounded(time.monotonic() - began)
    yield {"case": "zero", "seconds": seconds, "wrong": int(not right)}


def cold(server: RecoveryServer, questions: Sequence[Question], rounds: int = 5) -> Iterator[Row]:
    """First tokens of all adapters at once, dropped from memory before; files are in the cache.

    Then one after the other beside streams of the base model.
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
    firsts_of = [partial(first_token, server.url, question) for question in own.values()]
    row = asyncio.run(beside(server.url, questions[0].prompt, info["max_total_tokens"], firsts_of))
    yield {"case": "cold beside", **row}


async def first_token(url: str, question: Question) -> float:
    """Seconds to the first event of a stream."""
    [seconds] = await first_tokens(url, [question])
    return seconds


def drop(server: RecoveryServer, names: Iterable[str]) -> None:
    """Have the server forget adapters' copies in host and device memory."""
    for name in names:
        httpx.delete(f"{server.url}/v1/adapters/{name}", timeout=60).raise_for_status()


async def first_tokens(url: str, questions: Sequence[Question]) -> list[float]:
    """Seconds to the first event of one stream for each question, all at once."""

    async def one(session: aiohttp.ClientSession, question: Question) -> float:
        began, first = time.monotonic(), None
        async with session.post(f"{url}/generate_stream", json=question.body) as reply:
            if reply.status != 200:
                raise RuntimeError(f"{question.adapter}: {reply.status} {await reply.text()}")
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
