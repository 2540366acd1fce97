"""A worker process that handles one request after another over its pipes."""

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from deployments.ingress.processes.forks import LENGTH

# Wall-clock time after which a process counts as hanging; slow work has CPU limits of its own.
_HANGING_S = 120.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])


def python_command(module: str, *arguments: object) -> tuple[str, ...]:
    """A command that runs `module.serve` with these arguments, as strings."""
    start = (
        f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
        f"from {module} import serve; serve(*sys.argv[1:])"
    )
    return (sys.executable, "-c", start, *map(str, arguments))


class WorkerProcess:
    """Starts with the first request. The caller sends one request at a time."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self.process: asyncio.subprocess.Process | None = None

    async def send(self, request: bytes) -> bytes:
        """Send a request; returns the reply, or raises OSError if the process ends or hangs."""
        try:
            async with asyncio.timeout(_HANGING_S):
                return await self._exchange(request)
        except BaseException as error:
            # Also when cancelled: the next reader would get the rest of this reply.
            await self.close()
            if isinstance(error, asyncio.IncompleteReadError):
                raise ConnectionError("it ended") from error
            raise

    async def close(self) -> None:
        """End the process; the next request starts another."""
        process, self.process = self.process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()

    async def _exchange(self, request: bytes) -> bytes:
        if self.process is None:
            pipe = asyncio.subprocess.PIPE
            self.process = await asyncio.create_subprocess_exec(
                *self._command, stdin=pipe, stdout=pipe
            )
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin is not None
        assert stdout is not None
        stdin.write(LENGTH.pack(len(request)) + request)
        await stdin.drain()
        (size,) = LENGTH.unpack(await stdout.readexactly(LENGTH.size))
        return await stdout.readexactly(size)
