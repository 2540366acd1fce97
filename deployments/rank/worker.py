"""One rank's work: plans in, tokens out, adapters staged beside the steps. Knows no Ray.

Three kinds of thread: the reader drains the socket so that the driver never blocks on a rank
that computes; the main thread launches steps in the order of their plans; the reporter waits
for each step's tokens, so that the main thread may launch the next step meanwhile.
"""

import logging
import queue
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Protocol

import msgspec

from configs.adapters import (
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from deployments.rank.batch import forward_batch, step_result
from deployments.rank.messages import (
    Broken,
    Command,
    Report,
    Stage,
    Staged,
    StageFailed,
    Step,
    Stepped,
    Stop,
)
from deployments.rank.transport import Channel
from modeling.batch import ForwardBatch, StepOutput
from scheduler.plan import StepPlan

_STAGING_THREADS = 4

logger = logging.getLogger("loray.rank.worker")


class Runner(Protocol):
    """What a worker asks of a model runner (`modeling.runner.ModelRunner`)."""

    def step(self, batch: ForwardBatch) -> StepOutput:
        """Launch one step."""
        ...

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        """Read, check, cut and keep an adapter in host memory; AdapterError if it is refused."""
        ...

    def place(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> None:
        """Move a staged adapter to device pages, ordered before the next step."""
        ...

    def drop(self, key: AdapterKey) -> None:
        """Forget a host copy."""
        ...


@dataclass(frozen=True)
class _Launched:
    plan: StepPlan
    output: StepOutput
    started: float


class Worker:
    """Runs the plans of one driver on one runner until the driver says stop or hangs up."""

    def __init__(self, runner: Runner, rank: int, channel: Channel) -> None:
        """Bind a loaded runner to a connected channel."""
        self._runner = runner
        self._rank = rank
        self._channel = channel
        self._plans: queue.SimpleQueue[StepPlan | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()

    def run(self) -> None:
        """Work until the end of the stream; a step that raises is reported, then re-raised."""
        staging = ThreadPoolExecutor(_STAGING_THREADS, thread_name_prefix="stage")
        reader = threading.Thread(target=self._read, args=(staging,), name="reader", daemon=True)
        reporter = threading.Thread(target=self._report_steps, name="reporter", daemon=True)
        reader.start()
        reporter.start()
        try:
            while (plan := self._plans.get()) is not None:
                self._launch(plan)
        except Exception as error:
            # The group cannot go on after a failed step: ranks may wait in a collective.
            self._break(error)
            raise
        finally:
            self._launched.put(None)
            staging.shutdown(wait=False, cancel_futures=True)
            reporter.join(timeout=5.0)
            self._channel.close()

    def _launch(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        for fill in plan.fills:
            self._runner.place(fill.key, fill.slot, fill.pages)
        for key in plan.drops:
            self._runner.drop(key)
        self._launched.put(_Launched(plan, self._runner.step(forward_batch(plan)), started))

    def _read(self, staging: ThreadPoolExecutor) -> None:
        decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Step | Stage | Stop)
        while (frame := self._channel.receive()) is not None:
            command = decoder.decode(frame)
            if isinstance(command, Step):
                self._plans.put(command.plan)
            elif isinstance(command, Stage):
                staging.submit(self._stage, command.adapter)
            else:
                break
        self._plans.put(None)

    def _report_steps(self) -> None:
        while (launched := self._launched.get()) is not None:
            try:
                sampled = launched.output.wait()
            except Exception as error:
                # A kernel that failed shows only here; the main thread must not launch more.
                self._break(error)
                return
            if self._rank == 0:
                seconds = time.perf_counter() - launched.started
                self._send(Stepped(step_result(launched.plan, sampled, seconds)))

    def _stage(self, adapter: FetchedAdapter) -> None:
        try:
            shape = self._runner.stage(adapter)
        except AdapterError as error:
            self._send(StageFailed(self._rank, adapter.key, error.refusal, error.message))
        except Exception as error:
            # Whatever is wrong with one adapter's files must not hold up its requests for ever.
            logger.exception("staging adapter %s failed", adapter.name)
            message = f"adapter {adapter.name!r} could not be read: {error}"
            self._send(StageFailed(self._rank, adapter.key, AdapterRefusal.UNAVAILABLE, message))
        else:
            self._send(Staged(self._rank, adapter.key, shape))

    def _break(self, error: Exception) -> None:
        logger.exception("a step failed")
        self._send(Broken(self._rank, f"{type(error).__name__}: {error}"))
        self._plans.put(None)

    def _send(self, report: Report) -> None:
        try:
            self._channel.send(msgspec.msgpack.encode(report))
        except OSError:
            logger.info("the driver hung up")
            self._plans.put(None)
