"""Kills a process on this machine and waits for its end."""

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.02
_NUM_THREADS = 17
"""The index, from the state on, in /proc/PID/stat (proc_pid_stat(5))."""


def sigkill(pid: int) -> None:
    """Kill a process, also a stopped one; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def await_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has freed its resources; False if it has not after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def has_ended(pid: int) -> bool:
    """Whether a process has freed its resources: at most its exit status is left."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True  # the process has ended, or this system has no /proc
    fields = stat.rpartition(")")[2].split()
    # The first thread's state. The others, which may end later, hold the memory too: CUDA gives a
    # GPU's back when the last one has closed the driver's files.
    return fields[0] in "ZX" and int(fields[_NUM_THREADS]) <= 1
