"""How `loray serve` notices the end of its cluster, and hears that it is to leave."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest
import typer

from deployments.commands.cluster import (
    ClusterLost,
    Leaving,
    ray_servers,
    require_alive,
    start_ray,
)

SLEEP = ["sleep", "3600"]


@pytest.fixture
def leaving() -> Iterator[Leaving]:
    before = {name: signal.getsignal(name) for name in (signal.SIGINT, signal.SIGTERM)}
    yield Leaving()
    for name, handler in before.items():
        signal.signal(name, handler)


@pytest.mark.parametrize("reaped", [False, True])
def test_a_server_that_is_gone_ends_the_cluster(reaped: bool) -> None:
    process = subprocess.Popen(SLEEP)
    servers = {process.pid: "sleep", os.getpid(): _own_name()}
    require_alive(servers)
    process.kill()
    if reaped:
        process.wait()
    else:
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    with pytest.raises(ClusterLost, match=f"sleep .process {process.pid}."):
        require_alive(servers)
    process.wait()


def test_a_reused_process_id_is_no_server() -> None:
    with pytest.raises(ClusterLost):
        require_alive({os.getpid(): "raylet"})


def test_only_own_children_are_servers() -> None:
    assert ray_servers() == {}


def test_an_end_that_takes_too_long_is_given_up() -> None:
    code = (
        "import time; from deployments.commands.cluster import give_up_after; "
        "give_up_after(0.1); time.sleep(600)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert ended.returncode == 1
    assert "has not ended in 0.1 s" in ended.stdout


def test_a_server_that_ends_first_ends_the_command_at_once() -> None:
    code = (
        "import subprocess, time; from deployments.commands.cluster import exit_if_lost; "
        "server = subprocess.Popen(['sleep', '3600']); "
        "ended = exit_if_lost({server.pid: 'sleep'}); server.kill(); time.sleep(600)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 1
    assert "is gone, before its requests and Serve have ended" in done.stderr
    assert "KillMode=mixed" in done.stderr


def test_a_server_that_ends_last_ends_nothing() -> None:
    code = (
        "import subprocess, time; from deployments.commands.cluster import exit_if_lost; "
        "server = subprocess.Popen(['sleep', '3600']); "
        "exit_if_lost({server.pid: 'sleep'}).set(); server.kill(); time.sleep(0.5)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_sigterm_leaves_time_and_a_second_signal_takes_it(leaving: Leaving) -> None:
    signal.raise_signal(signal.SIGTERM)
    assert (leaving.requested.is_set(), leaving.hurried.is_set()) == (True, False)
    signal.raise_signal(signal.SIGTERM)
    assert leaving.hurried.is_set()


def test_ctrl_c_leaves_none(leaving: Leaving) -> None:
    signal.raise_signal(signal.SIGINT)
    assert (leaving.requested.is_set(), leaving.hurried.is_set()) == (True, True)


def test_handlers_are_restored(leaving: Leaving) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leaving.listen()
    signal.raise_signal(signal.SIGTERM)
    assert leaving.requested.is_set()


def _own_name() -> str:
    with open("/proc/self/comm", encoding="utf-8") as file:
        return file.read().strip()


def test_a_ray_that_does_not_start_ends_in_a_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def late(*_: object, **__: object) -> None:
        raise Exception("The current node timed out during startup.")

    monkeypatch.setattr("ray.init", late)
    with pytest.raises(typer.Exit):
        start_ray(False)
    reason = "Exception: The current node timed out during startup"
    assert f"loray: Ray did not start: {reason}. See" in capsys.readouterr().err
