"""A rank's worker, command by command: what is read first counts first, on all its threads."""

import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

import msgspec
import pytest

from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal, FetchedAdapter
from configs.wire.plan import AdapterLoad, RequestJoin, StepPlan, StepRow
from configs.wire.sampling import Sampling
from deployments.rank import worker
from deployments.rank.messages import (
    Command,
    Report,
    RunStep,
    Stage,
    StageAnswer,
    Staged,
    StageFailed,
    StepDone,
    Stop,
)
from deployments.rank.staging_order import StageOrder
from deployments.rank.transport import Channel
from deployments.rank.worker import Worker
from modeling.batch import ForwardBatch, StepOutput
from tests.deployments.driver.fake_ranks import HELD_SECONDS, POISON, FakeRunner, Gate
from tests.deployments.driver.routing.stories import PATIENCE_S

KEY = AdapterKey(1)
OTHERS = OTHER, _ = AdapterKey(2), AdapterKey(3)


class HeldRunner(FakeRunner):
    """Its steps are launched when they may; a slow adapter shows when it begins to be read."""

    def __init__(self) -> None:
        filling_gate = threading.Event()
        filling_gate.set()
        super().__init__(Gate(), threading.Event(), filling_gate, POISON)
        self.may_launch = threading.Event()
        self.launching = threading.Event()

    def step(self, batch: ForwardBatch) -> StepOutput:
        self.launching.set()
        self.may_launch.wait(HELD_SECONDS)
        return super().step(batch)


@dataclass
class Driver:
    """Says to one worker what the test says, and hears its answers."""

    folder: Path
    runner: HeldRunner = field(default_factory=HeldRunner)
    num_steps: int = 0

    def start(self, staging_threads: int) -> None:
        ours, theirs = socket.socketpair()
        ours.settimeout(PATIENCE_S)
        self.channel = Channel(ours)
        worker = Worker(self.runner, 0, Channel(theirs), staging_threads)
        self.thread = threading.Thread(target=worker.run, daemon=True)
        self.thread.start()

    def say(self, command: Command) -> None:
        self.channel.send(msgspec.msgpack.encode(command))

    def hear(self) -> Report:
        frame = self.channel.receive()
        assert frame is not None, "the rank hung up"
        report: Report = msgspec.msgpack.decode(frame, type=Report)
        return report

    def stage(self, key: AdapterKey, attempt: int, name: str = "red") -> None:
        adapter = FetchedAdapter(key, name, str(self.folder), f"content-{attempt}")
        self.say(Stage(adapter, attempt))

    def drop(self, *keys: AdapterKey, loads: tuple[AdapterLoad, ...] = ()) -> None:
        self.num_steps += 1
        self.say(RunStep(StepPlan(0, self.num_steps, [], [], list(loads), list(keys))))

    def staged(self) -> StageAnswer:
        """The next answer to a staging; those of steps are left out."""
        while isinstance(answer := self.hear(), StepDone):
            pass
        assert isinstance(answer, Staged | StageFailed), answer
        return answer


@pytest.fixture
def driver(tmp_path: Path) -> Iterator[Driver]:
    (tmp_path / "adapter_config.json").write_text("{}")
    driver = Driver(tmp_path)
    driver.start(staging_threads=2)
    yield driver
    driver.runner.may_launch.set()
    driver.runner.staging_gate.set()
    driver.say(Stop())
    driver.thread.join(PATIENCE_S)
    assert not driver.thread.is_alive()
    driver.channel.close()


def hold(driver: Driver) -> None:
    """Keep the worker's main thread in a step, as on a rank that is behind."""
    driver.num_steps += 1
    join = RequestJoin(0, [5], 1, -1, Sampling())
    driver.say(
        RunStep(StepPlan(0, driver.num_steps, [join], [StepRow(0, 0, 1, [0], True)], [], []))
    )
    assert driver.runner.launching.wait(PATIENCE_S)


def test_an_older_drop_does_not_remove_a_new_staging(driver: Driver) -> None:
    driver.stage(KEY, 1)
    assert driver.staged().attempt == 1
    hold(driver)
    driver.drop(KEY)
    driver.stage(KEY, 2)
    driver.stage(OTHER, 3)
    assert driver.staged().attempt == 3, "only what is dropped waits for the step"
    driver.runner.may_launch.set()
    assert driver.staged().attempt == 2
    assert driver.runner.staged == {KEY: "content-2", OTHER: "content-3"}
    driver.drop(loads=(AdapterLoad(KEY, 0, [[0]]),))
    driver.drop(KEY, OTHER)
    while not isinstance(report := driver.hear(), StepDone) or report.result.step != 4:
        pass
    assert driver.runner.staged == {}


def test_an_adapter_dropped_before_its_staging_is_not_read(driver: Driver) -> None:
    driver.runner.may_launch.set()
    for attempt, other in enumerate(OTHERS):  # all threads are busy
        driver.stage(other, attempt, "slow")
    driver.stage(KEY, 2)
    driver.drop(KEY)
    while not isinstance(driver.hear(), StepDone):  # as a driver that gave it up does
        pass
    driver.runner.staging_gate.set()
    answers = {answer.key: answer for answer in [driver.staged() for _ in range(3)]}
    refused = answers[KEY]
    assert isinstance(refused, StageFailed)
    assert "dropped before it was read" in refused.message
    assert set(driver.runner.staged) == set(OTHERS)


@pytest.mark.parametrize(
    "error", [AdapterError(AdapterRefusal.UNSUPPORTED, "\ud800"), OSError("\ud800")]
)
def test_a_refusal_that_quotes_what_is_no_unicode_is_answered(
    driver: Driver, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Of a field's name in adapter_config.json, say; unanswered, its requests would wait.
    # No report of this test could be sent with the log's text.
    monkeypatch.setattr(worker.logger, "disabled", True)

    def stage(adapter: FetchedAdapter) -> NoReturn:
        raise error

    driver.runner.stage = stage  # type: ignore[method-assign]
    driver.stage(KEY, 1)
    refused = driver.staged()
    assert isinstance(refused, StageFailed)
    assert refused.message.endswith(r"\ud800")


def test_no_staging_waits_for_a_rank_that_has_ended() -> None:
    order = StageOrder()
    order.read_drop(KEY)
    ticket = order.read_stage(KEY)
    wanted: list[bool] = []
    waiting = threading.Thread(target=lambda: wanted.append(order.wait_for_drops(KEY, ticket)))
    waiting.start()
    order.end()
    waiting.join(PATIENCE_S)
    assert wanted == [False]
