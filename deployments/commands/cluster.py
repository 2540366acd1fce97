"""The Ray cluster that `loray serve` started: its processes, and how the command ends."""

import os
import signal
import threading
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import typer

from deployments.commands.failing import fail

LOGS = "See /tmp/ray/session_latest/logs; start the command again"

_SERVERS = ("gcs_server", "raylet")
_SHUTDOWN_SECONDS = 10.0
_TICK_SECONDS = 0.2


class ClusterLost(Exception):
    """A vital process of Ray has ended; the message names it."""


class Leaving:
    """How the command ends: `requested` by SIGTERM or Ctrl-C, `hurried` by Ctrl-C or both."""

    def __init__(self) -> None:
        self.requested = threading.Event()
        self.hurried = threading.Event()
        self.listen()

    def listen(self) -> None:
        """Handle both signals, also after other code has replaced the handlers."""
        for name in (signal.SIGINT, signal.SIGTERM):
            signal.signal(name, self._take)

    def _take(self, number: int, _: FrameType | None) -> None:
        if number == signal.SIGINT or self.requested.is_set():
            self.hurried.set()
        self.requested.set()


def start_ray(dashboard: bool) -> Any:
    """Start a cluster of its own: this command must not end another. typer.Exit 1 if it fails."""
    import ray  # Ray reads the environment when it is imported.

    try:
        return ray.init(
            "local", namespace="serve", include_dashboard=dashboard, logging_level="warning"
        )
    except Exception as error:
        # A start that times out, as on a machine that is too busy, raises a plain Exception.
        fail(f"Ray did not start: {type(error).__name__}: {str(error).rstrip('.')}. {LOGS}")


def ray_servers() -> dict[int, str]:
    """Ray's servers that are children of this process, by process id."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        name, state, parent = _status(int(process.name))
        if name in _SERVERS and parent == os.getpid() and state != "Z":
            found[int(process.name)] = name
    return found


def require_alive(servers: Mapping[int, str]) -> None:
    """Raise ClusterLost if one of these processes has ended."""
    for process, name in servers.items():
        now, state, _ = _status(process)
        if now != name or state == "Z":
            raise ClusterLost(f"its {name} (process {process}) is gone")


def exit_if_lost(servers: Mapping[int, str]) -> threading.Event:
    """Exit with code 1 once one of these processes has ended, until the event is set.

    In a thread: Ray blocks for a minute where it asks a server that is gone.
    """
    ended = threading.Event()

    def watch() -> None:
        while not ended.wait(_TICK_SECONDS):
            try:
                require_alive(servers)
            except ClusterLost as lost:
                typer.echo(
                    f"loray: {lost}, before its requests and Serve have ended. Send signals to "
                    f"process {os.getpid()} alone (systemd: KillMode=mixed)",
                    err=True,
                )
                os._exit(1)  # What Ray started here ends with this process.

    threading.Thread(target=watch, daemon=True).start()
    return ended


def end_without(ray: Any) -> None:
    """Exit with code 1 from a cluster that does not respond, and end all its processes."""
    # Ray may wait a minute for a dead process, and then end this one by itself.
    end = threading.Thread(target=ray.shutdown, daemon=True)
    end.start()
    end.join(_SHUTDOWN_SECONDS)
    if end.is_alive():
        os._exit(1)  # What Ray started here ends with this process.
    raise typer.Exit(1)


def give_up_after(seconds: float) -> None:
    """Exit with code 1 once so many seconds are over: Serve or Ray does not end."""

    def give_up() -> None:
        typer.echo(f"loray: Ray Serve has not ended in {seconds:g} s: its processes are killed")
        os._exit(1)  # What Ray started here ends with this process.

    timer = threading.Timer(seconds, give_up)
    timer.daemon = True
    timer.start()


def _status(process: int) -> tuple[str, str, int]:
    """Name, state and parent of a process; empty if it has ended."""
    with suppress(OSError):
        # The name is in parentheses and may have any character.
        head, _, rest = Path(f"/proc/{process}/stat").read_text().rpartition(")")
        state, parent = rest.split()[:2]
        return head.partition("(")[2], state, int(parent)
    return "", "", 0
