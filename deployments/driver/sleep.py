"""Sleep and wake of one replica: its ranks end and give the device's memory back, and start again.

Trainers that share the GPU call it between their steps. What the driver knows survives: names,
pins, shares, pushed files, and requests that wait.
"""

import asyncio
from typing import Protocol

from configs.engine import SleepingRequests
from deployments.contract import (
    AdapterReport,
    Completion,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
)
from deployments.driver.loop_handle import LoopFailed, LoopHandle
from deployments.driver.streaming.streams import refusal, unavailable
from deployments.engine_commands import SleepEngine, WakeEngine

_ASLEEP = "the server sleeps until POST /wake_up: send the request again later"
_LATE = (
    "a sleep or wake_up that is {:.1f} s younger is in force: a clock was set back, or the nodes' "
    "clocks differ; send it again after that time"
)
_ON_ITS_WAY_NS = 1_000_000_000
"""How late a command may come that was sent before another one."""

_FULL = "{} requests wait for the server to wake: send the request again later"


class RequestGenerator(Protocol):
    """Runs requests to their end (`RequestHandler`)."""

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run a request; cancelling this call ends it."""
        ...


class SleepGate:
    """Lets requests pass while the replica is awake; lives on its event loop.

    Else they are refused, or wait here, as the configuration says.
    """

    def __init__(
        self,
        generator: RequestGenerator,
        handle: LoopHandle,
        requests: SleepingRequests,
        max_waiting: int,
    ) -> None:
        """generator: what requests pass to. max_waiting: requests that may wait here."""
        self._generator = generator
        self._handle = handle
        self._requests = requests
        self._max_waiting = max_waiting
        self._num_waiting = 0
        self._open = asyncio.Event()
        self._open.set()
        self._closed = False
        self._sent_at = 0

    @property
    def asleep(self) -> bool:
        """Whether a sleep has begun or is about to."""
        return not self._open.is_set()

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run a request to its end; a failure is in its completion."""
        failure = None if self._open.is_set() else await self._wait()
        if failure is not None:
            return refusal(request, failure)
        return await self._generator.generate(request, reply_to)

    async def run(self, command: SleepEngine | WakeEngine) -> AdapterReport:
        """Execute a command; one that is older than the last one changes nothing.

        It fails if it is older by more than a command is on its way.
        """
        try:
            if isinstance(command, SleepEngine):
                fault = await self._fall_asleep(command)
            else:
                fault = await self._wake(command)
        except LoopFailed as error:
            fault = str(error)
        return AdapterReport("", failure=unavailable(fault) if fault else None)

    def close(self) -> None:
        """Refuse the requests that wait: the replica ends."""
        self._closed = True
        self._open.set()

    async def _fall_asleep(self, command: SleepEngine) -> str:
        if command.sent_at <= self._sent_at:
            return self._late(command.sent_at)
        self._sent_at = command.sent_at
        self._open.clear()
        return await self._handle.sleep(command.mode)

    async def _wake(self, command: WakeEngine) -> str:
        # A saved sleep that is gone is undone by a wake of its own time.
        if command.sent_at < self._sent_at:
            return self._late(command.sent_at)
        self._sent_at = command.sent_at
        fault = await self._handle.wake()
        if not fault:
            self._open.set()
        return fault

    def _late(self, sent_at: int) -> str:
        late = self._sent_at - sent_at
        return _LATE.format(late / 1e9) if late > _ON_ITS_WAY_NS else ""

    async def _wait(self) -> Failed | None:
        """Wait until the replica is awake; returns why the request cannot run, None if it can."""
        if self._requests is SleepingRequests.REFUSE:
            return unavailable(_ASLEEP)
        if self._num_waiting >= self._max_waiting:
            return Failed(ErrorKind.OVERLOADED, _FULL.format(self._num_waiting), 5.0)
        self._num_waiting += 1
        try:
            await self._open.wait()
        finally:
            self._num_waiting -= 1
        return unavailable("the server is shutting down") if self._closed else None
