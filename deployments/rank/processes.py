"""Ending a process on this machine, and knowing when it has ended."""

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.02


def sigkill(pid: int) -> None:
    """Kill a process, a stopped one too; nothing happens if it is gone."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def await_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has freed all it held; False if it has not after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def has_ended(pid: int) -> bool:
    """Whether a process holds nothing any more: it is gone, or only its exit status is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True  # the process is gone, or this system has no /proc to ask
    state = stat.rpartition(")")[2].split()[0]
    return state in "ZX"
