"""The end of a process on this machine: how it is brought about, and when it is complete."""

import contextlib
import os
import signal
import time
from pathlib import Path

_LOOK_SECONDS = 0.02


def sigkill(pid: int) -> None:
    """Kill a process, stopped ones too; one that is gone is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def await_end(pid: int, timeout_s: float) -> bool:
    """Wait until a process has given back all it held; False if it has not after timeout_s."""
    deadline = time.monotonic() + timeout_s
    while not has_ended(pid):
        if time.monotonic() >= deadline:
            return False
        time.sleep(_LOOK_SECONDS)
    return True


def has_ended(pid: int) -> bool:
    """Whether a process holds nothing any more: it is gone, or only its exit status is left."""
    try:
        told = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return True  # where there is no /proc, nobody can tell
    state = told.rpartition(")")[2].split()[0]
    return state in "ZX"
