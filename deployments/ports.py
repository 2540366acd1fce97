"""Whether a TCP port can be bound here, and if not, which process listens on it."""

import errno
import os
import socket
from collections.abc import Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

_LISTENING = "0A"  # in the kernel's tables
_COMMAND_CHARACTERS = 100
_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")


class Port(NamedTuple):
    """A port that a server is about to listen on; host "" means all interfaces.

    setting: the setting that changes the number, for messages.
    """

    host: str
    number: int
    setting: str


def conflicts(ports: Sequence[Port]) -> list[str]:
    """A sentence for each port that cannot be bound, with what to change."""
    found = dict.fromkeys(_fault(port) for port in ports)
    for first, second in combinations(ports, 2):
        if first.number == second.number and first.number:
            found[
                f"port {first.number} would be bound twice: change {first.setting} or "
                f"{second.setting}"
            ] = None
    return [fault for fault in found if fault]


def _fault(port: Port) -> str:
    """Why a server that sets SO_REUSEADDR, as all do, could not listen there; "" if it could."""
    family = socket.AF_INET6 if ":" in port.host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((port.host, port.number))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                by = _by(port.number)
                return f"port {port.number} is in use{by}: end that, or set {port.setting}"
            if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
                return f"{port.host} is no address of this machine: set http_options.host"
            return f"port {port.number} cannot be bound ({error.strerror}): set {port.setting}"
    return ""


def _by(number: int) -> str:
    """Which process of this user listens on the port; "" if that is not known."""
    inodes = set(_listeners(number))
    for process in Path("/proc").glob("[0-9]*") if inodes else ():
        with suppress(OSError):  # another user's process, or it has just ended
            if any(os.readlink(file) in inodes for file in (process / "fd").iterdir()):
                words = (process / "cmdline").read_bytes().replace(b"\0", b" ")
                command = words.decode(errors="replace").strip()[:_COMMAND_CHARACTERS]
                return f" by process {process.name} ({command})"
    return ""


def _listeners(number: int) -> list[str]:
    """The sockets that listen on the port, as links of open files show them."""
    found = []
    for table in _TABLES:
        with suppress(OSError):
            for line in Path(table).read_text().splitlines()[1:]:
                cells = line.split()
                if cells[3] == _LISTENING and int(cells[1].rpartition(":")[2], 16) == number:
                    found.append(f"socket:[{cells[9]}]")
    return found
