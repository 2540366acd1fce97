"""A process has ended when it holds nothing any more, and not before."""

import os
import signal
import subprocess
import sys

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
