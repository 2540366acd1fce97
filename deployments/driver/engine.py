"""One driver without its shell: adapters made ready, requests admitted, streams ended.

Lives on the replica's event loop and speaks to the engine's loop thread by `post` and `emit`.
"""

import asyncio
import contextlib
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import msgspec

from configs.adapters import AdapterError, AdapterKey, AdapterReference, parse_reference
from configs.engine import EngineConfig
from configs.runtime import RuntimeConfig
from configs.sampling import FinishReason, Sampling, Stopping
from deployments.contract import (
    Completion,
    EngineInfo,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
    SequenceRequest,
)
from deployments.driver.loop import EngineLoop, LoopSettings, RankGroup
from deployments.driver.readiness import AdapterDirectory
from deployments.driver.streams import Streams
from deployments.frames import Finish, FrameSender
from deployments.observability.steps import StepLog
from deployments.rank.messages import LoadReport
from scheduler.events import AdapterPinned, Event
from scheduler.plan import Capacity
from scheduler.policy import InvalidRequest, Limits, Overloaded
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.snapshot import Snapshot
from sharding.sources import AdapterSources

_NOWHERE = ReplyAddress("", 0, "")

logger = logging.getLogger("loray.driver")


class Engine:
    """Everything a driver replica does; `deployment.py` gives it a Serve shell."""

    def __init__(self, config: EngineConfig, folder: Path, group: RankGroup) -> None:
        """`folder` holds the base model; `group` is not started yet."""
        self._config = config
        self._folder = folder
        self._group = group
        self._directory = AdapterDirectory(AdapterSources(config.adapters))
        self._sender = FrameSender(self)
        self._streams = Streams(self._sender.send)
        self._limits = config.limits
        self._pins: set[AdapterKey] = set()
        self.steps = StepLog()
        self._loop: EngineLoop | None = None

    async def start(self) -> None:
        """Start the ranks and the loop, then load what is to be there before the first request."""
        self._replica = replica = asyncio.get_running_loop()
        started = await replica.run_in_executor(None, self._group.start)
        capacity = _common([report.capacity for report in started[1]])
        scheduler = Scheduler(Limits.from_config(self._config), capacity)
        settings = LoopSettings(
            recovery=self._config.recovery,
            fetched=self._directory.fetched,
            emit=lambda events: self._soon(self._on_events, events),
            fail=lambda message: self._soon(self._on_failure, message),
            applied=self.steps.record,
        )
        self._loop = EngineLoop(scheduler, self._group, started, settings)
        self._loop.start()
        await self._preload()

    async def stop(self) -> None:
        """End the loop and the ranks; open requests end as unavailable."""
        end = self._loop.stop if self._loop is not None else self._group.stop
        await asyncio.get_running_loop().run_in_executor(None, end)
        self._on_failure("the server is shutting down")
        self._sender.close()
        self._directory.close()

    @property
    def failure(self) -> str | None:
        """Why this replica cannot go on, if it cannot."""
        return self._loop.failure if self._loop is not None else "not started"

    @property
    def ranks(self) -> list[LoadReport]:
        """What each rank of the present group reported when it had loaded."""
        assert self._loop is not None, "start comes first"
        return self._loop.reports

    @property
    def _capacity(self) -> Capacity:
        """What every rank can hold: what requests are scheduled by, and clients are told."""
        return _common([report.capacity for report in self.ranks])

    async def reconfigure(self, runtime: RuntimeConfig) -> None:
        """Apply an operator's settings in place; AdapterError names a pin that cannot be had."""
        changes = {
            name: value
            for name in ("max_queued", "max_step_tokens")
            if (value := getattr(runtime, name)) is not None
        }
        changed = self._config.limits.model_copy(update=changes)
        config = EngineConfig.model_validate(
            {**self._config.model_dump(), "limits": changed.model_dump()}
        )
        limits = Limits.from_config(config)
        references = [self._reference(text) for text in runtime.pinned_adapters]
        pins = {await self._directory.resolve(reference, True) for reference in references}
        self._limits = config.limits
        self._post(lambda scheduler, now: _reconfigured(scheduler, limits))
        for key in self._pins - pins:
            self._pin(key, False)
        for key in pins - self._pins:
            self._pin(key, True)
        self._pins = pins

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end; a caller that goes away ends them within two steps."""
        arrived = time.monotonic()
        if self.failure is not None:
            return _refusal(request, Failed(ErrorKind.UNAVAILABLE, self.failure, 5.0))
        await self._sender.connect(reply_to)
        try:
            key = await self._resolve(request.adapter, request.api_token)
        except AdapterError as error:
            return _refusal(request, Failed(ErrorKind(error.refusal.value), error.message))
        return await self._run(request, key, arrived, reply_to)

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """A stop string was matched in the ingress."""
        self._post(
            lambda scheduler, now: scheduler.finish(
                (request_id, index), at, FinishReason.STOP_STRING
            )
        )

    def on_finish(self, finish: Finish) -> None:
        """The same, by socket."""
        self._replica.create_task(self.finish(finish.request_id, finish.index, finish.at))

    def on_lost(self, address: ReplyAddress) -> None:
        """An ingress replica is gone: nobody waits for its requests any more."""
        self._streams.abandon(address)

    async def snapshot(self) -> Snapshot:
        """The scheduler in numbers, taken between two steps; RuntimeError once the loop failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        taken: asyncio.Future[Snapshot] = self._replica.create_future()

        def take(scheduler: Scheduler, now: float) -> Sequence[Event]:
            self._soon(_deliver, taken, scheduler.snapshot())
            return []

        self._post(take)
        return await taken

    @property
    def healthy(self) -> bool:
        """Whether the ranks serve; False while they are rebuilt."""
        return self._loop is not None and self._loop.healthy

    @property
    def num_rebuilds(self) -> int:
        """How often the ranks were made anew."""
        return self._loop.num_rebuilds if self._loop is not None else 0

    @property
    def dropped_frames(self) -> int:
        """Token frames that were not sent because an ingress replica was slow or gone."""
        return self._sender.dropped_frames

    async def describe(self) -> EngineInfo:
        """What is served, for validation and /info."""
        report = self.ranks[0]
        capacity, limits = self._capacity, self._limits
        longest = capacity.max_total_tokens
        return EngineInfo(
            model_id=self._config.model.id,
            model_name=self._config.model.served_name,
            model_revision=self._config.model.revision,
            tokenizer=str(self._folder),
            dtype=report.dtype,
            device=report.device,
            vocab_size=_read_json(self._folder / "config.json")["vocab_size"],
            stop_token_ids=stop_token_ids(self._folder),
            max_total_tokens=longest,
            max_input_tokens=min(limits.max_input_tokens or longest - 1, longest - 1),
            max_batch_total_tokens=capacity.num_blocks * capacity.block_size,
            max_running=limits.max_running,
            max_queued=limits.max_queued,
            chosen=self._chosen(),
            adapters=self._directory.listing(),
            healthy=self.healthy,
        )

    def _chosen(self) -> dict[str, str]:
        """What start-up decided, in words."""
        first = self.ranks[0]
        pages = self._capacity
        adapters = f"{pages.adapter_pages} of 8 rank rows a projection, {pages.adapter_slots} slots"
        return {
            "device": f"{first.device} x {len(self.ranks)}, {first.dtype}",
            "attention": first.attention,
            "adapter kernel": first.adapter_kernel,
            "pages": f"{pages.num_blocks} of {pages.block_size} tokens",
            "adapter pages": adapters,
            "load": f"{max(report.load_seconds for report in self.ranks):.1f} s",
        }

    async def _resolve(
        self, reference: AdapterReference | None, api_token: str | None
    ) -> AdapterKey | None:
        if reference is None:
            return None
        return await self._directory.resolve(reference, api_token or False)

    async def _run(
        self,
        request: GenerateRequest,
        key: AdapterKey | None,
        arrived: float,
        reply_to: ReplyAddress,
    ) -> Completion:
        sequences = [
            Request((request.id, i), s.prompt, s.sampling, s.stopping, key, arrived)
            for i, s in enumerate(request.sequences)
        ]
        try:
            msgspec.msgpack.encode(request.sequences)
        except (OverflowError, UnicodeEncodeError) as error:
            # What cannot travel to the ranks would end the loop, and everybody's requests.
            return _refusal(request, Failed(ErrorKind.VALIDATION, f"not a token request: {error}"))
        completion = self._streams.open(request, reply_to)
        if self.failure is not None:  # since this request was asked for
            self._on_failure(self.failure)
        try:
            self._post(lambda scheduler, now: self._admit(scheduler, sequences, now))
            return await completion
        finally:
            self._cancel(request.id)

    async def _preload(self) -> None:
        """Pin the configured adapters and run a token through each; a bad one ends start-up."""
        adapters = self._config.adapters
        for text in adapters.preload:
            reference = self._reference(text)
            key = await self._directory.resolve(reference, True)
            self._pin(key, True)
            one_token = SequenceRequest([0], Sampling(), Stopping(1))
            trial = GenerateRequest(f"preload-{reference.id}", [one_token], reference)
            ending = (await self._run(trial, key, time.monotonic(), _NOWHERE)).sequences[0].ending
            if isinstance(ending, Failed):
                raise ValueError(f"adapters.preload: {text!r}: {ending.message}")
            logger.info("adapter %s is loaded", reference.id)

    def _reference(self, text: str) -> AdapterReference:
        return parse_reference(text, self._config.adapters.default_source)

    def _pin(self, key: AdapterKey, pinned: bool) -> None:
        self._post(lambda scheduler, now: scheduler.adapter(AdapterPinned(key, pinned), now))

    def _post(self, command: Callable[[Scheduler, float], Sequence[Event]]) -> None:
        assert self._loop is not None, "start comes first"
        self._loop.post(command)

    def _admit(
        self, scheduler: Scheduler, sequences: Sequence[Request], now: float
    ) -> Sequence[Event]:
        """Add all sequences of one HTTP request, or none; runs on the loop's thread."""
        try:
            for sequence in sequences:
                scheduler.add(sequence, now)
        except Overloaded as error:
            failure = Failed(ErrorKind.OVERLOADED, str(error), error.retry_after_s)
        except InvalidRequest as error:
            failure = Failed(ErrorKind.VALIDATION, str(error))
        else:
            return []
        request_id = sequences[0].id[0]
        self._soon(self._streams.fail, request_id, failure)
        return [event for sequence in sequences for event in scheduler.cancel(sequence.id)]

    def _cancel(self, request_id: str) -> None:
        """Forget a request; what still runs of it is cancelled."""
        open_ids = [(request_id, index) for index in self._streams.close(request_id)]
        if open_ids:
            self._post(lambda scheduler, now: [e for i in open_ids for e in scheduler.cancel(i)])

    def _soon(self, callback: Callable[..., None], *arguments: object) -> None:
        """Call back on the replica's event loop, from any thread; nothing once that is closed."""
        with contextlib.suppress(RuntimeError):
            self._replica.call_soon_threadsafe(callback, *arguments)

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            self._streams.take(event)
        self._streams.flush()

    def _on_failure(self, message: str) -> None:
        self._streams.fail_all(Failed(ErrorKind.UNAVAILABLE, message, 5.0))


def stop_token_ids(folder: Path) -> tuple[int, ...]:
    """End-of-sequence ids: generation_config.json's, else config.json's."""
    for name in ("generation_config.json", "config.json"):
        path = folder / name
        found = _read_json(path).get("eos_token_id") if path.is_file() else None
        if found is not None:
            return tuple(found) if isinstance(found, list) else (found,)
    return ()


def _deliver(taken: "asyncio.Future[Snapshot]", snapshot: Snapshot) -> None:
    if not taken.done():
        taken.set_result(snapshot)


def _reconfigured(scheduler: Scheduler, limits: Limits) -> Sequence[Event]:
    scheduler.reconfigure(limits)
    return []


def _common(capacities: Sequence[Capacity]) -> Capacity:
    """What every rank can hold."""
    return msgspec.structs.replace(
        capacities[0],
        num_blocks=min(c.num_blocks for c in capacities),
        adapter_pages=min(c.adapter_pages for c in capacities),
        adapter_slots=min(c.adapter_slots for c in capacities),
        host_bytes=min(c.host_bytes for c in capacities),
    )


def _refusal(request: GenerateRequest, failure: Failed) -> Completion:
    return Completion([SequenceOutcome([], failure) for _ in request.sequences])


def _read_json(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text())
    return content
