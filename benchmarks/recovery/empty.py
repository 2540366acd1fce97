"""The start of an empty Serve application: what any other start on the machine takes at least.

python -m benchmarks.recovery.empty 8123
"""

import signal
import sys
from pathlib import Path

from benchmarks.table.server import TableServer, answers
from configs.env import export_throughput_mode

START_S = 120.0


class EmptyApplication:
    """Answers every request with nothing."""

    def __call__(self) -> str:
        """Return the answer."""
        return ""


def empty_start(folder: Path, port: int) -> float:
    """Seconds from the command to the first answer; folder: for its output."""
    command = [sys.executable, "-m", "benchmarks.recovery.empty", str(port)]
    server = TableServer(command, folder / "empty.log", f"http://127.0.0.1:{port}")
    try:
        return server.wait(answers, START_S).seconds
    finally:
        server.stop()


def main() -> None:
    """Serve until it is ended, with the front that `loray serve` has."""
    export_throughput_mode()
    import ray  # Ray reads the environment when it is imported, so not before the export.
    from ray import serve

    ray.init(include_dashboard=False, logging_level="warning")
    serve.start(http_options={"host": "127.0.0.1", "port": int(sys.argv[1])})
    serve.run(serve.deployment(EmptyApplication).bind())
    signal.pause()


if __name__ == "__main__":
    main()
