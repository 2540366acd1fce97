"""The server that the recoveries are measured on, and its processes."""

import os
import re
import subprocess
import sys
import time
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import psutil
import yaml

from benchmarks.table.rows import gpus
from benchmarks.table.server import Ready, TableServer, descendants, is_announced
from configs.env import joining_environment

TITLES = {
    "rank": "RankActor",
    "driver": "ServeReplica:loray:Driver",
    "ingress": "ServeReplica:loray:Ingress",
    "front": "haproxy -db",
    "controller": "ServeController",
    "manager": "HAProxyManager",
}
START_S = 900.0
POLL_S = 0.1


class RecoveryServer:
    """`loray serve` of a config with some replicas, in a process of its own."""

    def __init__(self, config: dict[str, Any], folder: Path, port: int) -> None:
        """folder: for the config and the output."""
        self._config = deepcopy(config)
        self._config.setdefault("http_options", {}).update({"host": "127.0.0.1", "port": port})
        self._folder = folder
        self._server: TableServer | None = None
        self.url = f"http://127.0.0.1:{port}"
        self._ray_address = ""

    def start(self) -> Ready:
        """Start it; returns when it has announced itself."""
        path = self._write(self._config)
        command = [sys.executable, "-m", "deployments.cli", "serve", str(path), "--no-dashboard"]
        self._server = TableServer(command, self._folder / "server.log", self.url)
        ready = self._server.wait(is_announced, START_S)
        found = re.search(r"ray address\s+(\S+)", self._server.said())
        assert found is not None, "loray serve prints Ray's address"
        self._ray_address = found[1]
        return ready

    def stop(self) -> float:
        """End it as Ctrl-C does; returns the seconds."""
        assert self._server is not None, "start comes first"
        began = time.monotonic()
        self._server.stop()
        return time.monotonic() - began

    def scale(self, replicas: int, least: int | None = None) -> None:
        """Deploy the config with so many driver replicas; least: fewer without requests."""
        config = with_replicas(self._config, replicas, least=least)
        command = [sys.executable, "-m", "ray.serve.scripts", "run", "--non-blocking"]
        subprocess.run(
            [*command, "--address", self._ray_address, str(self._write(config))],
            check=True,
            capture_output=True,
            env=joining_environment(),
        )

    def processes(self, kind: str) -> list[psutil.Process]:
        """The processes of one kind (a key of TITLES), standby ranks among them."""
        assert self._server is not None, "start comes first"
        found = descendants(self._server.pid)
        return [process for process in found if TITLES[kind] in _title(process)]

    def victims(self, kind: str) -> list[psutil.Process]:
        """Those of a kind that serve now, with one driver: standby ranks are the youngest."""
        born = {process: process.create_time() for process in self.processes(kind)}
        [app] = self._config["applications"]
        num_ranks = app["args"]["engine"].get("tensor_parallel", 1)
        return sorted(born, key=born.__getitem__)[: num_ranks if kind == "rank" else None]

    def _write(self, config: dict[str, Any]) -> Path:
        path = self._folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        return path


def with_replicas(
    config: dict[str, Any], drivers: int, ingresses: int | None = None, least: int | None = None
) -> dict[str, Any]:
    """A copy of a config with so many replicas."""
    changed = deepcopy(config)
    [app] = changed["applications"]
    options = {each["name"]: each for each in app.setdefault("deployments", [])}
    for name in ("Driver", "Ingress"):
        if name not in options:
            options[name] = {"name": name}
            app["deployments"].append(options[name])
    fewest = drivers if least is None else least
    scaling = options["Driver"].setdefault("autoscaling_config", {})
    options["Driver"].pop("num_replicas", None)
    scaling |= {"min_replicas": fewest, "max_replicas": max(drivers, 1), "initial_replicas": fewest}
    scaling |= {"upscale_delay_s": 0.5, "downscale_delay_s": 2.0, "downscale_to_zero_delay_s": 2.0}
    # Serve learns of requests that wait by this; its default is 10 s.
    scaling.setdefault("metrics_interval_s", 1.0)
    if ingresses is not None:
        options["Ingress"]["num_replicas"] = ingresses
    return changed


def until(seen: Callable[[], bool], limit_s: float = START_S) -> float:
    """Seconds until it is so; TimeoutError beyond the limit."""
    began = time.monotonic()
    while not seen():
        if time.monotonic() - began > limit_s:
            raise TimeoutError(f"not so after {limit_s:.0f} s")
        time.sleep(POLL_S)
    return time.monotonic() - began


def conditions(config: dict[str, Any]) -> dict[str, Any]:
    """What the figures depend on."""
    engine = config["applications"][0]["args"]["engine"]
    return {
        "model": engine["model"]["id"],
        "tensor_parallel": engine.get("tensor_parallel", 1),
        "cpus": os.cpu_count(),
        "gpus": [gpu.name for gpu in gpus()],
        "load_average": [round(each, 1) for each in os.getloadavg()],
    }


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # It has just ended.
