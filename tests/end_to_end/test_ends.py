"""How a server ends: by SIGTERM, with its cluster, and how its front comes back."""

import json
import signal
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from threading import Event

import httpx
import psutil
import pytest
import yaml

from tests.end_to_end.conftest import (
    PATIENCE_SECONDS,
    POLL_SECONDS,
    Served,
    demo_config,
    free_port,
    kill,
    start,
)
from tests.end_to_end.processes import processes

pytestmark = pytest.mark.ray

LONG = {"model": "", "prompt": "a", "max_tokens": 990, "stream": True, "ignore_eos": True}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """A server that a test may end."""
    port = free_port()
    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump(demo_config(port)))
    served = start(path, port, "--drain-seconds", str(PATIENCE_SECONDS))
    yield served
    kill(served.process.pid)


def gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert not alive, f"processes were left behind: {alive}"


def test_sigterm_lets_streams_end_and_refuses_new_requests(own: Served) -> None:
    family = psutil.Process(own.process.pid).children(recursive=True)
    events, statuses = [], set()
    with httpx.stream(
        "POST", f"{own.url}/v1/completions", json=LONG, timeout=PATIENCE_SECONDS
    ) as reply:
        for line in reply.iter_lines():
            if line.startswith("data:"):
                events.append(line.removeprefix("data:").strip())
            if len(events) == 5:
                own.process.send_signal(signal.SIGTERM)
            if len(events) > 5 and 503 not in statuses:
                statuses.add(httpx.get(f"{own.url}/health", timeout=PATIENCE_SECONDS).status_code)
    assert events[-1] == "[DONE]"
    assert json.loads(events[-2])["choices"][0]["finish_reason"] == "length"
    assert 503 in statuses
    assert own.process.wait(PATIENCE_SECONDS) == 0
    output = "\n".join(own.output)
    assert "SIGTERM received" not in output, "a native stack"
    gone(family)


def test_the_front_comes_back_and_a_cluster_that_ends_ends_the_command(own: Served) -> None:
    family = psutil.Process(own.process.pid).children(recursive=True)
    [front] = processes(own, "haproxy -db")
    front.kill()
    pause = Event()
    while True:
        with suppress(httpx.TransportError):
            if httpx.get(f"{own.url}/health", timeout=PATIENCE_SECONDS).status_code == 200:
                break
        pause.wait(POLL_SECONDS)
    [agent] = processes(own, "ray::DashboardAgent")
    agent.kill()
    assert own.process.wait(PATIENCE_SECONDS) == 1
    assert any("the Ray cluster of this command has ended" in line for line in own.output)
    gone(family)
