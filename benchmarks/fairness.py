"""How long requests wait: more adapters than the device holds, and one that floods the others.

    loray serve <config: device pages for 3 rank-16 adapters>
    python -m benchmarks.fairness

`open`: requests over 6 adapters come at 4 a second, at random times. `calm` and `flood`:
the adapters but the last come at 2 a second; in `flood` the last one has 64 requests in flight
all the time, and the figures are the others'. One JSON line a case: time to the first token, over
all of them and of the adapter that waited longest.
"""

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, fields
from typing import Any

import aiohttp

from benchmarks.serving import Case, Measured, ask, bodies, describe, percentile


@dataclass(frozen=True)
class Terms:
    """What all loads share: the server, and the lengths of requests in tokens.

    flood_lead_s: how long a flood goes on before the others come.
    """

    url: str
    vocabulary: int = 120_000
    input_length: int = 512
    output_length: int = 512
    flood_lead_s: float = 10.0


@dataclass(frozen=True)
class Load:
    """Arrivals of an open loop: so many requests at `rate` a second over models by chance."""

    name: str
    models: tuple[str, ...]
    rate: float
    requests: int
    flood: str | None = None
    flood_depth: int = 64


def loads(options: argparse.Namespace) -> list[Load]:
    """The three cases."""
    names = tuple(f"a{i}" for i in range(options.adapters))
    others, last, requests = names[:-1], names[-1], options.requests
    slower = options.rate / 2
    return [
        Load("open", names, options.rate, requests),
        Load("calm", others, slower, requests // 2),
        Load("flood", others, slower, requests // 2, last, options.flood_depth),
    ]


async def flood(session: aiohttp.ClientSession, terms: Terms, load: Load, seed: int) -> Measured:
    """Keep `flood_depth` requests of one adapter in flight until cancelled."""
    assert load.flood is not None
    seen = Measured()
    lengths = (terms.input_length, terms.output_length)
    case = Case("flood", (load.flood,), load.flood_depth, 10**9, *lengths)
    waiting = bodies(case, terms.vocabulary, seed)

    async def client() -> None:
        for body in waiting:
            await ask(session, terms.url, body, seen)

    await asyncio.gather(*(client() for _ in range(load.flood_depth)))
    return seen


@asynccontextmanager
async def flooded(
    session: aiohttp.ClientSession, terms: Terms, load: Load, seed: int
) -> AsyncIterator[None]:
    """The flood, if the load has one, for as long as the block runs."""
    if load.flood is None:
        yield
        return
    task = asyncio.create_task(flood(session, terms, load, seed))
    await asyncio.sleep(terms.flood_lead_s)
    yield
    task.cancel()
    await asyncio.wait([task])


async def run(terms: Terms, load: Load, seed: int) -> dict[str, Any]:
    """Play one load; returns its row. Another seed has other prompts."""
    chooser = random.Random(seed)
    lengths = (terms.input_length, terms.output_length)
    case = Case(load.name, load.models, 1, load.requests, *lengths)
    seen = {name: Measured() for name in load.models}
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with (
        aiohttp.ClientSession(timeout=timeout, connector=connector) as session,
        flooded(session, terms, load, seed + 1),
    ):
        began, due, tasks = time.perf_counter(), 0.0, []
        for body in bodies(case, terms.vocabulary, seed):
            body["model"] = chooser.choice(load.models)
            due += chooser.expovariate(load.rate)
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, terms.url, body, seen[body["model"]])))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    return _row(load, seen, seconds)


def _row(load: Load, seen: dict[str, Measured], seconds: float) -> dict[str, Any]:
    first = [each for measured in seen.values() for each in measured.first]
    gaps = [each for measured in seen.values() for each in measured.gaps]
    errors = [error for measured in seen.values() for error in measured.errors]
    worst = max((percentile(each.first, 0.99) or 0.0 for each in seen.values()), default=0.0)
    return {
        "case": load.name,
        "requests": load.requests,
        "rate_per_s": load.rate,
        "cached_prompt_tokens": sum(each.cached for each in seen.values()),
        "output_tokens_per_s": round(sum(each.tokens for each in seen.values()) / seconds, 1),
        "ttft_p50_ms": percentile(first, 0.5),
        "ttft_p99_ms": percentile(first, 0.99),
        "ttft_p99_ms_of_the_slowest_adapter": worst,
        "itl_p50_ms": percentile(gaps, 0.5),
        "itl_p99_ms": percentile(gaps, 0.99),
        "errors": len(errors),
        "first_error": errors[:1],
    }


async def play(options: argparse.Namespace) -> None:
    """Run and print every case."""
    info = await describe(options.url)
    print(json.dumps({"server": info.get("chosen"), "version": info.get("version")}), flush=True)
    names = [field.name for field in fields(Terms)]
    terms = Terms(**{name: getattr(options, name) for name in names})
    for index, load in enumerate(loads(options)):
        if not options.cases or load.name in options.cases:
            print(json.dumps(await run(terms, load, options.seed + 2 * index)), flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--url", default="http://127.0.0.1:8000")
    made.add_argument("--vocabulary", type=int, default=120_000)
    made.add_argument("--adapters", type=int, default=6)
    made.add_argument("--rate", type=float, default=4.0, help="requests a second")
    made.add_argument("--requests", type=int, default=240)
    made.add_argument("--flood-depth", type=int, default=64)
    made.add_argument("--flood-lead-s", type=float, default=10.0)
    made.add_argument("--input-length", type=int, default=512)
    made.add_argument("--output-length", type=int, default=512)
    made.add_argument("--seed", type=int, default=0, help="another one has other prompts")
    made.add_argument("--cases", nargs="*", help="open, calm, flood (default: all)")
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the cases against a running server."""
    asyncio.run(play(parser().parse_args(arguments)))


if __name__ == "__main__":
    main()
