"""Requests that come by chance, whatever is still running: `python -m benchmarks.open_loop`.

    loray serve <config with the adapters a0 .. a31>
    python -m benchmarks.open_loop --rates 10 20 40
    python -m benchmarks.open_loop --search 20

Arrivals are Poisson's. Adapters are chosen by Zipf's law, lengths of prompts and answers are
log-normal, some prompts begin with their adapter's system prompt, and a few are long. A request
meets the objective if its first token comes within 0.5 s and its others 25 ms apart on average; a
failed one does not. `--search RATE` finds the highest rate at which 99 % meet it.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from benchmarks.serving import Measured, ask, describe, percentile

FIRST_S, TOKEN_S, SHARE = 0.5, 0.025, 0.99
SYSTEM_SEED = 97


@dataclass(frozen=True)
class Arrivals:
    """An open loop: requests over `models` for `seconds`, at `rate` a second.

    prompt, answer: medians of log-normal lengths in tokens; spread: their sigma; longest: of each.
    system: tokens of a system prompt of each adapter, which `system_share` of its requests have.
    long: tokens of a long prompt; long_share: of all requests.
    tries: loads that a search plays.
    """

    name: str
    models: tuple[str, ...]
    rate: float
    seconds: float = 10.0
    zipf: float = 1.0
    prompt: int = 256
    answer: int = 128
    spread: float = 0.7
    longest: tuple[int, int] = (2000, 512)
    system: int = 500
    system_share: float = 0.5
    long: int = 3000
    long_share: float = 0.02
    tries: int = 6


def requests(load: Arrivals, vocabulary: int, seed: int) -> Iterator[tuple[float, dict[str, Any]]]:
    """Seconds since the beginning and the body of each request.

    Another seed has other prompts; system prompts are an adapter's own for ever.
    """
    chance, due = random.Random(seed), 0.0
    weights = [1 / (i + 1) ** load.zipf for i in range(len(load.models))]
    while (due := due + chance.expovariate(load.rate)) < load.seconds:
        [number] = chance.choices(range(len(load.models)), weights)
        prompt, answer = (
            min(most, max(2, round(chance.lognormvariate(0.0, load.spread) * median)))
            for median, most in zip((load.prompt, load.answer), load.longest, strict=True)
        )
        if chance.random() < load.long_share:
            prompt = load.long
        words = _words(chance, prompt, vocabulary)
        if chance.random() < load.system_share:
            system = random.Random(SYSTEM_SEED * 1_000_003 + number)
            words = _words(system, load.system, vocabulary) + words
        yield (
            due,
            {
                "model": load.models[number],
                "prompt": " ".join(words),
                "max_tokens": answer,
                "temperature": 0,
                "stream": True,
                "ignore_eos": True,
                "stream_options": {"include_usage": True},
            },
        )


def _words(chance: random.Random, count: int, vocabulary: int) -> list[str]:
    return [f"t{chance.randrange(2, vocabulary)}" for _ in range(count)]


async def run(url: str, load: Arrivals, vocabulary: int, seed: int) -> dict[str, Any]:
    """Play one load; returns its row."""
    measured, tasks = Measured(), []
    # Made before: long prompts take the client milliseconds.
    waiting = list(requests(load, vocabulary, seed))
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:
        began = time.perf_counter()
        for due, body in waiting:
            await asyncio.sleep(max(0.0, began + due - time.perf_counter()))
            tasks.append(asyncio.create_task(ask(session, url, body, measured)))
        await asyncio.gather(*tasks)
        seconds = time.perf_counter() - began
    return {
        "case": load.name,
        "requests": len(waiting),
        "rate_per_s": load.rate,
        "slo_share": round(share_in_time(measured, len(waiting)), 4),
        "output_tokens_per_s": round(measured.tokens / seconds, 1),
        "cached_prompt_tokens": measured.cached,
        "tpot_p50_ms": percentile(measured.per_token, 0.5),
        "tpot_p99_ms": percentile(measured.per_token, 0.99),
        "itl_p50_ms": percentile(measured.gaps, 0.5),
        "itl_p99_ms": percentile(measured.gaps, 0.99),
        "ttft_p50_ms": percentile(measured.first, 0.5),
        "ttft_p99_ms": percentile(measured.first, 0.99),
        "errors": len(measured.errors),
        "first_error": measured.errors[:1],
    }


def share_in_time(measured: Measured, requests: int) -> float:
    """Of all requests, those that met the objective."""
    pairs = zip(measured.first, measured.per_token, strict=True)
    met = sum(first <= FIRST_S and token <= TOKEN_S for first, token in pairs)
    return met / max(1, requests)


async def search(url: str, load: Arrivals, vocabulary: int, seed: int) -> dict[str, Any]:
    """Find the highest rate at which SHARE meet the objective, beginning with the load's own.

    Each rate is printed to standard error as soon as it is known.
    The row is that of this rate, or of the lowest one that was tried; tried: rate and share of all.
    """
    rows: list[dict[str, Any]] = []
    low, high, rate = 0.0, 0.0, load.rate
    for number in range(load.tries):
        rows.append(await run(url, replace(load, rate=rate), vocabulary, seed + number))
        share = rows[-1]["slo_share"]
        print(f"{rate:g} requests/s: {share:.1%} in time", file=sys.stderr, flush=True)
        if share >= SHARE:
            low = rate
        else:
            high = rate
        rate = 2 * low if not high else (low + high) / 2
    good = [row for row in rows if row["rate_per_s"] == low]
    best = good[0] if good else min(rows, key=lambda row: float(row["rate_per_s"]))
    tried = sorted((row["rate_per_s"], row["slo_share"]) for row in rows)
    errors = [error for row in rows for error in row["first_error"]]
    found = {"errors": sum(row["errors"] for row in rows), "first_error": errors[:1]}
    return best | found | {"slo_rate_per_s": low, "tried": tried}


async def play(options: argparse.Namespace) -> None:
    """Run and print every load."""
    info = await describe(options.url)
    print(json.dumps({"server": info.get("chosen"), "version": info.get("version")}), flush=True)
    names = tuple(options.names or (f"a{i}" for i in range(options.adapters)))
    for number, rate in enumerate(options.rates):
        load = Arrivals(f"open-{rate:g}", names, rate, options.seconds)
        row = await run(options.url, load, options.vocabulary, options.seed + number)
        print(json.dumps(row), flush=True)
    if options.search:
        load = Arrivals("highest", names, options.search, options.seconds)
        found = await search(options.url, load, options.vocabulary, options.seed + 1000)
        print(json.dumps(found), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the loads against a running server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--vocabulary", type=int, default=120_000)
    parser.add_argument("--adapters", type=int, default=32, help="a0 .. aN-1 are used")
    parser.add_argument("--names", nargs="*", help="the models' own names instead")
    parser.add_argument("--rates", type=float, nargs="*", default=[], help="requests a second")
    parser.add_argument("--search", type=float, help="the rate with which a search begins")
    parser.add_argument("--seconds", type=float, default=10.0, help="of arrivals in each load")
    parser.add_argument("--seed", type=int, default=0, help="another one has other prompts")
    asyncio.run(play(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
