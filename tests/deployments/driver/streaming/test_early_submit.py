"""Early submits: each request runs once; its call attaches to it, or it leaves nothing behind."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from configs.wire.sampling import Stopping
from deployments.contract import (
    Cancelled,
    Completion,
    Failed,
    GenerateRequest,
    ReplyAddress,
    SequenceOutcome,
    TokenFrame,
)
from deployments.driver.engine import DriverEngine
from deployments.driver.streaming.early_submit import EarlySubmits
from deployments.frames import FrameReceiver
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    PATIENCE_S,
    play,
    request,
    tokens,
    until,
    until_running,
    until_true,
)
from tests.deployments.driver.streaming.sockets import HERE, THERE

ONE, OTHER = request("one", [1]), request("other", [2])


class Runs:
    """A fake engine: its runs end when the test says so; it records held tokens."""

    def __init__(self, patience_s: float = PATIENCE_S) -> None:
        self.begun: list[str] = []
        self.cancelled: list[str] = []
        self.held: set[str] = set()
        self.num_settled = 0
        self.fault: Exception | None = None
        self.free = asyncio.Event()
        self.starts = EarlySubmits(self, self, self, patience_s)

    async def generate(self, sent: GenerateRequest, reply_to: ReplyAddress) -> Completion:
        self.begun.append(sent.id)
        number = len(self.begun)
        try:
            await self.free.wait()
        except asyncio.CancelledError:
            self.cancelled.append(sent.id)
            raise
        if self.fault is not None:
            raise self.fault
        return Completion([SequenceOutcome([number], Cancelled())])

    async def drain(self) -> None:
        self.num_settled += 1

    def hold(self, request_id: str) -> None:
        self.held.add(request_id)

    def release(self, request_id: str) -> None:
        self.held.discard(request_id)

    def call(self, sent: GenerateRequest = ONE) -> "asyncio.Task[Completion]":
        return asyncio.create_task(self.starts.call(sent, HERE))


def run(story: Callable[[Runs], Awaitable[None]], patience_s: float = PATIENCE_S) -> None:
    """Run a story; at its end nothing may wait, be held or run."""

    async def act() -> None:
        before, runs = asyncio.all_tasks(), Runs(patience_s)
        await story(runs)
        await until_true(lambda: asyncio.all_tasks() == before)
        assert (len(runs.starts), runs.held) == (0, set())

    asyncio.run(asyncio.wait_for(act(), PATIENCE_S))


async def settled() -> None:
    """Let everything run that can."""
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.mark.parametrize("ended", [False, True])
def test_a_call_attaches_to_a_request_that_runs_or_has_ended(ended: bool) -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        runs.starts.start(OTHER, HERE)
        assert runs.held == {"one", "other"}
        if ended:
            runs.free.set()
            await settled()
        call = runs.call()
        await settled()
        assert "one" not in runs.held
        runs.free.set()
        assert (await call).sequences[0].tokens == [1]
        assert (await runs.call(OTHER)).sequences[0].tokens == [2]
        assert (runs.begun, runs.starts.num_attached) == (["one", "other"], 2)
        assert runs.starts.lead_seconds > 0

    run(story)


def test_a_call_before_its_early_submit_runs_alone() -> None:
    """And what it overtook is ignored, while it runs and after its end."""

    async def story(runs: Runs) -> None:
        call = runs.call()
        await settled()
        runs.starts.start(ONE, HERE)
        runs.free.set()
        await call
        runs.starts.start(ONE, HERE)
        await settled()
        assert (runs.begun, runs.starts.num_attached, len(runs.starts)) == (["one"], 0, 0)

    run(story)


def test_an_early_submit_that_comes_twice_runs_once() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        runs.starts.start(ONE, HERE)
        call = runs.call()
        await settled()
        runs.starts.start(ONE, HERE)
        runs.free.set()
        await call
        assert runs.begun == ["one"]

    run(story)


def test_a_withdrawn_request_ends_and_its_late_call_begins_anew() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        await settled()
        runs.starts.withdraw("one")
        call = runs.call()
        runs.starts.start(ONE, HERE)
        await settled()
        assert (runs.cancelled, runs.begun) == (["one"], ["one", "one"])
        assert runs.num_settled == 1, "nothing of the first may be mistaken for the second's"
        runs.free.set()
        assert (await call).sequences[0].tokens == [2]
        assert runs.starts.num_attached == 0

    run(story)


def test_attached_or_unknown_requests_are_not_withdrawn() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        call = runs.call()
        await settled()
        runs.starts.withdraw("one")
        runs.starts.withdraw("nobody")
        runs.starts.ingress_lost(HERE)
        runs.starts.close()
        runs.free.set()
        assert (await call).sequences[0].tokens == [1]
        runs.starts.withdraw("one")

    run(story)


def test_an_early_submit_without_a_call_ends_after_a_while() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        await until_true(lambda: runs.cancelled == ["one"])
        runs.free.set()
        runs.starts.start(OTHER, HERE)
        await until_true(lambda: not len(runs.starts))
        assert (await runs.call()).sequences[0].tokens == [3], "it began anew"
        assert runs.starts.num_attached == 0

    run(story, patience_s=0.01)


def test_a_lost_ingress_replica_ends_its_early_submits() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        runs.starts.start(OTHER, THERE)
        await settled()
        runs.starts.ingress_lost(HERE)
        await settled()
        assert (runs.cancelled, len(runs.starts)) == (["one"], 1)
        runs.starts.close()

    run(story)


def test_a_cancelled_call_ends_its_request() -> None:
    async def story(runs: Runs) -> None:
        runs.starts.start(ONE, HERE)
        await settled()
        call = runs.call()
        await settled()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert runs.cancelled == ["one"]

    run(story)


def test_a_fault_is_raised_by_the_call_and_ignored_without_one() -> None:
    async def story(runs: Runs) -> None:
        runs.fault = ValueError("broken")
        runs.free.set()
        runs.starts.start(ONE, HERE)
        runs.starts.start(OTHER, HERE)
        await settled()
        with pytest.raises(ValueError, match="broken"):
            await runs.call()
        runs.starts.withdraw("other")

    run(story)


@pytest.mark.parametrize("changed", ["request", "address"])
def test_a_call_attaches_only_to_the_same_request(changed: str) -> None:
    async def story(runs: Runs) -> None:
        longer = request("one", [1], 6)
        runs.starts.start(
            longer if changed == "request" else ONE, HERE if changed == "request" else THERE
        )
        await settled()
        call = runs.call()
        await settled()
        assert (runs.cancelled, runs.begun) == (["one"], ["one", "one"])
        runs.free.set()
        await call
        assert runs.starts.num_attached == 0

    run(story)


def test_ended_calls_are_remembered_within_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.driver.streaming.early_submit._REMEMBERED", 3)

    async def story(runs: Runs) -> None:
        runs.free.set()
        for i in range(9):
            await runs.call(request(f"r{i}", [1]))
        assert list(runs.starts._seen) == ["r6", "r7", "r8"]

    run(story)


class Ingress:
    """An ingress replica that a driver dialled as `driver`, and all tokens that it was sent."""

    def __init__(self) -> None:
        self.heard: dict[str, list[int]] = {}
        self.receiver = FrameReceiver(self._deliver)

    def _deliver(self, frame: TokenFrame) -> None:
        for run in frame.runs:
            reply = self.heard.setdefault(run.request_id, [])
            assert run.start == len(reply)
            reply += run.tokens


@asynccontextmanager
async def dialled(engine: DriverEngine) -> AsyncIterator[tuple[Ingress, ReplyAddress]]:
    """An ingress replica whose first request was answered."""
    ingress = Ingress()
    address = await ingress.receiver.start("127.0.0.1")
    await engine.generate(request("first", [9], 1), address)
    yield ingress, address
    await ingress.receiver.close()


def test_tokens_are_sent_when_the_call_arrives_and_are_the_same(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (ingress, address):
            requests = [
                request(f"r{i}", [i], 9, adapter) for i, adapter in enumerate((None, "red"))
            ]
            alone = [await engine.generate(each, address) for each in requests]
            again = [
                request(f"again r{i}", [i], 9, adapter) for i, adapter in enumerate((None, "red"))
            ]
            for each in again:
                assert ingress.receiver.submit_early("", each) is False, "a nameless driver"
                engine.early_submits.start(each, address)
            for each in again:
                await engine.early_submits._waiting[each.id].task
            assert not any(each.id in ingress.heard for each in again)
            answers = [await engine.generate(each, address) for each in again]
            assert [tokens(answer) for answer in answers] == [tokens(answer) for answer in alone]
            assert engine.early_submits.num_attached == 2

    play(root, story)


def test_held_tokens_go_first_when_the_call_comes(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (ingress, address):
            group.gate.clear()
            sent = request("r", [5], 20)
            engine.early_submits.start(sent, address)
            await until_running(engine)
            group.gate.let(6)
            await until_true(lambda: bool(engine._streams._held_back.get("r")))
            call = asyncio.create_task(engine.generate(sent, address))
            await until_true(lambda: "r" in ingress.heard)
            group.gate.set()
            assert tokens(await call) == [continuation("", [5], 20)]
            await until_true(lambda: len(ingress.heard["r"]) == 20)

    play(root, story)


def test_withdrawn_requests_and_those_of_a_lost_ingress_leave_the_ranks(root: Path) -> None:
    """And a call that comes after all is answered as if nothing had been."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (_, address):
            group.gate.clear()
            requests = [request(name, [i], 50) for i, name in enumerate(("back", "lost"))]
            for each in requests:
                engine.early_submits.start(each, address)
            await until(engine, lambda snapshot: snapshot.running + snapshot.queued == 2)
            engine.early_submits.withdraw("back")
            call = asyncio.create_task(engine.generate(requests[0], address))
            # The old one has left, and what the call brings is there beside the other.
            await until_true(
                lambda: not engine.early_submits._leaving and len(engine._streams) == 2
            )
            group.gate.set()
            assert tokens(await call) == [continuation("", [0], 50)]
            group.gate.clear()
        await until_true(lambda: not engine._connections._sender.has_room(address))
        assert len(engine.early_submits) == 0
        group.gate.set()
        assert tokens(await engine.generate(requests[1], address)) == [continuation("", [1], 50)]

    play(root, story)


def test_a_cancelled_call_frees_the_ranks(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (_, address):
            group.gate.clear()
            sent = request("gone", [1], 100)
            engine.early_submits.start(sent, address)
            await until_running(engine)
            call = asyncio.create_task(engine.generate(sent, address))
            await until_true(lambda: engine.early_submits.num_attached == 1)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            group.gate.set()
            answer = await engine.generate(request("next", [3], 100), address)
            assert tokens(answer) == [continuation("", [3], 100)]

    play(root, story)


def test_the_engines_end_leaves_no_early_submit(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (_, address):
            group.gate.clear()
            engine.early_submits.start(request("r", [1], 100), address)
            await until_running(engine)
            group.gate.set()
            await engine.stop()
            assert len(engine.early_submits) == 0
            await until_true(lambda: not engine._streams)

    play(root, story)


def test_an_impossible_early_submit_is_refused_as_a_call_would_be(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        async with dialled(engine) as (_, address):
            good = request("r", [1])
            sent = GenerateRequest("r", [*good.sequences] * 2)
            huge = GenerateRequest(
                "r", [type(s)(s.prompt, s.sampling, Stopping(500)) for s in sent.sequences]
            )
            engine.early_submits.start(huge, address)
            endings = [s.ending for s in (await engine.generate(huge, address)).sequences]
            assert [isinstance(ending, Failed) for ending in endings] == [True, True]
            assert engine.early_submits.num_attached == 1

    play(root, story)
