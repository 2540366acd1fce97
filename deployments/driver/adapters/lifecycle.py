"""An engine's adapters: names to the versions that serve them, pins, what is there at start."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Awaitable, Callable, Sequence
from functools import partial
from pathlib import Path

from configs.engine import AdaptersConfig
from configs.wire.adapters import (
    AdapterError,
    AdapterKey,
    AdapterReference,
    AdapterRefusal,
    parse_reference,
)
from configs.wire.sampling import Sampling, Stopping
from configs.wire.templates import TemplateSource, read_template
from deployments.contract import Failed, GenerateRequest, SequenceOutcome, SequenceRequest
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.adapters.lookups import Overdue
from deployments.driver.adapters.versions import Versions
from deployments.driver.loop import Command
from scheduler.adapters.resident import AdapterState
from scheduler.events import AdapterPinned, Event
from scheduler.scheduler import Scheduler
from sources.base import Token

_IN_MEMORY = frozenset({AdapterState.HOST, AdapterState.LOADING, AdapterState.DEVICE})

_SAY_EVERY_S = 10.0

Run = Callable[[GenerateRequest, AdapterKey], Awaitable[Sequence[SequenceOutcome]]]
"""Runs a request over an adapter to its end."""

logger = logging.getLogger("loray.driver.adapters")


class EngineAdapters:
    """Between the directory of files and the scheduler; lives on the replica's event loop."""

    def __init__(
        self,
        config: AdaptersConfig,
        directory: AdapterDirectory,
        post: Callable[[Command], None],
        run: Run,
    ) -> None:
        """`post` reaches the scheduler.

        num_overdue: requests that were served by an adapter's last version, for what it is now was
        not known in time.
        """
        self.directory = directory
        self._config = config
        self._post = post
        self._run = run
        self._versions = Versions(directory, self)
        self._pins: dict[AdapterReference, AdapterKey] = {}
        self._preloaded: dict[AdapterReference, AdapterKey] = {}
        self.num_overdue = 0
        self._said_overdue = -_SAY_EVERY_S

    async def resolve(
        self, reference: AdapterReference, token: Token, payer: str | None = None
    ) -> AdapterKey:
        """The version that serves a request now, held until `release`; AdapterError if none.

        token: the caller's, False for none, True for the server's own. payer: whom a download is
        charged to, None for the operator, who pays none.
        """
        token = token or self._config.share_hub_token
        is_served = self._versions.current(reference) is not None
        try:
            patience_s = self._config.look_timeout_s if is_served else None
            newest = await self.directory.resolve(reference, token, patience_s, payer)
        except Overdue as overdue:
            last = await self._versions.last(reference)
            if last is not None:
                self._overdue(reference, overdue)
                return last
            if not overdue.goes_on:
                raise
            newest = await self.directory.resolve(reference, token, payer=payer)
        return await self._versions.choose(reference, newest)

    def _overdue(self, reference: AdapterReference, overdue: Overdue) -> None:
        """The last version serves a request: say so, at times."""
        self.num_overdue += 1
        now = asyncio.get_running_loop().time()
        if now - self._said_overdue >= _SAY_EVERY_S:
            self._said_overdue = now
            logger.warning(
                "the last version of adapter %s serves (%d requests over any until now): %s",
                reference.id,
                self.num_overdue,
                overdue.message,
            )

    def release(self, key: AdapterKey) -> None:
        """One holder less, once the scheduler has heard everything that was posted until now."""
        loop = asyncio.get_running_loop()

        def heard(scheduler: Scheduler, now: float) -> Sequence[Event]:
            _soon(loop, self.directory.release, key)
            return []

        self._post(heard)

    def give_up(self, reference: AdapterReference, key: AdapterKey) -> bool:
        """A version could not be read any more: whether there is another to serve instead."""
        return self._versions.give_up(reference, key)

    async def chat_template(
        self, reference: AdapterReference, token: Token, payer: str
    ) -> TemplateSource:
        """The adapter's own chat template; AdapterError for who may not use the adapter.

        A merge has none.
        """
        if reference.rule is not None:
            return TemplateSource()
        key = await self.resolve(reference, token, payer)
        try:
            folder = Path(self.directory.fetched(key).folder)
            look = partial(read_template, folder)
            return await self.directory.lookups.glance(("template", key), look)
        except (OSError, ValueError) as error:
            raise AdapterError(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {reference.id!r}: its chat template cannot be read: {error}",
            ) from error
        finally:
            self.release(key)

    def read(self, text: str) -> AdapterReference:
        """The reference that an operator wrote; ValueError if it names nothing."""
        return parse_reference(text, self._config.default_source)

    async def pin_only(self, references: Sequence[AdapterReference]) -> None:
        """Keep just these on the device; AdapterError, and no change, if one cannot be had."""
        pins: dict[AdapterReference, AdapterKey] = {}
        try:
            for reference in references:
                pins[reference] = await self.resolve(reference, True)
        except BaseException:
            for key in pins.values():
                self.release(key)
            raise
        before, self._pins = self._pins, pins
        for key in set(before.values()) - self._pinned:
            self.set_pin(key, False)
        for key in set(pins.values()) - set(before.values()):
            self.set_pin(key, True)
        for key in before.values():
            self.release(key)

    async def pin_name(self, reference: AdapterReference, token: Token = True) -> None:
        """Pin an adapter until `unkeep`, as one that was loaded at start; AdapterError if not.

        token: of whoever may read it, True for the server's own; not needed where it is pinned.
        """
        if reference in self._preloaded:
            return
        key = await self.resolve(reference, token)
        before = self._preloaded.get(reference)
        self._preloaded[reference] = key
        if key != before:
            self.set_pin(key, True)
        if before is not None:
            self._unpin_unless_needed(before)

    def unpin_name(self, reference: AdapterReference) -> None:
        """End such a pin; the operator's config may have another."""
        key = self._preloaded.pop(reference, None)
        if key is not None:
            self._unpin_unless_needed(key)

    def pinned_by_config(self, reference: AdapterReference) -> bool:
        """Whether the operator's config keeps it."""
        return reference in self._pins

    def is_pinned(self, key: AdapterKey) -> bool:
        """Whether any name keeps the content on the device."""
        return key in self._pinned

    def serving(self, reference: AdapterReference) -> AdapterKey | None:
        """The version that serves a name now, as far as it is known."""
        return self._versions.current(reference) or self.directory.find(reference)

    def contents(self) -> list[tuple[AdapterReference, AdapterKey]]:
        """Every name that is known, and the version that serves it."""
        served = [(name, self.serving(name)) for name in self.directory.names()]
        return [(name, key) for name, key in served if key is not None]

    def _unpin_unless_needed(self, key: AdapterKey) -> None:
        """One holder of a pinned content less."""
        if key not in self._pinned:
            self.set_pin(key, False)
        self.release(key)

    def set_pin(self, key: AdapterKey, pinned: bool) -> None:
        """Keep an adapter on the device, or no longer."""
        self._post(
            lambda scheduler, now: scheduler.handle_adapter_event(AdapterPinned(key, pinned))
        )

    async def preload(self) -> None:
        """Pin the configured adapters and run a token through each; a bad one ends start-up."""
        for text in self._config.preload:
            reference = self.read(text)
            key = await self.resolve(reference, True)
            self.set_pin(key, True)
            self._preloaded[reference] = key
            fault = await self.test_version(reference, key)
            if fault is not None:
                raise ValueError(f"adapters.preload: {text!r}: {fault}")
            logger.info("adapter %s is loaded", reference.id)

    async def test_version(self, reference: AdapterReference, key: AdapterKey) -> str | None:
        """Stage a version and run a token through it; what went wrong, None if nothing."""
        one_token = SequenceRequest([0], Sampling(), Stopping(1))
        trial = GenerateRequest(f"trial-{uuid.uuid4().hex}", [one_token], reference)
        ending = (await self._run(trial, key))[0].ending
        return ending.message if isinstance(ending, Failed) else None

    async def is_in_memory(self, key: AdapterKey) -> bool:
        """Whether the ranks hold the adapter."""
        loop = asyncio.get_running_loop()
        answer: asyncio.Future[bool] = loop.create_future()

        def ask(scheduler: Scheduler, now: float) -> Sequence[Event]:
            state = scheduler.adapter_states().get(key)
            _soon(loop, _resolve, answer, state in _IN_MEMORY)
            return []

        self._post(ask)
        return await answer

    def version_changed(
        self, reference: AdapterReference, old: AdapterKey, new: AdapterKey
    ) -> None:
        """Pins follow their name to the new version."""
        for pins in (self._pins, self._preloaded):
            if pins.get(reference) == old and self.directory.hold(new):
                pins[reference] = new
                self.set_pin(new, True)
                if old not in self._pinned:
                    self.set_pin(old, False)
                self.release(old)

    @property
    def pins(self) -> list[AdapterReference]:
        """The names whose contents are kept on the device."""
        return [*self._pins, *self._preloaded]

    @property
    def _pinned(self) -> set[AdapterKey]:
        return {*self._pins.values(), *self._preloaded.values()}

    async def settle(self) -> None:
        """Wait until no name is changing its version."""
        await self._versions.settle()

    async def close(self) -> None:
        """End what runs in the background."""
        await self._versions.close()
        self.directory.close()


def _resolve(answer: "asyncio.Future[bool]", value: bool) -> None:
    if not answer.done():
        answer.set_result(value)


def _soon(
    loop: asyncio.AbstractEventLoop, callback: Callable[..., None], *arguments: object
) -> None:
    """Call back on the replica's event loop; nothing once that is closed."""
    with contextlib.suppress(RuntimeError):
        loop.call_soon_threadsafe(callback, *arguments)
