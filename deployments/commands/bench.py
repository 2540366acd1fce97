"""`loray bench`: the load generator of benchmarks/ against a running server."""

import importlib.util
import subprocess
import sys
from collections.abc import Sequence

import typer

from configs.env import environment_with
from deployments.commands.failing import fail
from deployments.commands.server import Server


def bench(url: str, key: str | None, rest: Sequence[str]) -> None:
    """Run benchmarks.serving with these arguments; the base model's name is asked for."""
    if importlib.util.find_spec("benchmarks") is None:
        fail(
            "the benchmarks folder is not installed here: run this from LoRay's repository, "
            "or `pip install -e` it"
        )
    command = [sys.executable, "-m", "benchmarks.serving", "--url", url, *rest]
    if "--base" not in rest and not {"-h", "--help"} & set(rest):
        models = Server(url, key).ask("GET", "/v1/models")["data"]
        bases = [model["id"] for model in models if model["parent"] is None]
        command += ["--base", bases[0]]
    # Not on its command line, where everybody on the machine could read it.
    environment = environment_with("LORAY_API_KEY", key)
    raise typer.Exit(subprocess.run(command, check=False, env=environment).returncode)
