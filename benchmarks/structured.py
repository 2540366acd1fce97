"""The cost of structured answers: 50 % of the requests with a schema, compared with none.

    python -m benchmarks.workload /tmp/m8b --json --adapters 32
    loray serve <config with model.id /tmp/m8b, load_format dummy>
    python -m benchmarks.structured --url http://127.0.0.1:8000

Closed loops over prompts of random words, streamed and greedy, alternately; the fastest round of
each counts. The schema is a list that is too long to end, so all answers have as many tokens. One
JSON line a loop, then the ratio: 1.0 is no cost. The model's tokenizer must be able to spell JSON.
"""

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import aiohttp

from benchmarks.serving import Case, Measured, ask, bodies, describe, percentile
from benchmarks.spelled_json import PEOPLE


def held(waiting: Iterator[dict[str, Any]], share: float) -> Iterator[dict[str, Any]]:
    """The same requests, that share of them, evenly, held to the schema."""
    due = 0.0
    for body in waiting:
        due += share
        if due < 1:
            yield body
            continue
        due -= 1
        # Answers under a schema end where it says, so they may not ignore the token that ends.
        free = {key: value for key, value in body.items() if key != "ignore_eos"}
        schema = {"type": "json_schema", "json_schema": {"name": "people", "schema": PEOPLE}}
        yield {**free, "response_format": schema}


async def drive(url: str, case: Case, waiting: Iterator[dict[str, Any]]) -> dict[str, Any]:
    """Send the requests, so many at a time; returns the loop's row."""
    kinds = {"free": Measured(), "held": Measured()}
    timeout, connector = aiohttp.ClientTimeout(total=None), aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(timeout=timeout, connector=connector) as session:

        async def client() -> None:
            for body in waiting:
                kind = "held" if "response_format" in body else "free"
                await ask(session, url, body, kinds[kind])

        began = time.perf_counter()
        await asyncio.gather(*(client() for _ in range(case.concurrency)))
        seconds = time.perf_counter() - began
    errors = [error for measured in kinds.values() for error in measured.errors]
    row = {
        "load": case.name,
        "concurrency": case.concurrency,
        "requests": case.requests,
        "cached_prompt_tokens": sum(m.cached for m in kinds.values()),
        "output_tokens_per_s": round(sum(m.tokens for m in kinds.values()) / seconds, 1),
        "errors": len(errors),
        "first_error": errors[:1],
    }
    for kind, measured in kinds.items():
        if measured.gaps:
            row[f"{kind}_itl_p50_ms"] = percentile(measured.gaps, 0.5)
            row[f"{kind}_itl_p99_ms"] = percentile(measured.gaps, 0.99)
    return row


@dataclass(frozen=True)
class Comparison:
    """The same loop without and with a schema, alternately; share: of its requests under one."""

    case: Case
    share: float = 0.5
    rounds: int = 2

    async def rows(self, url: str, vocabulary: int, seed: int) -> AsyncIterator[dict[str, Any]]:
        """Warm up, then one row a loop and last the ratio of the fastest of each."""
        warm = replace(self.case, requests=2 * self.case.concurrency)
        warm = replace(warm, input_length=64, output_length=16)
        await drive(url, warm, held(bodies(warm, vocabulary, seed), self.share))
        best = {"free": 0.0, "held": 0.0}
        for _ in range(self.rounds):
            for name, share in (("free", 0.0), ("held", self.share)):
                seed += 1
                waiting = held(bodies(self.case, vocabulary, seed), share)
                row = await drive(url, replace(self.case, name=name), waiting)
                best[name] = max(best[name], row["output_tokens_per_s"])
                yield row
        ratio = round(best["held"] / best["free"], 3) if best["free"] else None
        yield {"output_tokens_per_s": best, "share": self.share, "ratio": ratio}


async def play(parsed: argparse.Namespace) -> None:
    """Print every row."""
    info = await describe(parsed.url)
    print(json.dumps({"server": info.get("chosen"), "version": info.get("version")}), flush=True)
    models = tuple(f"a{i}" for i in range(parsed.adapters)) or (parsed.base,)
    lengths = parsed.input_length, parsed.output_length
    case = Case("structured", models, parsed.concurrency, parsed.requests, *lengths)
    comparison = Comparison(case, parsed.share, parsed.rounds)
    async for row in comparison.rows(parsed.url, parsed.vocabulary, parsed.seed):
        print(json.dumps(row), flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure a running server."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--base", default="base", help="the base model's served name")
    parser.add_argument("--adapters", type=int, default=0, help="a0 .. aN-1 instead of the base")
    parser.add_argument("--vocabulary", type=int, default=120_000, help="words of prompts")
    parser.add_argument("--concurrency", type=int, default=64)
    parser.add_argument("--requests", type=int, default=256)
    parser.add_argument("--input-length", type=int, default=512)
    parser.add_argument("--output-length", type=int, default=256)
    parser.add_argument("--share", type=float, default=0.5, help="of requests under the schema")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0, help="another one has other prompts")
    asyncio.run(play(parser.parse_args(arguments)))


if __name__ == "__main__":
    main()
