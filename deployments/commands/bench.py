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


def bench(url: str, key: str | None, rest: Sequence[str]) -> None:
    """Run benchmarks.serving with these arguments; names that they lack come from /v1/models."""
    if importlib.util.find_spec("benchmarks") is None:
        fail(
            "the benchmarks folder is not installed here: run this from LoRay's repository, "
            "or `pip install -e` it"
        )
    command = [sys.executable, "-m", "benchmarks.serving", "--url", url, *rest]
    if not {"-h", "--help"} & set(rest):
        command += _names(Server(url, key).request("GET", "/v1/models")["data"], rest)
    # Not on its command line, where everybody on the machine could read it.
    environment = environment_with("LORAY_API_KEY", key)
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)


def _names(models: Sequence[Json], rest: Sequence[str]) -> list[str]:
    """The options that name what the server has: its base, its adapters, or no case over any."""
    bases = [model["id"] for model in models if model["parent"] is None]
    own = [model["id"] for model in models if model["parent"] is not None]
    added = [] if "--base" in rest else ["--base", bases[0]]
    if {"--names", "--adapters"} & set(rest):
        return added
    if own:
        return [*added, "--names", *own[:_MAX_ADAPTERS]]
    return added if "--cases" in rest else [*added, "--cases", *_BASE_CASES]
