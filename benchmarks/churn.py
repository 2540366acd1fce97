"""The cost of more adapters than the device holds, compared with resident ones.

    python -m benchmarks.workload /tmp/m8b --adapters 128 --small-adapters 1000
    loray serve <config: device pages for 32 rank-16 adapters, host_bytes for 128>
    python -m benchmarks.churn --metrics http://127.0.0.1:8080/metrics

Closed loop, 256 tokens in, 128 out. `resident` uses 32 adapters in rotation; the figures of other
cases are compared with it. `zipf` and `turns` use 128 adapters, by Zipf's law and in rotation,
after a request for each, so that they are in the host tier; `small` uses s0 .. s999 by Zipf's law,
from disk. The bound of `turns` is the same case (as `all-resident`) on a server with device pages
for all 128.

Prompts of an earlier run are in the prefix cache and make a case look faster: rows have
`cached_prompt_tokens`, and another `--seed` has other prompts. One JSON line a case. `moved` is
how the server's adapter metrics grew: hits, misses, evictions, loads and their bytes, and seconds
by stage of a load. On a CPU: see benchmarks/local.py; without any: benchmarks/churn_steps.py.
"""

import argparse
import asyncio
import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import aiohttp

from benchmarks.serving import Case, describe, run, settle

SHARES = ("output_tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")
_METRIC = re.compile(r"^(?:ray_)?(loray_adapter_\w+?)(?:_total)?(\{[^}]*\})? ([0-9.eE+-]+)$", re.M)
_STAGE = re.compile(r'stage="(\w+)"')


def churn_cases(options: argparse.Namespace) -> list[Case]:
    """The cases, the resident one first."""
    names = tuple(f"a{i}" for i in range(options.adapters))
    small = tuple(f"s{i}" for i in range(options.small))
    resident = Case(
        "resident",
        names[: options.resident],
        options.concurrency,
        options.requests,
        options.input_length,
        options.output_length,
    )
    return [
        resident,
        replace(resident, name="zipf", models=names, zipf=1.0),
        replace(resident, name="turns", models=names),
        replace(resident, name="all-resident", models=names),
        replace(resident, name="small", models=small, zipf=1.0),
    ]


async def moved(metrics_url: str | None) -> dict[str, float]:
    """The sums of the server's adapter metrics; empty without an address."""
    if metrics_url is None:
        return {}
    async with aiohttp.ClientSession() as session, session.get(metrics_url) as reply:
        return read_metrics(await reply.text())


def read_metrics(text: str) -> dict[str, float]:
    """Counters and sums by name, over all replicas; by stage where there is one."""
    sums: dict[str, float] = {}
    for name, labels, value in _METRIC.findall(text):
        if name.endswith("_bucket") or 'adapter="' in labels:
            continue
        stage = _STAGE.search(labels)
        key = f"{name}.{stage[1]}" if stage else name
        sums[key] = sums.get(key, 0.0) + float(value)
    return sums


def grown(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """What the sums have grown by, where they have."""
    by = {name: round(value - before.get(name, 0.0), 3) for name, value in after.items()}
    return {name: value for name, value in by.items() if value}


def shares(row: dict[str, Any], resident: dict[str, Any] | None) -> dict[str, float]:
    """A row's figures as shares of the resident one's."""
    if resident is None:
        return {}
    return {
        f"{name}_of_resident": round(row[name] / resident[name], 3)
        for name in SHARES
        if row[name] and resident[name]
    }


async def play(options: argparse.Namespace) -> None:
    """Run and print the selected cases."""
    info = await describe(options.url)
    print(json.dumps({"server": info.get("chosen"), "version": info.get("version")}), flush=True)
    resident: dict[str, Any] | None = None
    for seed, case in enumerate(churn_cases(options), options.seed):
        if case.name not in options.cases:
            continue
        if case.name != "small":
            await settle(options.url, case.models, options.vocabulary)
        before = await moved(options.metrics)
        row = await run(options.url, case, options.vocabulary, seed)
        await asyncio.sleep(options.metrics_lag_s if options.metrics else 0)
        after = await moved(options.metrics)
        if case.name == "resident":
            resident = row
        line = {**row, **shares(row, resident), "moved": grown(before, after)}
        print(json.dumps(line), flush=True)


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    made.add_argument("--url", default="http://127.0.0.1:8000")
    made.add_argument("--metrics", help="where the server's metrics are")
    made.add_argument("--metrics-lag-s", type=float, default=6.0, help="until they have arrived")
    made.add_argument("--vocabulary", type=int, default=120_000)
    made.add_argument("--resident", type=int, default=32)
    made.add_argument("--adapters", type=int, default=128)
    made.add_argument("--small", type=int, default=1000)
    made.add_argument("--concurrency", type=int, default=64)
    made.add_argument("--requests", type=int, default=512)
    made.add_argument("--input-length", type=int, default=256)
    made.add_argument("--output-length", type=int, default=128)
    made.add_argument("--seed", type=int, default=1000, help="another one has other prompts")
    made.add_argument("--cases", nargs="+", default=["resident", "zipf", "turns"])
    return made


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the selected cases against a running server."""
    asyncio.run(play(parser().parse_args(arguments)))


if __name__ == "__main__":
    main()
