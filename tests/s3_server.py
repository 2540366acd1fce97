"""S3 on this machine: a real server process (moto's), and a proxy before it that makes faults."""

import contextlib
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx

_PATIENCE_S = 600.0


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


class FaultyS3:
    """`with FaultyS3(url) as proxy` forwards to a server.

    faults: statuses that answer the next requests instead. cuts: so many bytes of a file go out,
    then the connection breaks, once for each entry. ranges: the range of each request. gate: files
    wait for it.
    """

    def __init__(self, target: str) -> None:
        self.target = target
        self.faults: list[int] = []
        self.cuts: list[int] = []
        self.ranges: list[str | None] = []
        self.gate = threading.Event()
        self.gate.set()
        proxy = self

        class Handler(_Handler):
            """Bound to this proxy."""

            s3 = proxy

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> "FaultyS3":
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Handler(BaseHTTPRequestHandler):
    s3: FaultyS3

    def do_HEAD(self) -> None:
        wanted = {"authorization": self.headers["authorization"]}
        answer = httpx.head(f"{self.s3.target}{self.path}", headers=wanted, timeout=_PATIENCE_S)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            self.send_header(name, value)
        self.end_headers()

    def do_GET(self) -> None:
        self.s3.ranges.append(self.headers["Range"])
        if self.s3.faults:
            self.send_response(self.s3.faults.pop(0))
            self.end_headers()
            return
        is_file = "list-type" not in self.path
        cut = self.s3.cuts.pop(0) if self.s3.cuts and is_file else None
        if is_file:
            self.s3.gate.wait(_PATIENCE_S)
        passed_on = ("range", "if-match", "authorization")
        wanted = {k: v for k, v in self.headers.items() if k.lower() in passed_on}
        answer = httpx.get(f"{self.s3.target}{self.path}", headers=wanted, timeout=_PATIENCE_S)
        self.send_response(answer.status_code)
        for name, value in answer.headers.items():
            if name.lower() not in ("connection", "transfer-encoding", "date", "server"):
                self.send_header(name, value)
        self.end_headers()
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # it was given up
            self.wfile.write(answer.content[:cut])

    def log_message(self, *_: object) -> None:
        pass
