"""The processes of a served app, by the titles that Ray gives them."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import psutil

from tests.end_to_end.serving import Served


def processes(served: Served, title: str) -> list[psutil.Process]:
    """Those whose title holds `title`, oldest first."""
    born = {}
    for process in psutil.Process(served.process.pid).children(recursive=True):
        if title in title_of(process):
            with suppress(psutil.Error):  # it has just ended
                born[process] = process.create_time()
    return sorted(born, key=born.__getitem__)


def drivers(served: Served) -> list[psutil.Process]:
    """Driver replicas."""
    return processes(served, "ServeReplica:loray:Driver")


def ranks(served: Served) -> list[psutil.Process]:
    """The ranks of all driver replicas."""
    return processes(served, "RankActor")


def title_of(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has just ended


@contextmanager
def stopped_processes(stopped: Sequence[psutil.Process]) -> Iterator[None]:
    """Ranks that do nothing within this, so that no request over them ends."""
    for process in stopped:
        process.suspend()
    try:
        yield
    finally:
        for process in stopped:
            with suppress(psutil.NoSuchProcess):
                process.resume()
