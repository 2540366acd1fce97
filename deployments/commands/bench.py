"""`loray bench`: the load generator of benchmarks/ against a running server."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import typer

from configs.env import environment_with
from deployments.commands.failing import fail
from deployments.commands.server import Json, Server

_MAX_ADAPTERS = 32
_BASE_CASES = ("base-c1", "base-c64", "base-c256")

_SECONDS = ("--seconds", "20")
"""Of a case, at most: a small GPU would take an hour for the table's requests."""

_SHORT = {"--input-length": "32", "--output-length": "32"}
"""Words and tokens of requests on a CPU, and where the table's are too long."""

_LONG_TOKENS = 4096
"""What the table's longest request takes, of words that are several tokens each."""


def bench(url: str, key: str | None, rest: Sequence[str]) -> None:
    """Run benchmarks.serving with these arguments; /v1/models gives names that they lack."""
    if importlib.util.find_spec("benchmarks") is None:
        fail(
            "the benchmarks folder is not installed here: run this from LoRay's repository, "
            "or `pip install -e` it"
        )
    command = [sys.executable, "-m", "benchmarks.serving", "--url", url, *rest]
    if not {"-h", "--help"} & set(rest):
        server = Server(url, key)
        command += _names(server.request("GET", "/v1/models")["data"], rest)
        command += _sizes(server.request("GET", "/info"), rest)
    # Not on its command line, which other users of the machine can read.
    environment = environment_with("LORAY_API_KEY", key)
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)


def _sizes(info: Json, rest: Sequence[str]) -> list[str]:
    """The options that bound a case's time, where it has none that does."""
    added = [] if {"--seconds", "--requests"} & set(rest) else [*_SECONDS]
    if info["model_device_type"] == "cpu" or info["max_total_tokens"] < _LONG_TOKENS:
        short = (pair for pair in _SHORT.items() if pair[0] not in rest)
        added += [word for pair in short for word in pair]
    return added


def _names(models: Sequence[Json], rest: Sequence[str]) -> list[str]:
    """The options for the server's base model and adapters; without adapters, base cases alone."""
    bases = [model["id"] for model in models if model["parent"] is None]
    own = [model["id"] for model in models if model["parent"] is not None]
    added = [] if "--base" in rest else ["--base", bases[0]]
    if {"--names", "--adapters"} & set(rest):
        return added
    if own:
        return [*added, "--names", *own[:_MAX_ADAPTERS]]
    return added if "--cases" in rest else [*added, "--cases", *_BASE_CASES]
