"""A served app: `loray serve` in its own process, as users have it."""

import os
import re
import signal
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
import yaml

from tests.end_to_end.ask import Asker
from tests.ports import free_port

ROOT = Path(__file__).resolve().parents[2]
PATIENCE_SECONDS = 600.0
"""How long anything may take on a slow machine: it ends what hangs, and proves nothing."""
POLL_SECONDS = 0.25

RAY_SETTINGS = {
    "RAY_AUTH_MODE": "disabled",
    # Where starts are slow Ray would begin them anew, and where memory is short end some process.
    "RAY_worker_register_timeout_seconds": f"{PATIENCE_SECONDS:.0f}",
    "RAY_memory_monitor_refresh_ms": "0",
    # Ray gives its workers the lowest priority: tests beside them would take all of their time.
    "RAY_worker_niceness": "0",
    # Serve would kill its front for being slow.
    "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": f"{PATIENCE_SECONDS:.0f}",
    "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": f"{PATIENCE_SECONDS:.0f}",
}


@dataclass
class Served:
    """A running app: where it answers, and everything it has printed.

    asker: calls the driver's own methods. config: the yaml that it was started with. edited:
    whether another one was deployed since.
    """

    url: str
    output: list[str]
    process: "subprocess.Popen[str]"
    shared_memory: frozenset[str]
    asker: Asker
    config: Path
    edited: bool = False


def demo_config(port: int, standby: bool = True) -> dict[str, Any]:
    """serve_config.yaml on a port of its own; on a GPU host over its GPUs, two at most.

    standby: whether a process stands by for each rank, which takes the start some seconds more.
    """
    config: dict[str, Any] = yaml.safe_load((ROOT / "serve_config.yaml").read_text())
    config["http_options"]["port"] = port
    engine = config["applications"][0]["args"]["engine"]
    # Guessed tokens change no answer.
    engine["speculation"] = {"kind": "prompt_lookup"}
    # A hang must show soon; a rank that the machine keeps waiting for some seconds does not hang.
    times = {"step_timeout_s": 20.0, "recovery_timeout_s": PATIENCE_SECONDS}
    engine["recovery"] = {**times, "standby": standby}
    if torch.cuda.is_available():
        engine["device"] = "cuda"
        engine["tensor_parallel"] = min(2, torch.cuda.device_count())
    return config


def environment() -> dict[str, str]:
    """Ports of its own, so that a server which runs beside the tests is not disturbed."""
    ports = {
        name: str(free_port())
        for name in (
            "RAY_SERVE_HAPROXY_METRICS_PORT",
            "RAY_SERVE_HAPROXY_STATS_PORT",
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT",
        )
    }
    return {**os.environ, **ports, **RAY_SETTINGS, "PYTHONUNBUFFERED": "1"}


def start(config: Path, port: int, *options: str) -> Served:
    """Run `loray serve` with these options until it has announced itself."""
    before = shared_memory()
    command = [sys.executable, "-m", "deployments.cli", "serve", str(config), *options]
    if find_spec("aiohttp_cors") is None:
        command.append("--no-dashboard")  # Ray's page needs packages that are not here
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    output: list[str] = []
    announced = threading.Event()

    def listen() -> None:
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line.rstrip())
            if "Ctrl-C ends it" in line:
                announced.set()
        announced.set()

    threading.Thread(target=listen, daemon=True).start()
    ready = announced.wait(PATIENCE_SECONDS) and process.poll() is None
    text = "\n".join(output)
    found = re.search(r"ray address\s+(\S+)", text)
    if not ready or found is None:
        kill(process.pid)
        pytest.fail(f"the server did not come up:\n{text}")
    asker = Asker(found[1], environment())
    return Served(f"http://127.0.0.1:{port}", output, process, before, asker, config)


def stop(served: Served) -> None:
    """Ctrl-C, which must leave nothing behind: no process and no shared memory."""
    served.asker.close()
    family = psutil.Process(served.process.pid).children(recursive=True)
    served.process.send_signal(signal.SIGINT)
    status = served.process.wait(PATIENCE_SECONDS)
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert status == 0, "\n".join(served.output[-20:])
    assert not alive, f"processes were left behind: {alive}"
    pause = threading.Event()
    for _ in range(int(PATIENCE_SECONDS / POLL_SECONDS)):
        if shared_memory() <= served.shared_memory:  # others may have some for a moment
            return
        pause.wait(POLL_SECONDS)
    pytest.fail("shared memory was left behind")


def kill(pid: int) -> None:
    """End a process and all under it."""
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        for each in [*process.children(recursive=True), process]:
            with suppress(psutil.NoSuchProcess):
                each.kill()


def shared_memory() -> frozenset[str]:
    return frozenset(path.name for path in Path("/dev/shm").iterdir())
