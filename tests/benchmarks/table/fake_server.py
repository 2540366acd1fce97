"""Another OpenAI-compatible server, with what the table needs: a process with a closed list.

    python -m tests.benchmarks.table.fake_server --port 8123 --models base a0=/some/folder

Answers stream as many tokens as requested. A prompt that it has seen counts as cached, so
tests can see whether prompts repeat. `--die` ends it before it listens.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Handler(BaseHTTPRequestHandler):
    """One connection; `models` are those that it serves, `seen` the prompts so far."""

    protocol_version = "HTTP/1.1"

    def __init__(self, models: frozenset[str], seen: set[str], *rest: Any) -> None:
        self.models, self.seen = models, seen
        super().__init__(*rest)

    def do_GET(self) -> None:
        bodies: dict[str, dict[str, Any]] = {
            "/v1/models": {"data": [{"id": name} for name in sorted(self.models)]},
            "/version": {"version": "1.2.3"},
        }
        self._whole(200, bodies[self.path])

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if body["model"] not in self.models:
            self._whole(404, {"error": f"no model {body['model']}"})
            return
        words = body["prompt"].split()
        cached = len(words) if body["prompt"] in self.seen else 0
        self.seen.add(body["prompt"])
        usage = {
            "completion_tokens": body["max_tokens"],
            "prompt_tokens_details": {"cached_tokens": cached},
        }
        self.send_response(200)
        self.send_header("connection", "close")
        self.end_headers()
        for _ in range(body["max_tokens"]):
            self._event({"choices": [{"text": "t1 "}]})
        self._event({"choices": [], "usage": usage})
        self.wfile.write(b"data: [DONE]\n\n")

    def _event(self, data: dict[str, Any]) -> None:
        self.wfile.write(f"data: {json.dumps(data)}\n\n".encode())
        self.wfile.flush()

    def _whole(self, status: int, data: dict[str, Any]) -> None:
        content = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        """Say nothing."""


class Listener(ThreadingHTTPServer):
    request_queue_size = 256


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--models", nargs="*", default=[])
    parser.add_argument("--die", action="store_true")
    parsed = parser.parse_args(arguments)
    if parsed.die:
        sys.exit("there is no GPU for this server")
    names = frozenset(["base", *(model.partition("=")[0] for model in parsed.models)])
    handler = partial(Handler, names, set())
    try:
        Listener(("127.0.0.1", parsed.port), handler).serve_forever()
    except KeyboardInterrupt:
        sys.exit(0)


if __name__ == "__main__":
    main()
