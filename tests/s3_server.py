"""S3 on this machine: a real server process (moto's), and a proxy before it that makes faults."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler

import httpx

from tests.local_server import PATIENCE_S, LocalServer


@contextmanager
def s3_server() -> Iterator[str]:
    """moto's server on a port that the system chooses; its address."""
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        lines = iter(process.stderr.readline, "")
        url = next(m.group(0) for line in lines if (m := re.search(r"http://[\d.:]+", line)))
        drain = threading.Thread(target=process.stderr.read, daemon=True)
        drain.start()
        try:
            yield url
        finally:
            process.terminate()
            drain.join()


class FaultyS3(LocalServer):
    """`with FaultyS3(url) as proxy` forwards to a server.

    faults: statuses that answer the next requests instead. listings: bodies that do, with 200.
    cuts: so many bytes of a file go out, then the connection breaks, once for each entry. ranges:
    the range of each request.
    """

    def __init__(self, target: str) -> None:
        super().__init__(_Handler)
        self.target = target
        self.faults: list[int] = []
        self.listings: list[bytes] = []
        self.cuts: list[int] = []
        self.ranges: list[str | None] = []


class _Handler(BaseHTTPRequestHandler):
    owner: FaultyS3

    def do_HEAD(self) -> None:
        wanted = {"authorization": self.headers["authorization"]}
        answer = httpx.head(f"{self.owner.target}{self.path}", headers=wanted, timeout=PATIENCE_S)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.owner.ranges.append(self.headers["Range"])
        if self.owner.faults:
            self.send_response(self.owner.faults.pop(0))
            self.end_headers()
            return
        if self.owner.listings:
            self.send_response(200)
            self.end_headers()
            self.wfile.write(self.owner.listings.pop(0))
            return
        is_file = "list-type" not in self.path
        cut = self.owner.cuts.pop(0) if self.owner.cuts and is_file else None
        if is_file:
            self.owner.gate.wait(PATIENCE_S)
        passed_on = ("range", "if-match", "authorization")
        wanted = {k: v for k, v in self.headers.items() if k.lower() in passed_on}
        answer = httpx.get(f"{self.owner.target}{self.path}", headers=wanted, timeout=PATIENCE_S)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was given up
            self.wfile.write(answer.content[:cut])

    def log_message(self, *_: object) -> None:
        pass
