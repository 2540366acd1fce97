"""The loop over a rank that is played by hand, message by message."""

import queue
import socket
import threading
from collections.abc import Iterator, Sequence
from typing import TypeVar

import msgspec
import pytest

from configs.engine import RecoveryConfig
from configs.wire.adapters import AdapterKey, AdapterRefusal, AdapterShape, FetchedAdapter
from configs.wire.plan import StepPlan, StepResult
from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.driver.loop import EngineLoop
from deployments.driver.loop_settings import LoopSettings
from deployments.rank.messages import (
    Command,
    Loaded,
    LoadReport,
    Prepare,
    Prepared,
    RankBroken,
    Report,
    RunStep,
    Stage,
    Staged,
    StageFailed,
    StepDone,
    Stop,
)
from deployments.rank.transport import Channel, RankLinks
from scheduler.admission.limits import Limits
from scheduler.events import AdapterArrived, AdapterFailure, ConstraintFailure, Ended, Event
from scheduler.request import Request
from scheduler.scheduler import Scheduler
from tests.clocks import Clock
from tests.deployments.driver.fake_ranks import FakeGroup
from tests.deployments.driver.routing.stories import PATIENCE_S

KEY = AdapterKey(1)
STAGE_SECONDS = 20.0
C = TypeVar("C", RunStep, Stage, Prepare, Stop)


class HandRank:
    """A group of one rank, played by the test."""

    def __init__(self) -> None:
        self.report = FakeGroup(1)._report(0)
        self.starts = 0

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        ours, theirs = socket.socketpair()
        theirs.settimeout(PATIENCE_S)
        self.end, self.links = Channel(theirs), RankLinks([Channel(ours)])
        self.starts += 1
        return self.links, [self.report]

    def stop(self) -> None:
        self.links.close()
        self.end.close()

    def release(self) -> None:
        self.stop()

    def await_ends(self) -> None:
        pass

    def hear(self, kind: type[C]) -> C:
        """The next command to the rank, which must be of this kind."""
        frame = self.end.receive()
        assert frame is not None, "the driver hung up"
        reply: Command = msgspec.msgpack.decode(frame, type=RunStep | Stage | Prepare | Stop)
        assert isinstance(reply, kind), reply
        return reply

    def say(self, report: Report) -> None:
        self.end.send(msgspec.msgpack.encode(report))

    def answer(self, *tokens: int) -> StepPlan:
        """Receive a step and reply with its tokens."""
        plan = self.hear(RunStep).plan
        self.say(StepDone(StepResult(plan.epoch, plan.step, list(tokens))))
        return plan


class Played:
    """A loop, its rank, and what comes out of both."""

    def __init__(self) -> None:
        self.rank = HandRank()
        self.events: queue.Queue[Event] = queue.Queue()
        started = self.rank.start()
        scheduler = Scheduler(Limits(steps_ahead=1), self.rank.report.capacity)
        settings = LoopSettings(
            recovery=RecoveryConfig(stage_timeout_s=STAGE_SECONDS),
            fetched=lambda key: FetchedAdapter(key, "red", "", "digest", ()),
            emit=self.take,
            fail=lambda message: None,
            applied=lambda plan, result: None,
            loaded=lambda stage, seconds: None,
        )
        self.loop = EngineLoop(scheduler, self.rank, started, settings)
        self.loop.start()

    def take(self, events: Sequence[Event]) -> None:
        for event in events:
            self.events.put(event)

    def ask(
        self,
        name: str,
        key: AdapterKey | None = KEY,
        after: threading.Event | None = None,
        constraint: str = "",
    ) -> None:
        """Have the loop take a request for one token, if need be when it may go on."""
        sent = Request((name, 0), [5], Sampling(grammar=constraint), Stopping(1), key)

        def add(scheduler: Scheduler, now: float) -> list[Event]:
            if after is not None:
                after.wait(PATIENCE_S)
            scheduler.add(sent, now)
            return []

        self.loop.post(add)

    def ended(self) -> Ended:
        """The next end of a request."""
        while not isinstance(event := self.events.get(timeout=PATIENCE_S), Ended):
            pass
        return event


@pytest.fixture
def played(clock: Clock) -> Iterator[Played]:
    """A loop that is late only by hand."""
    played = Played()
    yield played
    played.loop.stop()


def test_a_late_reply_to_a_staging_is_ignored(played: Played, clock: Clock) -> None:
    rank = played.rank
    played.ask("early")
    first = rank.hear(Stage)
    clock.now += 1.1 * STAGE_SECONDS
    played.loop.post(lambda scheduler, now: [])
    end = played.ended().ending
    assert isinstance(end, AdapterFailure)
    assert end.refusal is AdapterRefusal.UNAVAILABLE
    assert rank.answer().drops == [KEY], "what the rank may hold of it must go"
    played.ask("late")
    second = rank.hear(Stage)
    assert second.attempt != first.attempt
    rank.say(StageFailed(0, KEY, AdapterRefusal.UNSUPPORTED, "dropped", first.attempt))
    rank.say(Staged(0, KEY, AdapterShape((1,), 100), second.attempt))
    assert [load.key for load in rank.answer().loads] == [KEY]
    rank.say(Loaded(0, KEY))
    rank.answer(7)
    ended = played.ended()
    assert (ended.ending, ended.tokens) == (FinishReason.LENGTH, [7])


def test_events_of_a_command_are_emitted_before_the_next_command(played: Played) -> None:
    """A caller that waits for its commands must not get their events later."""
    may_go_on, reply = threading.Event(), queue.Queue[int]()

    def emit_event(scheduler: Scheduler, now: float) -> list[Event]:
        may_go_on.wait(PATIENCE_S)
        return [AdapterArrived(KEY)]

    def count(scheduler: Scheduler, now: float) -> list[Event]:
        reply.put(played.events.qsize())
        return []

    for command in (emit_event, count):
        played.loop.post(command)
    may_go_on.set()
    assert reply.get(timeout=PATIENCE_S) == 1


def test_the_last_report_of_a_broken_rank_is_logged(
    played: Played, caplog: pytest.LogCaptureFixture
) -> None:
    """It reported the fault before it closed; the driver notices when it sends a plan."""
    rank, may_go_on = played.rank, threading.Event()
    played.ask("r", None, may_go_on)
    rank.say(RankBroken(0, "the card is on fire"))
    rank.end.close()
    may_go_on.set()
    while rank.starts < 2:
        assert played.loop.failure is None
    rank.answer(7)
    assert played.ended().tokens == [7]
    assert "the card is on fire" in caplog.text
    assert "Broken pipe" not in caplog.text


def test_a_matcher_that_is_being_made_delays_no_other_request(played: Played) -> None:
    """Steps go on meanwhile, and its request joins when the matcher is ready."""
    rank = played.rank
    played.ask("held", None, constraint="slow")
    order = rank.hear(Prepare)
    assert order.constraint == "slow"
    for token in (7, 8):
        played.ask("free", None)
        assert [join.matcher for join in rank.answer(token).joins] == [-1]
        assert played.ended().tokens == [token]
    rank.say(Prepared(0, order.number))
    assert [join.matcher for join in rank.answer(9).joins] == [order.number]
    assert played.ended().tokens == [9]
    played.ask("other", None, constraint="costly")
    rank.say(Prepared(0, rank.hear(Prepare).number, "too costly"))
    assert played.ended().ending == ConstraintFailure("too costly")


def test_a_matcher_that_takes_too_long_ends_its_requests_alone(
    played: Played, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    rank = played.rank
    played.ask("late", None, constraint="hangs")
    first = rank.hear(Prepare)
    clock.now += 1.1 * STAGE_SECONDS
    played.loop.post(lambda scheduler, now: [])
    ending = played.ended().ending
    assert isinstance(ending, ConstraintFailure)
    assert "within 20 s" in ending.message
    assert "0 of 1 ranks made a matcher in 20 s" in caplog.text
    played.ask("free", None)
    rank.answer(7)
    assert played.ended().tokens == [7]
    played.ask("again", None, constraint="hangs")
    second = rank.hear(Prepare)
    rank.say(Prepared(0, first.number))
    rank.say(Prepared(0, second.number))
    assert [join.matcher for join in rank.answer(8).joins] == [second.number]
    assert played.ended().tokens == [8]
