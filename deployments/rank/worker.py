"""One rank's worker: runs plans, reports tokens, stages adapters beside the steps. Knows no Ray.

Threads:

* The reader drains the socket, so that the driver never blocks on a rank that computes.
* The main thread launches adapters' loads and steps, in the order of their plans.
* Two reporters wait, one for the steps' tokens, one for the loads' copies, so that the main thread
  may launch the next step meanwhile.
* Staging threads read adapters, several side by side; one more thread makes matchers.
"""

import contextlib
import logging
import queue
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from configs.wire.adapters import (
    AdapterDeferred,
    AdapterError,
    AdapterKey,
    AdapterNeedsSums,
    AdapterRefusal,
    FetchedAdapter,
)
from configs.wire.plan import StepPlan, StepResult
from deployments.rank.messages import (
    Command,
    Loaded,
    Prepare,
    Prepared,
    RankBroken,
    Recorded,
    RecordGraph,
    Report,
    RunStep,
    Stage,
    StageAnswer,
    Staged,
    StageDeferred,
    StageFailed,
    StageNeedsSums,
    StepDone,
)
from deployments.rank.staging_order import StageOrder, StagingTicket
from deployments.rank.transport import Channel
from modeling.batch import ForwardBatch, SampledTokens, StepOutput
from modeling.runner.base import PendingCopy, Runner

logger = logging.getLogger("loray.rank.worker")


@dataclass(frozen=True)
class _Launched:
    plan: StepPlan
    output: StepOutput
    started: float


class Worker:
    """Runs the plans of one driver on one runner until the driver says stop or disconnects."""

    def __init__(
        self, runner: Runner, rank: int, channel: Channel, staging_threads: int = 4
    ) -> None:
        self._runner = runner
        self._rank = rank
        self._channel = channel
        self._plans: queue.SimpleQueue[StepPlan | RecordGraph | None] = queue.SimpleQueue()
        self._launched: queue.SimpleQueue[_Launched | None] = queue.SimpleQueue()
        self._copies: queue.SimpleQueue[tuple[AdapterKey, PendingCopy] | None] = queue.SimpleQueue()
        self._staging_threads = staging_threads
        self._staging_order = StageOrder()

    def run(self) -> None:
        """Work until the end of the stream; a fault of a step is reported, then raised."""
        staging = ThreadPoolExecutor(self._staging_threads, thread_name_prefix="stage")
        making = ThreadPoolExecutor(1, thread_name_prefix="matchers")
        pools = (staging, making)
        reader = threading.Thread(target=self._read, args=pools, name="reader", daemon=True)
        reporters = [
            threading.Thread(target=self._report_steps, name="reporter", daemon=True),
            threading.Thread(target=self._report_loads, name="load-reporter", daemon=True),
        ]
        for thread in (reader, *reporters):
            thread.start()
        try:
            while (plan := self._plans.get()) is not None:
                if isinstance(plan, RecordGraph):
                    self._record()
                else:
                    self._launch(plan)
        except Exception as error:
            # The group cannot go on after a failed step: ranks may wait in a collective.
            self._break(error)
            raise
        finally:
            self._launched.put(None)
            self._copies.put(None)
            self._staging_order.end()
            for pool in pools:
                pool.shutdown(wait=False, cancel_futures=True)
            for thread in reporters:
                thread.join(timeout=5.0)
            self._channel.close()

    def _launch(self, plan: StepPlan) -> None:
        started = time.perf_counter()
        # Every rank keeps this order, so that a step finds the adapters that its plan loads.
        for load in plan.loads:
            copy = self._runner.load_adapter(load.key, load.slot, load.pages)
            self._copies.put((load.key, copy))
        for key in plan.drops:
            self._runner.drop(key)
            self._staging_order.dropped(key)
        batch = ForwardBatch(plan.joins, plan.rows, plan.guesses)
        self._launched.put(_Launched(plan, self._runner.step(batch), started))

    def _record(self) -> None:
        """Record a graph here, as a step would be launched: all ranks take part in its sums."""
        self._runner.record_next()
        self._send(Recorded(self._rank, self._runner.num_unrecorded))

    def _read(self, staging: ThreadPoolExecutor, making: ThreadPoolExecutor) -> None:
        decoder: msgspec.msgpack.Decoder[Command] = msgspec.msgpack.Decoder(Command)
        while (frame := self._channel.receive()) is not None:
            command = decoder.decode(frame)
            if isinstance(command, RunStep):
                # Note drops in the socket's order: the main thread may carry them out late.
                for key in command.plan.drops:
                    self._staging_order.read_drop(key)
                self._plans.put(command.plan)
            elif isinstance(command, RecordGraph):
                self._plans.put(command)
            elif isinstance(command, Stage):
                ticket = self._staging_order.read_stage(command.adapter.key)
                with contextlib.suppress(RuntimeError):  # the main thread has ended already
                    staging.submit(self._stage, command, ticket)
            elif isinstance(command, Prepare):
                with contextlib.suppress(RuntimeError):  # the same
                    making.submit(self._prepare, command)
            else:
                break
        self._plans.put(None)

    def _report_steps(self) -> None:
        while (launched := self._launched.get()) is not None:
            try:
                sampled = launched.output.wait()
            except Exception as error:
                # A failed kernel raises only here, and the main thread must not launch more steps.
                self._break(error)
                return
            if self._rank == 0:
                seconds = time.perf_counter() - launched.started
                self._send(StepDone(step_result(launched.plan, sampled, seconds)))

    def _report_loads(self) -> None:
        while (loading := self._copies.get()) is not None:
            key, copy = loading
            try:
                copy.wait()
            except Exception as error:
                self._break(error)
                return
            self._send(Loaded(self._rank, key))

    def _stage(self, stage: Stage, ticket: StagingTicket) -> None:
        wanted = self._staging_order.wait_for_drops(stage.adapter.key, ticket)
        self._send(self._stage_reply(stage.adapter, stage.attempt, wanted))

    def _prepare(self, command: Prepare) -> None:
        try:
            fault = self._runner.prepare(command.number, command.constraint, command.gone)
        except Exception as error:
            # Without a reply, the requests under this constraint would wait for ever.
            logger.exception("a matcher could not be made")
            fault = f"the constraint cannot be followed: {error}"
        self._send(Prepared(self._rank, command.number, fault))

    def _stage_reply(self, adapter: FetchedAdapter, attempt: int, wanted: bool) -> StageAnswer:
        """Stage an adapter, if it is still wanted, and return the outcome."""
        rank, key = self._rank, adapter.key
        if not wanted:
            message = f"adapter {adapter.name!r} was dropped before it was read"
            return StageFailed(rank, key, AdapterRefusal.UNAVAILABLE, message, attempt)
        try:
            return Staged(rank, key, self._runner.stage(adapter), attempt)
        except AdapterDeferred as deferred:
            return StageDeferred(rank, key, deferred.shape, attempt)
        except AdapterNeedsSums as needs:
            return StageNeedsSums(rank, key, needs.part, attempt)
        except AdapterError as error:
            return StageFailed(rank, key, error.refusal, error.message, attempt)
        except Exception as error:
            # Without a reply, the requests over this adapter would wait for ever.
            logger.exception("staging adapter %s failed", adapter.name)
            message = f"adapter {adapter.name!r} could not be read: {error}"
            refused = AdapterError(AdapterRefusal.UNAVAILABLE, message)
            return StageFailed(rank, key, refused.refusal, refused.message, attempt)

    def _break(self, error: Exception) -> None:
        logger.exception("a step failed")
        self._send(RankBroken(self._rank, f"{type(error).__name__}: {error}"))
        self._plans.put(None)

    def _send(self, report: Report) -> None:
        try:
            self._channel.send(msgspec.msgpack.encode(report))
        except OSError:
            logger.info("the driver closed the connection")
            self._plans.put(None)


def step_result(plan: StepPlan, sampled: SampledTokens, seconds: float) -> StepResult:
    """Return a plan's result; seconds: from the step's start until its tokens were on the host."""
    least = sum(row.num_samples for row in plan.rows)
    most = least + sum(max(0, row.follows) for row in plan.rows)
    assert least <= len(sampled.tokens) <= most, (plan.step, len(sampled.tokens), least, most)
    return StepResult(
        epoch=plan.epoch,
        step=plan.step,
        tokens=sampled.tokens,
        logprobs=sampled.logprobs,
        compute_seconds=seconds,
        reports=sampled.reports,
        idle_seconds=sampled.idle_seconds,
        captured=sampled.captured,
        faults=sampled.faults,
        guesses=sampled.guesses,
    )
