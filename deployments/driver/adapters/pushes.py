"""Pushed adapters: the version that serves each name, replaced at once by the next push."""

import asyncio
from dataclasses import dataclass

from configs.wire.adapters import AdapterError, AdapterKey, AdapterReference
from deployments.contract import PushAdapter, PushedContent
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.adapters.staging import AdapterStaging
from deployments.driver.loop_handle import LoopHandle
from scheduler.events import AdapterUnloaded
from sources.pushed import PushedFiles, PushedSource, found


class LacksFiles(Exception):
    """This node does not have the files of a push."""


@dataclass(frozen=True)
class _Served:
    digest: str
    pushed_at: int
    key: AdapterKey


class PushedVersions:
    """The pushed names of one replica; lives on its event loop.

    The version that serves a name is held, so that its files stay in memory: ranks that start
    later stage them again.
    """

    def __init__(
        self,
        source: PushedSource,
        adapters: EngineAdapters,
        staging: AdapterStaging,
        handle: LoopHandle,
    ) -> None:
        self._source = source
        self._files = source.files
        self._adapters = adapters
        self._staging = staging
        self._handle = handle
        self._served: dict[AdapterReference, _Served] = {}
        self._lock = asyncio.Lock()

    async def push(self, command: PushAdapter) -> None:
        """Serve this version once all ranks have it; requests that run end on the one before.

        Raises AdapterError, and LacksFiles if this node does not have them. Then nothing changes.
        """
        async with self._lock:
            served = self._served.get(command.target)
            if served is None or served.pushed_at < command.pushed_at:
                await self._push(command, served)

    async def content(self, digest: str) -> PushedContent | None:
        """The files of a version, for another node; None if this node does not have them."""
        content = await asyncio.to_thread(self._files.content, digest)
        return None if content is None else PushedContent(*content)

    def forget(self, reference: AdapterReference) -> None:
        """Forget a name; its files are deleted when its last request has ended."""
        served = self._served.pop(reference, None)
        if served is not None:
            self._source.serve(reference.id, None)
            self._adapters.forget(reference)
            self._end(served)

    async def _push(self, command: PushAdapter, served: _Served | None) -> None:
        target = command.target
        await asyncio.to_thread(_hold, self._files, command)
        try:
            key = await self._adapters.directory.bring(found(target.id, command.digest))
        finally:
            # The directory holds them now.
            await asyncio.to_thread(self._files.release, command.digest)
        try:
            await self._staging.stage(key)
        except (AdapterError, asyncio.CancelledError):
            self._adapters.release(key)
            raise
        self._source.serve(target.id, command.digest)
        self._adapters.replace(target, key)
        self._served[target] = _Served(command.digest, command.pushed_at, key)
        if served is not None:
            self._end(served)

    def _end(self, served: _Served) -> None:
        """Drop a version from the ranks' memory, unless some name still stands for it."""
        key = served.key
        in_use = any(content == key for _, content in self._adapters.contents())
        if not in_use and not self._adapters.pins.is_pinned(key):
            self._handle.post(
                lambda scheduler, now: scheduler.handle_adapter_event(AdapterUnloaded(key))
            )
        self._adapters.release(key)


def _hold(files: PushedFiles, command: PushAdapter) -> None:
    """Hold the files of a push, written from the command if need be; else raise LacksFiles."""
    if files.hold(command.digest) is not None:
        return
    content = command.content
    if content is None:
        raise LacksFiles
    digest = files.store_content(command.name.id, content.config, content.weights)
    assert digest == command.digest, (digest, command.digest)
