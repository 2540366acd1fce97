"""The processes of a served app, by the titles that Ray gives them."""

import psutil

from tests.end_to_end.conftest import Served


def processes(served: Served, title: str) -> list[psutil.Process]:
    """Those whose title holds `title`, oldest first."""
    family = psutil.Process(served.process.pid).children(recursive=True)
    found = [p for p in family if title in _title(p)]
    return sorted(found, key=lambda process: process.create_time())


def drivers(served: Served) -> list[psutil.Process]:
    """Driver replicas."""
    return processes(served, "ServeReplica:loray:Driver")


def _title(process: psutil.Process) -> str:
    try:
        return " ".join(process.cmdline())
    except psutil.Error:
        return ""  # it has just ended
