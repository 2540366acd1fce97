"""One driver replica without Ray: makes its parts and connects them.

Lives on the replica's event loop; the engine loop has its own thread, reached by a handle. Each
part knows only parts that are made before it.
"""

import asyncio
import time
from collections.abc import Sequence
from pathlib import Path

from configs.architectures.select import end_token_ids, model_task, vocab_size
from configs.catalogue import merged
from configs.engine import EngineConfig
from configs.kv_groups import held_tokens
from configs.runtime import RuntimeConfig, with_runtime
from configs.sampling_defaults import SamplingDefaults, recommended_sampling
from configs.wire.adapters import AdapterError, AdapterReference
from configs.wire.tasks import TaskKind
from configs.wire.templates import TemplateSource
from deployments.contract import (
    AdapterInfo,
    AdapterReport,
    Completion,
    EngineInfo,
    EngineLoad,
    ErrorKind,
    Failed,
    GenerateRequest,
    PushedContent,
    ReplyAddress,
)
from deployments.driver.adapters.aliases import Aliases
from deployments.driver.adapters.catalogue import CatalogueWatcher
from deployments.driver.adapters.control import AdapterControl
from deployments.driver.adapters.directory import AdapterDirectory
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.adapters.pushes import PushedVersions
from deployments.driver.adapters.rate_limits import NamedRateLimits
from deployments.driver.adapters.report import AdapterReporter
from deployments.driver.adapters.staging import AdapterStaging
from deployments.driver.adapters.tasks import AdapterTasks
from deployments.driver.description import common, engine_load, model_name, startup_info
from deployments.driver.ingress_events import IngressDispatch
from deployments.driver.loop import EngineLoop
from deployments.driver.loop_handle import LoopHandle
from deployments.driver.loop_settings import LoopSettings
from deployments.driver.rank_start import RankGroup
from deployments.driver.request_handler import RequestHandler
from deployments.driver.request_runner import RequestRunner
from deployments.driver.routing.policy import ReplicaReport
from deployments.driver.sleep import SleepGate
from deployments.driver.streaming.connections import FrameSender, IngressConnections
from deployments.driver.streaming.early_submit import EarlySubmits
from deployments.driver.streaming.streams import Streams, unavailable
from deployments.driver.usage import AdapterUsage
from deployments.engine_commands import EngineCommand, SleepEngine, WakeEngine
from deployments.observability.steps import StepLog
from deployments.observability.tracing import DRIVER, request_span
from deployments.rank.messages import LoadReport
from scheduler.admission.limits import Limits
from scheduler.events import AdapterArrived, Event
from scheduler.scheduler import Scheduler
from scheduler.snapshot import AdapterView, Snapshot
from sources.adapters import AdapterSources


class DriverEngine:
    """A driver replica; `deployment.py` makes it a Serve deployment.

    usage: how requests used each adapter.
    early_submits: requests that run before their calls arrive.
    steps: the last steps of the ranks.
    """

    def __init__(
        self, config: EngineConfig, folder: Path, group: RankGroup, replica: str = ""
    ) -> None:
        """folder: the base model's. group: not started yet. replica: Serve's unique id."""
        self._config = config
        self._limits = config.limits
        self._folder = folder
        self._group = group
        self._handle = handle = LoopHandle()
        self.usage = AdapterUsage(config.adapters.default_source)
        self.steps = StepLog()
        sender = FrameSender()
        self._streams = Streams(sender)
        self._runner = RequestRunner(handle, self._streams, self.usage)
        sources = AdapterSources(config.adapters)
        self._directory = AdapterDirectory(sources, config.adapters)
        self._aliases = Aliases()
        self._adapters = EngineAdapters(config.adapters, self._directory, handle, self._runner)
        self._rate_limits = NamedRateLimits(config.adapters.default_source, handle)
        self._reporter = AdapterReporter(self._aliases, self._adapters)
        self._staging = AdapterStaging(handle, 2 * config.recovery.stage_timeout_s)
        self._pushes = PushedVersions(sources.pushed, self._adapters, self._staging, handle)
        self._control = AdapterControl(
            self._aliases, self._adapters, self.usage, handle, self._staging, self._pushes
        )
        self._runtime = self._catalogue = RuntimeConfig()
        # Else the older of two changes that fetch pins might be the last one to be applied.
        self._applying = asyncio.Lock()
        self._watcher = self._watcher_of(sources)
        requests = RequestHandler(
            handle,
            self._runner,
            self._aliases,
            self._adapters,
            self._rate_limits,
            self._reporter,
            self.usage,
            AdapterTasks(folder, self._directory),
            model_name(config.model, folder),
        )
        waiting = config.limits.max_queued
        self._gate = SleepGate(requests, handle, config.sleep.requests, waiting)
        self.early_submits = EarlySubmits(self._gate, self._streams, handle)
        events = IngressDispatch(self._runner, self.early_submits, self._streams)
        self._connections = IngressConnections(sender, events, replica)

    def _watcher_of(self, sources: AdapterSources) -> CatalogueWatcher | None:
        if self._config.adapters.catalogue is None:
            return None
        adapters, execute = self._adapters, self._control.run
        return CatalogueWatcher(sources.catalogue, adapters, self._take_catalogue, execute)

    async def start(self) -> None:
        """Start the ranks and the loop, then load the preloaded adapters."""
        self._handle.listen()
        started = await asyncio.get_running_loop().run_in_executor(None, self._group.start)
        capacity = common([report.capacity for report in started[1]])
        scheduler = Scheduler(Limits.from_config(self._config), capacity)
        call_soon = self._handle.call_soon
        settings = LoopSettings(
            recovery=self._config.recovery,
            fetched=self._directory.fetched,
            emit=lambda events: call_soon(self._on_events, events),
            fail=lambda message: call_soon(self._on_failure, message),
            applied=self.steps.record,
            loaded=self.usage.stage_timed,
        )
        self._handle.start(EngineLoop(scheduler, self._group, started, settings))
        if self._watcher is not None:
            await self._watcher.look()
        await self._adapters.preload()

    async def stop(self) -> None:
        """End the loop and the ranks; open requests end as unavailable."""
        self._gate.close()
        end = self._handle.stop if self._handle.started else self._group.release
        await asyncio.get_running_loop().run_in_executor(None, end)
        # Only now: the loop has ended, so no event can follow.
        self._on_failure("the server is shutting down")
        self._connections.close()
        self.early_submits.close()
        await self._adapters.close()

    @property
    def failure(self) -> str | None:
        """Why this replica cannot serve any more; None while it can."""
        return self._handle.failure

    @property
    def healthy(self) -> bool:
        """Whether the ranks serve, or sleep; False while lost ones are replaced."""
        return self._handle.started and self._handle.loop.healthy

    @property
    def asleep(self) -> bool:
        """Whether the ranks have ended until they are woken."""
        return self._handle.asleep

    @property
    def ranks(self) -> list[LoadReport]:
        """The load reports of the present ranks."""
        return self._handle.loop.reports

    @property
    def max_running(self) -> int:
        """Batch slots."""
        return self._limits.max_running

    @property
    def num_rebuilds(self) -> int:
        """How often lost ranks were replaced."""
        return self._handle.loop.num_rebuilds if self._handle.started else 0

    @property
    def num_overdue(self) -> int:
        """Requests that an adapter's last version served because its present one was not known."""
        return self._adapters.num_overdue

    @property
    def dropped_frames(self) -> int:
        """Token frames that were not sent at once: the ingress replica was slow or gone."""
        return self._streams.num_delayed

    async def reconfigure(self, runtime: RuntimeConfig) -> None:
        """Apply an operator's settings without a restart: all of them, or none.

        Raises ValueError, or AdapterError for a pin that cannot be fetched.
        """
        async with self._applying:
            await self._apply(runtime, self._catalogue)
            self._runtime = runtime

    async def watch_catalogue(self) -> None:
        """Follow the catalogue until it is cancelled; returns at once without one."""
        if self._watcher is not None and self._config.adapters.catalogue is not None:
            await self._watcher.watch(self._config.adapters.catalogue.interval_s)

    async def _take_catalogue(self, catalogue: RuntimeConfig) -> None:
        async with self._applying:
            await self._apply(self._runtime, catalogue)
            self._catalogue = catalogue

    async def _apply(self, operator: RuntimeConfig, catalogue: RuntimeConfig) -> None:
        runtime = merged(operator, catalogue)
        config = with_runtime(self._config, runtime)
        limits = Limits.from_config(config)
        await self._adapters.pin_only([self._adapters.read(t) for t in runtime.pinned_adapters])
        self._control.configure(runtime.names)
        self._rate_limits.configure(runtime, self._adapters.contents())
        self._limits = config.limits
        self._handle.post(lambda scheduler, now: scheduler.reconfigure(limits))

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run all sequences to their end; cancelling this call ends them within two steps."""
        with request_span(DRIVER, request) as span:
            await self._connections.connect(reply_to)
            return span.ended(await self.early_submits.call(request, reply_to))

    async def finish(self, request_id: str, index: int, at: int) -> None:
        """End a sequence after `at` generated tokens: the ingress matched a stop string."""
        self._runner.finish(request_id, index, at)

    async def adapters(self, command: EngineCommand) -> AdapterReport:
        """Execute an admin command: about adapters, or to sleep or wake."""
        if self.failure is not None:
            return AdapterReport("", failure=unavailable(self.failure))
        if isinstance(command, SleepEngine | WakeEngine):
            return await self._gate.run(command)
        return await self._control.run(command)

    async def pushed_content(self, digest: str) -> PushedContent | None:
        """The files of a pushed version, for another node; None if this node lacks them."""
        return await self._pushes.content(digest)

    async def chat_template(
        self,
        adapter: AdapterReference,
        api_token: str | None,
        allowed: tuple[str, ...] | None = None,
        payer: str = "",
    ) -> TemplateSource | Failed:
        """An adapter's own chat template; Failed for a caller that may not use the adapter."""
        try:
            target = self._aliases.resolve(adapter, allowed)
            return await self._adapters.chat_template(target, api_token or False, payer)
        except AdapterError as error:
            return Failed(ErrorKind(error.refusal.value), error.message)

    async def snapshot(self) -> Snapshot:
        """The scheduler's numbers, between two steps; LoopFailed once the loop failed."""
        return await self._handle.ask(Scheduler.snapshot)

    async def adapter_views(self) -> Sequence[AdapterView]:
        """The scheduler's adapters, between two steps; LoopFailed once the loop failed."""
        return await self._handle.ask(Scheduler.adapters)

    def report(self, views: Sequence[AdapterView], load: int) -> ReplicaReport:
        """This replica's report to routers.

        views: adapters, as seen last. load: open requests.
        """
        ready = self.healthy and self.failure is None and not self._gate.asleep
        pinned = self._adapters.pins.names
        return self._reporter.report(views, pinned, load, ready, time.monotonic())

    async def load(self) -> EngineLoad:
        """What this replica has to do now; LoopFailed once the loop failed."""
        snapshot, views = await self.snapshot(), await self.adapter_views()
        named = self._reporter.named(views, self._adapters.pins.names)
        labels = {name: self.usage.label(name) for name in named}
        adapters = {
            label if name.revision is None else f"{label}@{name.revision}": named[name]
            for name, label in labels.items()
        }
        return engine_load(self._config, snapshot, adapters, self._handle.asleep)

    async def describe(self) -> EngineInfo:
        """What is served, for validation and /info."""
        task = model_task(self._folder)
        report, capacity = self.ranks[0], common([report.capacity for report in self.ranks])
        limits, longest = self._limits, capacity.longest_sequence
        # A prompt leaves room for one token, where tokens are generated.
        room = longest - int(task.task is TaskKind.GENERATE)
        sampling = self._sampling_defaults()
        said = ", ".join(f"{name} {value}" for name, value in sampling.items())
        return EngineInfo(
            model_id=self._config.model.id,
            model_name=self._config.model.served_name,
            model_revision=self._config.model.revision,
            tokenizer=str(self._folder),
            dtype=report.dtype,
            device=report.device,
            vocab_size=vocab_size(self._folder),
            stop_token_ids=end_token_ids(self._folder),
            max_total_tokens=longest,
            max_input_tokens=min(limits.max_input_tokens or room, room),
            max_batch_total_tokens=held_tokens(capacity.groups, capacity.num_blocks),
            max_running=limits.max_running,
            max_queued=limits.max_queued,
            startup_info={
                "task": task.task.value,
                **({"sampling defaults": said} if said else {}),
                **startup_info(self.ranks, self._config.speculation),
            },
            adapters=await self._listing(),
            healthy=self.healthy,
            task=task,
            sampling_defaults=sampling,
            asleep=self._gate.asleep,
        )

    def _sampling_defaults(self) -> dict[str, float]:
        if self._config.model.sampling_defaults is SamplingDefaults.OPENAI:
            return {}
        return recommended_sampling(self._folder)

    async def _listing(self) -> list[AdapterInfo]:
        """Every adapter by its own name, then the names that were given to others."""
        if not self._config.adapters.enabled:
            return []
        return self._aliases.listed(await self._directory.listing())

    def _on_events(self, events: Sequence[Event]) -> None:
        for event in events:
            if isinstance(event, AdapterArrived):
                self._staging.finished(event)
            else:
                self._streams.take(event)
        self._streams.flush()

    def _on_failure(self, message: str) -> None:
        self._streams.fail_all(unavailable(message))
        self._handle.fail_queries()
