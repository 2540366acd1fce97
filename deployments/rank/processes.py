"""Names, watches and kills processes of this machine."""

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import NamedTuple

_LOOK_SECONDS = 0.02
_NUM_THREADS, _START_TIME = 17, 19
"""Indices, from the state on, in /proc/PID/stat (proc_pid_stat(5))."""


class Process(NamedTuple):
    """A process: its number, which another may have later, and its start in ticks since boot.

    started: 0 where this system has no /proc.
    """

    pid: int
    started: int


def this_process() -> Process:
    """Return the calling process."""
    fields = _stat(os.getpid())
    return Process(os.getpid(), int(fields[_START_TIME]) if fields else 0)


def sigkill(pid: int) -> None:
    """Kill a process, also a stopped one; does nothing if it has ended."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill(process: Process, timeout_s: float) -> bool:
    """Kill exactly this process and wait until it has ended; False if it has not in time."""
    if is_there(process):
        sigkill(process.pid)
        return await_end(process.pid, timeout_s)
    return True


def is_there(process: Process) -> bool:
    """Whether this process runs, and not another of its number."""
    fields = _stat(process.pid)
    return bool(fields) and int(fields[_START_TIME]) == process.started and not _ended(fields)


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
    fields = _stat(pid)
    return not fields or _ended(fields)


def _stat(pid: int) -> list[str]:
    """Return /proc/PID/stat from the state on; empty if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return []  # the process has ended, or this system has no /proc
    return stat.rpartition(")")[2].split()


def _ended(fields: list[str]) -> bool:
    # The first thread's state. The others, which may end later, hold the memory too: CUDA gives a
    # GPU's back when the last one has closed the driver's files.
    return fields[0] in "ZX" and int(fields[_NUM_THREADS]) <= 1
