"""Changes of a name's content: the old version serves until the new one has generated a token."""

import asyncio
import logging
import time
import uuid
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

from configs.wire.adapters import AdapterKey, AdapterReference
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import Failed, GenerateRequest, SequenceRequest
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.adapters.pins import Pins
from deployments.driver.loop_handle import LoopHandle
from deployments.driver.request_runner import RequestRunner
from scheduler.adapters.resident import AdapterState

_IN_MEMORY = frozenset({AdapterState.HOST, AdapterState.LOADING, AdapterState.DEVICE})
_MAX_NAMES = 1 << 16
_RETRY_SECONDS = 30.0

logger = logging.getLogger("loray.driver.adapters")


@dataclass(frozen=True)
class _Change:
    newest: AdapterKey
    task: "asyncio.Task[None]"


class Versions:
    """The version that each name serves; lives on the replica's event loop.

    A version that cannot be served does not replace one that is; it is tried again after a while.
    """

    def __init__(
        self, directory: AdapterDirectory, pins: Pins, handle: LoopHandle, runner: RequestRunner
    ) -> None:
        self._directory = directory
        self._pins = pins
        self._handle = handle
        self._runner = runner
        self._current: OrderedDict[AdapterReference, AdapterKey] = OrderedDict()
        self._changes: dict[AdapterReference, _Change] = {}
        self._refused: OrderedDict[AdapterReference, tuple[AdapterKey, float]] = OrderedDict()

    def current(self, reference: AdapterReference) -> AdapterKey | None:
        """The version that serves the name now, if one was requested."""
        return self._current.get(reference)

    async def select(self, reference: AdapterReference, newest: AdapterKey) -> AdapterKey:
        """The version that serves a request now; the caller holds it instead of `newest`."""
        old = self._current.get(reference)
        if old is None or old == newest or not self._directory.hold(old):
            self._serve(reference, newest)
            return newest
        if reference not in self._changes and not self._is_refused(reference, newest):
            if not await self._is_in_memory(old, holds=(old, newest)):
                self._directory.release(old)
                if self._current.get(reference) == old:  # Another call may have changed it.
                    self._replace(reference, old, newest)
                return newest
            if reference not in self._changes:
                task = asyncio.create_task(self._change(reference, old, newest))
                self._changes[reference] = _Change(newest, task)
        self._directory.release(newest)
        return old

    async def last(self, reference: AdapterReference) -> AdapterKey | None:
        """The version that serves the name, held by the caller, if the ranks have it in memory."""
        key = self._current.get(reference)
        if key is None or not self._directory.hold(key):
            return None
        if await self._is_in_memory(key, holds=(key,)):
            return key
        self._directory.release(key)
        return None

    def give_up(self, reference: AdapterReference, key: AdapterKey) -> bool:
        """After a version could not be read: whether another one serves the name now."""
        change = self._changes.get(reference)
        if change is not None and self._current.get(reference) == key:
            self._replace(reference, key, change.newest)
        return self._current.get(reference) not in (None, key)

    async def test(self, reference: AdapterReference, key: AdapterKey) -> str | None:
        """Generate one token with a version; returns the fault, None if there is none."""
        one_token = SequenceRequest([0], Sampling(), Stopping(1))
        request = GenerateRequest(f"test-{uuid.uuid4().hex}", [one_token], reference)
        parts = self._directory.parts(key)
        # Active from the first token on, whatever invokes it: the test is of its weights.
        completion = await self._runner.run(request, key, parts, (), time.monotonic(), None)
        ending = completion.sequences[0].ending
        return ending.message if isinstance(ending, Failed) else None

    def replace(self, reference: AdapterReference, key: AdapterKey) -> None:
        """Serve a version from now on, which the ranks have in memory."""
        old = self._current.get(reference)
        if old is None:
            self._serve(reference, key)
        elif old != key:
            self._replace(reference, old, key)

    def forget(self, reference: AdapterReference) -> None:
        """Forget which version serves a name."""
        self._current.pop(reference, None)

    async def settle(self) -> None:
        """Wait until no name is changing its version."""
        await asyncio.gather(*(change.task for change in self._changes.values()))

    async def close(self) -> None:
        """Cancel all changes."""
        tasks = [change.task for change in self._changes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _is_in_memory(self, key: AdapterKey, holds: Sequence[AdapterKey]) -> bool:
        """Whether all ranks have the adapter, on the host or on the device.

        holds: the caller's, released if it is cancelled meanwhile.
        """
        try:
            state = await self._handle.ask(lambda scheduler: scheduler.adapter_states().get(key))
        except BaseException:
            for held in holds:
                self._directory.release(held)
            raise
        return state in _IN_MEMORY

    async def _change(
        self, reference: AdapterReference, old: AdapterKey, newest: AdapterKey
    ) -> None:
        held = self._directory.hold(newest)  # The caller's hold may end before the test does.
        try:
            fault = await self.test(reference, newest) if held else "it was forgotten"
            if fault is None:
                if self._current.get(reference) == old:
                    self._replace(reference, old, newest)
                logger.info("adapter %s serves its new version", reference.id)
            else:
                self._refuse(reference, newest)
                logger.warning(
                    "the new version of adapter %s cannot be served, the old one stays: %s",
                    reference.id,
                    fault,
                )
        finally:
            del self._changes[reference]
            if held:
                self._directory.release(newest)

    def _replace(self, reference: AdapterReference, old: AdapterKey, new: AdapterKey) -> None:
        self._serve(reference, new)
        self._pins.move(reference, old, new)

    def _serve(self, reference: AdapterReference, key: AdapterKey) -> None:
        self._current[reference] = key
        self._current.move_to_end(reference)
        self._refused.pop(reference, None)
        if len(self._current) > _MAX_NAMES:
            self._current.popitem(last=False)

    def _refuse(self, reference: AdapterReference, key: AdapterKey) -> None:
        until = asyncio.get_running_loop().time() + _RETRY_SECONDS
        self._refused[reference] = (key, until)
        if len(self._refused) > _MAX_NAMES:
            self._refused.popitem(last=False)

    def _is_refused(self, reference: AdapterReference, key: AdapterKey) -> bool:
        refused = self._refused.get(reference)
        now = asyncio.get_running_loop().time()
        return refused is not None and refused[0] == key and now < refused[1]
