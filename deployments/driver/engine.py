"""One driver without its shell: adapters made ready, requests admitted, streams ended.

Lives on the replica's event loop and speaks to the engine's loop thread by `post` and `emit`.
"""

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from configs.engine import EngineConfig
from configs.runtime import RuntimeConfig, with_runtime
from configs.wire.adapters import AdapterError, AdapterKey, AdapterReference
from configs.wire.plan import Capacity
from configs.wire.sampling import FinishReason
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterCommand,
    AdapterReport,
    Completion,
    EngineInfo,
    ErrorKind,
    Failed,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
)
from deployments.driver.adapters.control import AdapterControl
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.adapters.report import AdapterReporter
from deployments.driver.adapters.shares import NamedRateLimits
from deployments.driver.adapters.usage import AdapterUsage
from deployments.driver.description import common, read_json, startup_info, stop_token_ids
from deployments.driver.loop import EngineLoop, LoopSettings, RankGroup
from deployments.driver.routing.policy import ReplicaReport
from deployments.driver.streaming.early_submit import EarlySubmits
from deployments.driver.streaming.streams import Streams, refusal, unreadable
from deployments.frames import Finish, FrameSender
from deployments.observability.steps import StepLog
from deployments.observability.tracing import DRIVER, request_span
from deployments.rank.messages import LoadReport
from scheduler.admission.limits import InvalidRequest, Limits, Overloaded
from scheduler.events import AdapterArrived, Event
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from scheduler.snapshot import AdapterView, Snapshot
from sources.adapters import AdapterSources

T = TypeVar("T")


class DriverEngine:
    """Everything a driver replica does; `deployment.py` gives it a Serve shell."""

    def __init__(
        self, config: EngineConfig, folder: Path, group: RankGroup, replica: str = ""
    ) -> None:
        """`folder` holds the base model; `group` is not started yet; `replica`: Serve's id."""
        self._config = config
        self._folder = folder
        self._group = group
        self._directory = AdapterDirectory(AdapterSources(config.adapters), config.adapters)
        self._sender = FrameSender(self, replica)
        self._streams = Streams(self._sender)
        self.early_submits = EarlySubmits(self._generate, self._streams, self._drained)
        self._limits = config.limits
        self._adapters = EngineAdapters(
            config.adapters, self._directory, self._post, self._run_test
        )
        self._rate_limits = NamedRateLimits(config.adapters.default_source, self._post)
        self.usage = AdapterUsage(config.adapters.default_source)
        load_timeout_s = 2 * config.recovery.stage_timeout_s
        self._control = AdapterControl(
            self._adapters, self.usage, self._post, self.adapter_views, load_timeout_s
        )
        self._reporter = AdapterReporter(self._control.resolve_alias, self._adapters.serving)
        self.steps = StepLog()
        self._queries: set[asyncio.Future[Any]] = set()
        self._loop: EngineLoop | None = None

    async def start(self) -> None:
        """Start the ranks and the loop, then load what is to be there before the first request."""
        self._replica = replica = asyncio.get_running_loop()
        started = await replica.run_in_executor(None, self._group.start)
        capacity = common([report.capacity for report in started[1]])
        scheduler = Scheduler(Limits.from_config(self._config), capacity)
        settings = LoopSettings(
            recovery=self._config.recovery,
            fetched=self._directory.fetched,
            emit=lambda events: self._soon(self._on_events, events),
            fail=lambda message: self._soon(self._on_failure, message),
            applied=self.steps.record,
            loaded=self.usage.stage_timed,
        )
        self._loop = EngineLoop(scheduler, self._group, started, settings)
        self._loop.start()
        await self._adapters.preload()

    async def stop(self) -> None:
        """End the loop and the ranks; open requests end as unavailable."""
        end = self._loop.stop if self._loop is not None else self._group.stop
        await asyncio.get_running_loop().run_in_executor(None, end)
        self._on_failure("the server is shutting down")
        self._sender.close()
        self.early_submits.close()
        await self._adapters.close()

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
        return common([report.capacity for report in self.ranks])

    async def reconfigure(self, runtime: RuntimeConfig) -> None:
        """Apply an operator's settings in place, all or, where one cannot be applied, none.

        Raises ValueError, or AdapterError for a pin that cannot be had.
        """
        config = with_runtime(self._config, runtime)
        limits = Limits.from_config(config)
        await self._adapters.pin_only([self._adapters.read(t) for t in runtime.pinned_adapters])
        self._control.configure(runtime.names)
        self._rate_limits.configure(runtime, self._adapters.contents())
        self._limits = config.limits
        self._post(lambda scheduler, now: _reconfigured(scheduler, limits))

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end; a caller that goes away ends them within two steps."""
        with request_span(DRIVER, request) as span:
            return span.ended(await self.early_submits.call(request, reply_to))

    async def _generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        arrived = time.monotonic()
        if self.failure is not None:
            return refusal(request, Failed(ErrorKind.UNAVAILABLE, self.failure, 5.0))
        await self._sender.connect(reply_to)
        if request.adapter is None:
            return await self._run(request, None, arrived, reply_to)
        try:
            target = self._control.resolve_alias(request.adapter, request.allowed)
            return await self._run_adapted(request, target, arrived, reply_to)
        except AdapterError as error:
            return refusal(request, Failed(ErrorKind(error.refusal.value), error.message))

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """A stop string was matched in the ingress."""
        who, why = (request_id, index), FinishReason.STOP_STRING
        self._post(lambda scheduler, now: scheduler.finish(who, at, why))

    def on_finish(self, finish: Finish) -> None:
        """The same, by socket."""
        self._replica.create_task(self.finish(finish.request_id, finish.index, finish.at))

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        """A request by socket, ahead of its call."""
        self.early_submits.start(request, address)

    def on_withdraw(self, request_id: str) -> None:
        """Its call is not coming."""
        self.early_submits.withdraw(request_id)

    def on_room(self, address: ReplyAddress) -> None:
        """An ingress replica takes frames: what it was not sent yet goes first."""
        self._streams.resend(address)

    def on_lost(self, address: ReplyAddress) -> None:
        """An ingress replica is gone: nobody waits for its requests any more."""
        self.early_submits.ingress_lost(address)
        self._streams.abandon(address)

    async def snapshot(self) -> Snapshot:
        """The scheduler in numbers, taken between two steps; RuntimeError once the loop failed."""
        return await self._query(Scheduler.snapshot)

    async def adapter_views(self) -> Sequence[AdapterView]:
        """The scheduler's adapters, taken in the same way."""
        return await self._query(Scheduler.adapters)

    def report(self, views: Sequence[AdapterView], load: int) -> ReplicaReport:
        """What to tell routers, with the adapters as seen last and as many open requests."""
        ready = self.healthy and self.failure is None
        return self._reporter.report(views, self._adapters.pins, load, ready, time.monotonic())

    async def _drained(self) -> None:
        """Return when all that was posted until now is done, and its events are heard."""
        with contextlib.suppress(RuntimeError):  # the loop failed, and tells nothing any more
            await self._query(lambda scheduler: None)

    async def _query(self, look: Callable[[Scheduler], T]) -> T:
        """What `look` sees between two steps."""
        if self.failure is not None:
            raise RuntimeError(self.failure)
        taken: asyncio.Future[T] = self._replica.create_future()

        def take(scheduler: Scheduler, now: float) -> Sequence[Event]:
            self._soon(_deliver, taken, look(scheduler))
            return []

        self._queries.add(taken)
        self._post(take)
        try:
            return await taken
        finally:
            self._queries.discard(taken)

    async def adapters(self, command: AdapterCommand) -> AdapterReport:
        """Do what an operator asks about adapters."""
        if self.failure is not None:
            return AdapterReport("", failure=Failed(ErrorKind.UNAVAILABLE, self.failure, 5.0))
        return await self._control.run(command)

    @property
    def healthy(self) -> bool:
        """Whether the ranks serve; False while they are rebuilt."""
        return self._loop is not None and self._loop.healthy

    @property
    def num_rebuilds(self) -> int:
        """How often the ranks were made anew."""
        return self._loop.num_rebuilds if self._loop is not None else 0

    @property
    def num_overdue(self) -> int:
        """Requests that an adapter's last version served, for a look at it took too long."""
        return self._adapters.num_overdue

    @property
    def dropped_frames(self) -> int:
        """Token frames that could not go at once, for an ingress replica was slow or gone."""
        return self._streams.num_delayed

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """An adapter's own chat template, for those who may use the adapter."""
        try:
            target = self._control.resolve_alias(adapter, allowed)
            return await self._adapters.chat_template(target, api_token or False, payer)
        except AdapterError as error:
            return Failed(ErrorKind(error.refusal.value), error.message)

    async def describe(self) -> EngineInfo:
        """What is served, for validation and /info."""
        report, capacity = self.ranks[0], self._capacity
        limits, longest = self._limits, capacity.max_total_tokens
        return EngineInfo(
            model_id=self._config.model.id,
            model_name=self._config.model.served_name,
            model_revision=self._config.model.revision,
            tokenizer=str(self._folder),
            dtype=report.dtype,
            device=report.device,
            vocab_size=read_json(self._folder / "config.json")["vocab_size"],
            stop_token_ids=stop_token_ids(self._folder),
            max_total_tokens=longest,
            max_input_tokens=min(limits.max_input_tokens or longest - 1, longest - 1),
            max_batch_total_tokens=capacity.num_blocks * capacity.block_size,
            max_running=limits.max_running,
            max_queued=limits.max_queued,
            chosen=startup_info(self.ranks),
            adapters=await self._directory.listing(),
            healthy=self.healthy,
        )

    async def _run_adapted(
        self,
        request: GenerateRequest,
        reference: AdapterReference,
        arrived: float,
        reply_to: ReplyAddress,
    ) -> Completion:
        """Run over the version that serves now; its files are kept until the request ends."""
        assert request.adapter is not None, request
        meant = msgspec.structs.replace(request, adapter=reference)
        while True:
            began = time.monotonic()
            key = await self._adapters.resolve(reference, request.api_token or False, request.payer)
            self.usage.stage_timed("fetch", time.monotonic() - began)
            self.usage.used(reference, key)
            self._rate_limits.adapter_seen(reference, key, self._directory.parts(key))
            self._reporter.requested(request.adapter)
            try:
                completion = await self._run(meant, key, arrived, reply_to)
            finally:
                self._adapters.release(key)
            if not unreadable(completion) or not self._adapters.give_up(reference, key):
                return completion

    async def _run_test(
        self, request: GenerateRequest, key: AdapterKey
    ) -> Sequence[SequenceOutcome]:
        return (await self._run(request, key, time.monotonic(), None)).sequences

    async def _run(
        self,
        request: GenerateRequest,
        key: AdapterKey | None,
        arrived: float,
        reply_to: ReplyAddress | None,
    ) -> Completion:
        parts = () if key is None else tuple(dict.fromkeys(self._directory.parts(key)))
        own = key, arrived, parts, request.cache_salt
        sequences = [
            Request((request.id, i), s.prompt, s.sampling, s.stopping, *own)
            for i, s in enumerate(request.sequences)
        ]
        try:
            msgspec.msgpack.encode(request.sequences)
        except (OverflowError, UnicodeEncodeError) as error:
            # What cannot travel to the ranks would end the loop, and everybody's requests.
            return refusal(request, Failed(ErrorKind.VALIDATION, f"not a token request: {error}"))
        completion = self._streams.open(request, reply_to)
        if self.failure is not None:  # since this request was asked for
            self._on_failure(self.failure)
        try:
            self._post(lambda scheduler, now: self._admit(scheduler, sequences, now))
            ended = await completion
        finally:
            self._cancel(request.id)
        self.usage.finished(request, ended, time.monotonic() - arrived)
        return ended

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
            if isinstance(event, AdapterArrived):
                self._control.stage_finished(event)
            else:
                self._streams.take(event)
        self._streams.flush()

    def _on_failure(self, message: str) -> None:
        self._streams.fail_all(Failed(ErrorKind.UNAVAILABLE, message, 5.0))
        if self.failure is None:
            return
        for taken in self._queries:  # Nobody answers them any more.
            if not taken.done():
                taken.set_exception(RuntimeError(self.failure))


def _deliver(taken: "asyncio.Future[T]", seen: T) -> None:
    if not taken.done():
        taken.set_result(seen)


def _reconfigured(scheduler: Scheduler, limits: Limits) -> Sequence[Event]:
    scheduler.reconfigure(limits)
    return []
