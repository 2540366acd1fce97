"""Cold adapters beside a full batch: their first tokens, and the other streams' gaps meanwhile.

The streams are read by processes of their own: one process alone would itself be late with
thousands of tokens a second. All times are of the machine's monotonic clock.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import suppress
from multiprocessing import get_context
from typing import Any, NamedTuple

import aiohttp

from benchmarks.serving import percentile

STREAMS, TOKENS, PROMPT_TOKENS = 60, 6000, 64
"""Streams beside a cold adapter, their most tokens, and what their prompts may take of those."""
CLIENTS = 4
BEGIN_S, QUIET_S, REST_S = 5.0, 2.0, 0.5
"""Seconds until all streams run, of streams alone, and between two adapters."""
ADAPTERS, LONGEST_S = 8, 15.0


class Gap(NamedTuple):
    """Seconds between two tokens of a stream; at: when the second one came."""

    at: float
    seconds: float


def read_streams(url: str, body: dict[str, Any], count: int, end: float) -> list[list[Gap]]:
    """Read so many streams until the time `end`; returns the gaps of those that ran until then."""
    return asyncio.run(_read_streams(url, body, count, end))


def begin() -> None:
    """Have a process import what `read_streams` needs; the other processes get this call too."""
    time.sleep(BEGIN_S / 10)


async def _read_streams(url: str, body: dict[str, Any], count: int, end: float) -> list[list[Gap]]:
    connector, limit = aiohttp.TCPConnector(limit=0), aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(connector=connector, timeout=limit) as session:
        found = await asyncio.gather(*(_gaps(session, url, body, end) for _ in range(count)))
    return [gaps for gaps in found if gaps]


async def _gaps(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], end: float
) -> list[Gap] | None:
    """One stream's gaps; None if it ended before."""
    gaps, last = [], None
    with suppress(TimeoutError):
        async with (
            asyncio.timeout(end - time.monotonic()),
            session.post(url, json=body) as reply,
        ):
            reply.raise_for_status()
            async for _ in reply.content.iter_any():
                now = time.monotonic()
                if last is not None:
                    gaps.append(Gap(now, now - last))
                last = now
        return None
    return gaps


async def beside(
    url: str, prompt: str, longest: int, firsts: Sequence[Callable[[], Awaitable[float]]]
) -> dict[str, Any]:
    """Run STREAMS of the base model, and some firsts one after the other.

    longest: tokens of a sequence. firsts: each returns a cold adapter's first token's seconds.
    RuntimeError if all streams ended meanwhile.
    """
    tokens = min(TOKENS, longest - PROMPT_TOKENS)
    body = {
        "inputs": prompt,
        "parameters": {"max_new_tokens": tokens, "ignore_eos_token": True},
    }
    loop = asyncio.get_running_loop()
    with ProcessPoolExecutor(CLIENTS, get_context("spawn")) as pool:
        await asyncio.gather(*(loop.run_in_executor(pool, begin) for _ in range(CLIENTS)))
        began = time.monotonic()
        own = (f"{url}/generate_stream", body, STREAMS // CLIENTS, began + LONGEST_S)
        reading = [loop.run_in_executor(pool, read_streams, *own) for _ in range(CLIENTS)]
        await asyncio.sleep(BEGIN_S + QUIET_S)
        quiet, times, spans = (began + BEGIN_S, time.monotonic()), [], []
        for first in firsts[:ADAPTERS]:
            if time.monotonic() > began + LONGEST_S - 1:
                break
            start = time.monotonic()
            times.append(await first())
            spans.append((start, time.monotonic()))
            await asyncio.sleep(REST_S)
        gaps = [each for process in await asyncio.gather(*reading) for each in process]
    if not gaps:
        raise RuntimeError(f"no stream ran until the end: {tokens} tokens were too few")
    return {
        "beside": len(gaps),
        "singles": len(times),
        "first_token_p50_ms": percentile(times, 0.5),
        "first_token_max_ms": percentile(times, 1.0),
        **_of(gaps, [quiet], "alone"),
        **_of(gaps, spans, "meanwhile"),
    }


def _of(
    streams: Sequence[Sequence[Gap]], spans: Sequence[tuple[float, float]], when: str
) -> dict[str, Any]:
    """Quantiles of the gaps that ended within spans of time, in milliseconds."""
    found = [
        gap.seconds
        for gaps in streams
        for gap in gaps
        if any(begin <= gap.at - gap.seconds and gap.at <= end for begin, end in spans)
    ]
    return {f"gap_p{q}_{when}_ms": percentile(found, q / 100) for q in (50, 99, 100)}
