"""An HTTP server of a test: threads of this process, on a port that the system chooses."""

import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Self

PATIENCE_S = 600.0
"""How long a held file waits."""


class LocalServer:
    """`with` runs it; handlers find it as `self.owner`. gate: files wait for it."""

    def __init__(self, handler: type[BaseHTTPRequestHandler]) -> None:
        self.gate = threading.Event()
        self.gate.set()
        own = type("Handler", (handler,), {"owner": self})
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), own)
        self._server.daemon_threads = True
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._server.server_port}"

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.gate.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
