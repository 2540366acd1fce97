"""Asks a served driver through its Serve handle, in a process of its own.

    python -m tests.end_to_end.ask RAY_ADDRESS

Standard input has a method's name a line; standard output has for each its answer, pickled behind
its length. Not in the tests' process, because Serve's router threads outlive `ray.shutdown`.
"""

import asyncio
import pickle
import struct
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_LENGTH = struct.Struct("<Q")
_MARK = b"ANSWER"
"""Begins each answer: Ray prints too."""


class Asker:
    """The process; it starts with the first question, for importing Ray takes seconds."""

    def __init__(self, address: str, environment: Mapping[str, str]) -> None:
        self._address = address
        self._environment = environment
        self._process: subprocess.Popen[bytes] | None = None

    def ask(self, method: str) -> Any:
        """The answer of a method of the driver, or of those in `answer`."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.end_to_end.ask", self._address],
                cwd=Path(__file__).resolve().parents[2],
                env=self._environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
            )
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(f"{method}\n".encode())
        process.stdin.flush()
        read = b""
        while not read.endswith(_MARK):
            byte = process.stdout.read(1)
            assert byte, f"{method}: the process that asks has ended"
            read += byte
        (size,) = _LENGTH.unpack(process.stdout.read(_LENGTH.size))
        found = pickle.loads(process.stdout.read(size))
        if isinstance(found, Exception):
            raise found
        return found

    def close(self) -> None:
        """End the process; the server may end afterwards."""
        process, self._process = self._process, None
        if process is not None:
            process.communicate()


async def answer(method: str) -> Any:
    """What the driver answers.

    "nodes": Ray's. "status": the application's. "deploy PATH": None, Serve has this yaml.
    """
    import ray
    from ray import serve

    if method.startswith("deploy "):
        return await asyncio.to_thread(deploy, method.removeprefix("deploy "))
    if method == "nodes":
        return ray.nodes()
    if method == "status":
        return serve.status().applications["loray"].status.value
    return await getattr(serve.get_deployment_handle("Driver", "loray"), method).remote()


def deploy(path: str) -> None:
    """`serve run --non-blocking PATH`, without the seconds in which a process imports Serve."""
    from ray.serve.scripts import run

    run.main(["--non-blocking", path], standalone_mode=False)


async def _answer_all() -> None:
    while line := await asyncio.to_thread(sys.stdin.readline):
        try:
            found = await answer(line.strip())
        except Exception as error:
            found = RuntimeError(repr(error))
        data = pickle.dumps(found)
        sys.stdout.buffer.write(_MARK + _LENGTH.pack(len(data)) + data)
        sys.stdout.flush()


if __name__ == "__main__":
    import ray

    ray.init(address=sys.argv[1], namespace="serve", log_to_driver=False, logging_level="error")
    asyncio.run(_answer_all())
