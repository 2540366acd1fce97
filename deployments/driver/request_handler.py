"""Resolves the adapter of a request and runs the request over the version that serves now."""

import time

from msgspec.structs import replace

from configs.wire.adapters import AdapterError, AdapterReference
from deployments.contract import Completion, ErrorKind, Failed, GenerateRequest, ReplyAddress
from deployments.driver.adapters.aliases import Aliases
from deployments.driver.adapters.lifecycle import EngineAdapters
from deployments.driver.adapters.rate_limits import NamedRateLimits
from deployments.driver.adapters.report import AdapterReporter
from deployments.driver.adapters.tasks import AdapterTasks
from deployments.driver.loop_handle import LoopFailed, LoopHandle
from deployments.driver.request_runner import RequestRunner
from deployments.driver.streaming.streams import refusal, unavailable, unreadable
from deployments.driver.usage import AdapterUsage
from deployments.observability.adapter_records import LoadStage

_CHANGED = (
    "the engine that ran this request is gone, and the model or the adapter has changed since: "
    "send it again"
)


class RequestHandler:
    """Resolves the adapter of each request and runs it; lives on the replica's event loop."""

    def __init__(
        self,
        handle: LoopHandle,
        runner: RequestRunner,
        aliases: Aliases,
        adapters: EngineAdapters,
        rate_limits: NamedRateLimits,
        reporter: AdapterReporter,
        usage: AdapterUsage,
        tasks: AdapterTasks,
        model: str,
    ) -> None:
        """model: names the base model's content, for the origin of tokens."""
        self._model = model
        self._tasks = tasks
        self._handle = handle
        self._runner = runner
        self._aliases = aliases
        self._adapters = adapters
        self._rate_limits = rate_limits
        self._reporter = reporter
        self._usage = usage

    async def generate(self, request: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        """Run a request to its end; a failure is in its completion."""
        arrived = time.monotonic()
        if self._handle.failure is not None:
            return refusal(request, unavailable(self._handle.failure))
        if request.adapter is None:
            fault = self._tasks.base_fault(request)
            if fault is not None:
                return refusal(request, Failed(ErrorKind.VALIDATION, fault))
            if (failure := _moved(request, self._model)) is not None:
                return refusal(request, failure)
            return await self._runner.run(request, None, (), (), arrived, reply_to, self._model)
        try:
            target = self._aliases.resolve(request.adapter, request.allowed)
            return await self._run_adapted(request, target, arrived, reply_to)
        except AdapterError as error:
            return refusal(request, Failed(ErrorKind(error.refusal.value), error.message))
        except LoopFailed as error:
            return refusal(request, unavailable(str(error)))

    async def _run_adapted(
        self,
        request: GenerateRequest,
        reference: AdapterReference,
        arrived: float,
        reply_to: ReplyAddress,
    ) -> Completion:
        """Run over the version that serves now; its files are kept until the request ends."""
        assert request.adapter is not None, request
        resolved = replace(request, adapter=reference)
        while True:
            began = time.monotonic()
            key = await self._adapters.resolve(reference, request.api_token or False, request.payer)
            self._usage.stage_timed(LoadStage.FETCH, time.monotonic() - began)
            self._usage.used(reference, key)
            parts = self._adapters.directory.parts(key)
            fetched = self._adapters.directory.fetched(key)
            origin = f"{self._model}/{fetched.digest}"
            self._rate_limits.adapter_seen(reference, key, parts)
            self._reporter.requested(request.adapter)
            try:
                fault = await self._tasks.fault(request, key)
                if fault is not None:
                    return refusal(request, Failed(ErrorKind.VALIDATION, fault))
                if (failure := _moved(request, origin)) is not None:
                    return refusal(request, failure)
                completion = await self._runner.run(
                    resolved, key, parts, fetched.invocation, arrived, reply_to, origin
                )
            finally:
                self._adapters.release(key)
            # Files may vanish after `resolve`; another version may be servable.
            if not unreadable(completion) or not self._adapters.give_up(reference, key):
                return completion


def _moved(request: GenerateRequest, origin: str) -> Failed | None:
    """The failure of a request whose tokens another model or version generated; None for others."""
    if not request.origin or request.origin == origin:
        return None
    return unavailable(_CHANGED)
