"""Closed-loop load through HTTP on the standard workload: throughput, TTFT, ITL, TPOT.

Streamed greedy completions of fixed lengths over prompts of random words. Each case is one line
of JSON that names the server's own choices too, so that no row can hide how it ran.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from math import inf
from typing import Any

import aiohttp
from rich.console import Console
from rich.progress import Progress

from benchmarks.steps import StepTimes
from benchmarks.workload import INVOCATION
from configs.env import client_setting

MILLISECONDS = 1e3
SETTLING_SEED, CONVERSATION_SEED = 99, 98


@dataclass(frozen=True)
class Case:
    """One closed loop: `concurrency` requests in flight until `requests` are done.

    models: names used in rotation, or by Zipf's law where zipf > 0. Lengths in tokens.
    conversation: tokens before each prompt, the same in all cases; INVOCATION follows them.
    """

    name: str
    models: tuple[str, ...]
    concurrency: int
    requests: int
    input_length: int = 512
    output_length: int = 256
    zipf: float = 0.0
    conversation: int = 0


@dataclass
class Measured:
    """What the clients saw; times in seconds.

    sent: requests that were sent.
    cached: tokens of prompts that the server had in its prefix cache, if it reports them.
    """

    sent: int = 0
    tokens: int = 0
    cached: int = 0
    first: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    per_token: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)


def standard_cases(base: str, many: tuple[str, ...]) -> list[Case]:
    """The table of the one-GPU figures: names, concurrency and request counts."""
    adapters = len(many)
    return [
        Case("base-c1", (base,), 1, 3),
        Case("lora1-c1", many[:1], 1, 3),
        Case("base-c64", (base,), 64, 256),
        Case("lora1-c64", many[:1], 64, 256),
        Case(f"lora{adapters}-c64", many, 64, 256),
        Case("base-c256", (base,), 256, 768),
        Case(f"lora{adapters}-c256", many, 256, 768),
    ]


def warming(models: tuple[str, ...]) -> Case:
    """What is played before anything counts: short requests over all of them."""
    return Case("warm", models, 64, max(128, len(models)), 64, 16)


async def settle(url: str, models: tuple[str, ...], vocabulary: int) -> None:
    """Ask each of these once, briefly, so that a case begins as it will go on."""
    once = Case("settle", models, 64, len(models), 8, 2)
    await run(url, once, vocabulary, SETTLING_SEED)


async def ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], measured: Measured
) -> None:
    """Send one request and time its chunks; a connection that ends is an error of that request."""
    measured.sent += 1
    try:
        await _ask(session, url, body, measured)
    except aiohttp.ClientError as fault:
        measured.errors.append(f"{type(fault).__name__}: {fault}")


async def _ask(
    session: aiohttp.ClientSession, url: str, body: dict[str, Any], measured: Measured
) -> None:
    began = time.perf_counter()
    first = last = 0.0
    count = 0
    async with session.post(f"{url}/v1/completions", json=body) as reply:
        if reply.status != 200:
            measured.errors.append(f"{reply.status} {(await reply.text())[:200]}")
            return
        async for line in reply.content:
            if not line.startswith(b"data:") or line.startswith(b"data: [DONE]"):
                continue
            chunk = json.loads(line[5:])
            now = time.perf_counter()
            if chunk.get("usage"):
                count = chunk["usage"]["completion_tokens"]
                details = chunk["usage"].get("prompt_tokens_details") or {}
                measured.cached += details.get("cached_tokens") or 0
            if chunk.get("choices"):
                if first:
                    measured.gaps.append(now - last)
                first, last = first or now, now
    if count < body["max_tokens"]:
        measured.errors.append(f"{count} tokens instead of {body['max_tokens']}")
    measured.tokens += count
    measured.first.append(first - began)
    measured.per_token.append((last - first) / max(1, count - 1))


def bodies(case: Case, vocabulary: int, seed: int) -> Iterator[dict[str, Any]]:
    """The requests of a case; no two prompts share a prefix, nor do cases of different seeds.

    Only a conversation is shared by all prompts of all cases that have it.
    """
    words_of_all = random.Random(CONVERSATION_SEED)
    before = [f"t{words_of_all.randrange(2, vocabulary)}" for _ in range(case.conversation)]
    before += [f"t{token}" for token in INVOCATION] if before else []
    chooser = random.Random(seed)
    weights = [1 / (i + 1) ** case.zipf for i in range(len(case.models))]
    for i in range(case.requests):
        words = random.Random(seed * 1_000_003 + i)
        model = case.models[i % len(case.models)]
        if case.zipf:
            [model] = chooser.choices(case.models, weights)
        own = [f"t{words.randrange(2, vocabulary)}" for _ in range(case.input_length)]
        yield {
            "model": model,
            "prompt": " ".join([*before, *own]),
            "max_tokens": case.output_length,
            "temperature": 0,
            "stream": True,
            "ignore_eos": True,
            "stream_options": {"include_usage": True},
        }


async def run(
    url: str,
    case: Case,
    vocabulary: int,
    seed: int = 0,
    key: str | None = None,
    answered: Callable[[], None] = lambda: None,
    requests: Iterator[dict[str, Any]] | None = None,
    most_seconds: float = inf,
) -> dict[str, Any]:
    """Play one case; returns its row. `answered` is called after each request.

    requests: the bodies of its requests; None: as `bodies` makes them. most_seconds: then no client
    sends another one.
    """
    measured = Measured()
    waiting = bodies(case, vocabulary, seed) if requests is None else requests
    timeout = aiohttp.ClientTimeout(total=None)
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(
        timeout=timeout, connector=connector, headers=authorization(key)
    ) as session:

        async def client() -> None:
            for body in waiting:
                await ask(session, url, body, measured)
                answered()
                if time.perf_counter() - began > most_seconds:
                    return

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(case.concurrency)))
        seconds = time.perf_counter() - began
    return {
        "case": case.name,
        "concurrency": case.concurrency,
        "requests": measured.sent,
        "input_length": case.input_length,
        "output_length": case.output_length,
        "cached_prompt_tokens": measured.cached,
        "output_tokens_per_s": round(measured.tokens / seconds, 1),
        "tpot_p50_ms": percentile(measured.per_token, 0.5),
        "itl_p50_ms": percentile(measured.gaps, 0.5),
        "itl_p99_ms": percentile(measured.gaps, 0.99),
        "ttft_p50_ms": percentile(measured.first, 0.5),
        "ttft_p99_ms": percentile(measured.first, 0.99),
        "errors": len(measured.errors),
        "first_error": measured.errors[:1],
    }


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which `share` of them lie, in milliseconds."""
    if not values:
        return None
    return round(sorted(values)[min(len(values) - 1, int(share * len(values)))] * MILLISECONDS, 2)


def authorization(key: str | None) -> dict[str, str]:
    """The header that an API key travels in."""
    return {} if key is None else {"authorization": f"Bearer {key}"}


async def describe(url: str, key: str | None = None) -> dict[str, Any]:
    """What the server says of itself."""
    headers = authorization(key)
    async with (
        aiohttp.ClientSession(headers=headers) as session,
        session.get(url + "/info") as reply,
    ):
        info: dict[str, Any] = await reply.json()
        return info


async def play(parsed: argparse.Namespace) -> list[str]:
    """Warm up, then run and print every selected case; returns an error of each that had any."""
    key = client_setting("LORAY_API_KEY", None)
    steps = StepTimes(parsed.application) if parsed.steps else None
    info = await describe(parsed.url, key)
    print(json.dumps({"server": info.get("chosen"), "version": info.get("version")}), flush=True)
    names = tuple(parsed.names or (f"a{i}" for i in range(parsed.adapters)))
    cases = standard_cases(parsed.base, names)
    sizes = {name: getattr(parsed, name) for name in ("requests", "input_length", "output_length")}
    changes = {name: value for name, value in sizes.items() if value is not None}
    cases = [replace(case, **changes) for case in cases]
    warm = warming((*names, parsed.base))
    selected = [case for case in cases if not parsed.cases or case.name in parsed.cases]
    console = Console(stderr=True)
    failed = []
    # A bar on a terminal, else a line for each case; the rows are on stdout.
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        for seed, case in enumerate((warm, *selected)):
            task = progress.add_task(case.name, total=case.requests)
            if steps is not None:
                await steps.since_last()
            if not console.is_terminal:
                console.print(f"{case.name}: up to {case.requests} requests")
            answered = partial(progress.advance, task)
            row = await run(
                parsed.url,
                case,
                parsed.vocabulary,
                seed,
                key,
                answered,
                most_seconds=parsed.seconds,
            )
            progress.remove_task(task)
            if steps is not None:
                row |= await steps.since_last()
            if case is not warm:
                print(json.dumps(row), flush=True)
            if row["errors"]:
                message = f"{case.name}: {row['errors']} of {row['requests']} requests failed"
                failed.append(f"{message}, the first by: {row['first_error'][0]}")
    return failed


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the standard cases against a running server; SystemExit 1 if any request failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--base", default="base", help="the base model's served name")
    parser.add_argument("--adapters", type=int, default=32, help="a0 .. aN-1 are used")
    parser.add_argument("--names", nargs="*", help="the adapters' own names instead")
    parser.add_argument("--requests", type=int, help="of each case, instead of the table's")
    parser.add_argument(
        "--seconds", type=float, default=inf, help="after which no more requests of a case are sent"
    )
    parser.add_argument("--input-length", type=int, help="words of each prompt (512)")
    parser.add_argument("--output-length", type=int, help="tokens of each answer (256)")
    parser.add_argument("--vocabulary", type=int, default=120_000)
    parser.add_argument(
        "--steps",
        action="store_true",
        help="ask the driver about its steps too; with RAY_AUTH_MODE=token beside `loray serve`",
    )
    parser.add_argument("--application", default="loray", help="its name in the server's yaml")
    parser.add_argument("--cases", nargs="*", help="names of the cases to run (default: all)")
    failed = asyncio.run(play(parser.parse_args(arguments)))
    if failed:
        sys.exit("\n".join(failed))


if __name__ == "__main__":
    main()
