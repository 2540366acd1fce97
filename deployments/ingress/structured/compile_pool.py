"""Has constraints tried in processes of their own (proofs.py): few at a time, and few who wait."""

import asyncio
import contextlib
import sys
from pathlib import Path

import msgspec

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError
from deployments.ingress.structured.compile_process import LENGTH, CompileResult, CompileTask

CPU_SECONDS = 2.0
"""What one constraint may take to be converted, compiled, built and tried."""

_AT_ONCE = 2
_MOST_WAITING = 32
# By the clock on the wall; for a process that hangs, not for one that is slow.
_HANGING_S = 120.0
_PACKAGE_ROOT = str(Path(__file__).resolve().parents[3])
_START = (
    f"import sys; sys.path.insert(0, {_PACKAGE_ROOT!r}); "
    "from deployments.ingress.structured.compile_process import serve; "
    "serve(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))"
)
_BUSY = "too many new schemas and grammars are being compiled: try again"


class CompilePool:
    """Processes that have one model's tokenizer; each is used again as long as it is well."""

    def __init__(self, folder: str, vocab_size: int, cpu_seconds: float = CPU_SECONDS) -> None:
        """Nothing runs yet."""
        self._arguments = (folder, str(vocab_size), str(cpu_seconds))
        self._room = asyncio.Semaphore(_AT_ONCE)
        self._idle: list[asyncio.subprocess.Process] = []
        self._num_asking = 0

    async def prove(self, claim: CompileTask) -> CompileResult:
        """What becomes of a claim; RequestError when too many wait already."""
        if self._num_asking >= _AT_ONCE + _MOST_WAITING:
            raise RequestError(ErrorKind.OVERLOADED, _BUSY)
        self._num_asking += 1
        try:
            async with self._room:
                return await self._ask(msgspec.msgpack.encode(claim))
        finally:
            self._num_asking -= 1

    @property
    def pids(self) -> list[int]:
        """The processes that have nothing to do."""
        return [process.pid for process in self._idle]

    async def close(self) -> None:
        """End the processes that have nothing to do."""
        while self._idle:
            await _end(self._idle.pop())

    async def _ask(self, asked: bytes) -> CompileResult:
        process = self._idle.pop() if self._idle else await self._start()
        done = False
        try:
            answer = await _exchange(process, asked)
            done = True
            return msgspec.msgpack.decode(answer, type=CompileResult)
        except (TimeoutError, asyncio.IncompleteReadError, ConnectionError) as error:
            message = f"the compiler of schemas and grammars ended ({type(error).__name__})"
            raise RequestError(ErrorKind.UNAVAILABLE, message) from error
        finally:
            if done:
                self._idle.append(process)
            else:  # Also when the server ends: half an answer would be the next one's.
                await _end(process)

    async def _start(self) -> asyncio.subprocess.Process:
        pipe = asyncio.subprocess.PIPE
        return await asyncio.create_subprocess_exec(
            sys.executable, "-c", _START, *self._arguments, stdin=pipe, stdout=pipe
        )


async def _exchange(process: asyncio.subprocess.Process, asked: bytes) -> bytes:
    assert process.stdin is not None
    assert process.stdout is not None
    async with asyncio.timeout(_HANGING_S):
        process.stdin.write(LENGTH.pack(len(asked)) + asked)
        await process.stdin.drain()
        (size,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
        return await process.stdout.readexactly(size)


async def _end(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        process.kill()
    await process.wait()
