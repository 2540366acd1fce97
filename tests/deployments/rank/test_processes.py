"""A process has ended when it holds nothing any more, and not before."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.rank.processes import await_end, has_ended, sigkill
from tests.deployments.driver.routing.stories import PATIENCE_S

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="asks /proc")


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])


def test_waiting_for_a_live_process_times_out() -> None:
    process = sleeper()
    assert not await_end(process.pid, 0.1)
    process.kill()
    process.wait()
    assert has_ended(process.pid)


@pytest.mark.parametrize("stopped", [False, True])
def test_a_killed_process_has_ended_before_its_parent_waits(stopped: bool) -> None:
    process = sleeper()
    if stopped:
        os.kill(process.pid, signal.SIGSTOP)
    sigkill(process.pid)
    assert await_end(process.pid, PATIENCE_S)
    assert process.wait() == -signal.SIGKILL
    sigkill(process.pid)


def test_a_process_whose_first_thread_alone_has_ended_goes_on() -> None:
    """As a killed rank does while its other threads give the GPU's memory back."""
    code = (
        "import ctypes, sys, threading; "
        "threading.Thread(target=sys.stdin.read).start(); "
        "ctypes.CDLL(None).pthread_exit(None)"
    )
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE) as process:
        stat = Path(f"/proc/{process.pid}/stat")
        while stat.read_text().rpartition(")")[2].split()[0] != "Z":
            assert process.poll() is None
        assert not has_ended(process.pid)
        process.kill()
        assert await_end(process.pid, PATIENCE_S)
