"""Checks constraints in processes (compile_process.py), two at a time, with a bounded queue."""

import msgspec

from deployments.contract import ErrorKind
from deployments.ingress.http.errors import RequestError
from deployments.ingress.processes.fair_queue import FairQueue, QueueFull
from deployments.ingress.processes.worker import WorkerProcess, python_command
from deployments.ingress.structured.compile_process import CompileResult, CompileTask

CPU_SECONDS = 2.0
"""CPU time in which a constraint must be converted, compiled, built and followed."""

_AT_ONCE = 2
_MAX_WAITING = 32
_BUSY = "too many new schemas and grammars are being compiled: try again"


class CompilePool:
    """Processes that have read one model's tokenizer; a process that fails is not used again."""

    def __init__(self, folder: str, vocab_size: int, cpu_seconds: float = CPU_SECONDS) -> None:
        module = "deployments.ingress.structured.compile_process"
        self._command = python_command(module, folder, vocab_size, cpu_seconds)
        self._queue = FairQueue(_MAX_WAITING, _MAX_WAITING, _AT_ONCE)
        self._idle: list[WorkerProcess] = []

    async def check(self, task: CompileTask) -> CompileResult:
        """Check a task in a process; RequestError if too many tasks wait already."""
        try:
            await self._queue.acquire(b"")
        except QueueFull as error:
            raise RequestError(ErrorKind.OVERLOADED, _BUSY) from error
        worker = self._idle.pop() if self._idle else WorkerProcess(self._command)
        try:
            reply = await worker.send(msgspec.msgpack.encode(task))
        except OSError as error:
            message = f"the compiler of schemas and grammars ended ({type(error).__name__})"
            raise RequestError(ErrorKind.UNAVAILABLE, message) from error
        else:
            # Before `release`, so that the next task finds this process and starts no other.
            self._idle.append(worker)
        finally:
            self._queue.release()
        return msgspec.msgpack.decode(reply, type=CompileResult)

    @property
    def pids(self) -> list[int]:
        """The idle processes."""
        return [worker.process.pid for worker in self._idle if worker.process is not None]

    async def close(self) -> None:
        """End the idle processes."""
        while self._idle:
            await self._idle.pop().close()
