"""How a server ends: by SIGTERM, with its cluster, and how its front comes back."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
import yaml

from tests.end_to_end.clients import wait_for
from tests.end_to_end.processes import processes, ranks, stopped_processes
from tests.end_to_end.serving import (
    PATIENCE_SECONDS,
    Served,
    demo_config,
    kill,
    start,
)
from tests.ports import free_port

pytestmark = pytest.mark.ray

LONG = {"model": "", "prompt": "a", "max_tokens": 990, "stream": True, "ignore_eos": True}


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Served]:
    """A server that a test may end."""
    port = free_port()
    path = tmp_path / "config.yaml"
    config = demo_config(port, standby=False)
    engine = config["applications"][0]["args"]["engine"]
    engine["tensor_parallel"] = 1
    # Ranks that a test stops do not count as lost.
    engine["recovery"]["step_timeout_s"] = PATIENCE_SECONDS
    path.write_text(yaml.safe_dump(config))
    served = start(path, port, "--no-dashboard", "--drain-seconds", str(PATIENCE_SECONDS))
    yield served
    kill(served.process.pid)


def until_health(own: Served, status: int) -> None:
    """Ask for the server's health until this is its status."""
    wait_for(lambda: httpx.get(f"{own.url}/health", timeout=PATIENCE_SECONDS).status_code == status)


def gone(family: list[psutil.Process]) -> None:
    _, alive = psutil.wait_procs(family, timeout=PATIENCE_SECONDS)
    assert not alive, f"processes were left behind: {alive}"


def test_sigterm_lets_streams_end_and_refuses_new_requests(own: Served) -> None:
    family = psutil.Process(own.process.pid).children(recursive=True)
    with httpx.stream(
        "POST", f"{own.url}/v1/completions", json=LONG, timeout=PATIENCE_SECONDS
    ) as reply:
        events = (line.removeprefix("data: ") for line in reply.iter_lines() if line)
        next(events)
        # The stream cannot end before the server drains, however late that begins.
        with stopped_processes(ranks(own)):
            # Once: a second SIGTERM would end the streams.
            own.process.send_signal(signal.SIGTERM)
            until_health(own, 503)
        rest = list(events)
    assert rest[-1] == "[DONE]"
    assert json.loads(rest[-2])["choices"][0]["finish_reason"] == "length"
    assert own.process.wait(PATIENCE_SECONDS) == 0
    output = "\n".join(own.output)
    assert "SIGTERM received" not in output, "a native stack"
    gone(family)


@pytest.mark.sweep
def test_the_front_comes_back_and_a_cluster_that_ends_ends_the_command(own: Served) -> None:
    family = psutil.Process(own.process.pid).children(recursive=True)
    # Two while Serve replaces one by the next, as it does when the ingress comes.
    fronts = processes(own, "haproxy -db")
    assert fronts
    for front in fronts:
        front.kill()
    until_health(own, 200)
    [agent] = processes(own, "ray::DashboardAgent")
    agent.kill()
    assert own.process.wait(PATIENCE_SECONDS) == 1
    assert any("the Ray cluster of this command has ended" in line for line in own.output)
    gone(family)
