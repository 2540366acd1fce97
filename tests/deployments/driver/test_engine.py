"""The engine over fake ranks: each request ends once, with the tokens that it gets alone."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.contract import (
    Cancelled,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    SequenceRequest,
    TokenFrame,
)
from deployments.driver.engine import DriverEngine
from deployments.frames import FrameReceiver
from tests.deployments.driver.fake_ranks import FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    digest_of,
    play,
    request,
    together,
    tokens,
    until,
    until_running,
    until_true,
)


def test_many_requests_over_base_and_adapters_get_their_own_tokens(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        names = [None, None, "red", "blue", *(f"a{i}" for i in range(8))]
        requests = [
            request(f"r{i}", [i, i + 1, i % 3], 3 + i % 7, names[i % len(names)]) for i in range(60)
        ]
        answers = await asyncio.gather(*await together(engine, requests))
        for r, answer in zip(requests, answers, strict=True):
            digest = digest_of(engine, r.adapter.id) if r.adapter else ""
            sequence = r.sequences[0]
            expected = continuation(digest, sequence.prompt, sequence.stopping.max_new_tokens)
            assert tokens(answer) == [expected], r.id

    group = play(root, story)
    assert max(group.runners[0].batch_sizes) >= 8, "requests did not share steps"
    assert group.runners[0].batch_sizes == group.runners[1].batch_sizes


def test_callers_of_another_salt_find_no_cached_prompt(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        found = []
        for i, salt in enumerate((b"", b"", b"x", b"y", b"x")):
            sent = msgspec.structs.replace(request(f"r{i}", list(range(65)), 1), cache_salt=salt)
            [outcome] = (await engine.generate(sent, NOWHERE)).sequences
            found.append(outcome.cached_tokens > 0)
        assert found == [False, True, False, False, True]

    play(root, story)


def test_frames_and_completion_have_the_same_tokens(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        heard: dict[int, list[int]] = {0: [], 1: [], 2: []}
        complete = asyncio.Event()

        def deliver(frame: TokenFrame) -> None:
            for run in frame.runs:
                assert run.start == len(heard[run.index])
                heard[run.index] += run.tokens
            if all(len(run) == 9 for run in heard.values()):
                complete.set()

        receiver = FrameReceiver(deliver)
        address = await receiver.start("127.0.0.1")
        answer = await engine.generate(request("r", [1, 2], 9, num=3), address)
        await complete.wait()
        assert [heard[i] for i in range(3)] == tokens(answer)
        await receiver.close()

    play(root, story)


def test_a_stop_string_ends_a_sequence_where_it_was_matched(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        group.gate.let(10)

        def deliver(frame: TokenFrame) -> None:
            if any(run.start + len(run.tokens) >= 3 for run in frame.runs):
                receiver.finish("r", 0, 3)

        receiver = FrameReceiver(deliver)
        address = await receiver.start("127.0.0.1")
        answer = await engine.generate(request("r", [5], 120), address)
        [sequence] = answer.sequences
        assert sequence.ending == Finished(FinishReason.STOP_STRING)
        assert sequence.tokens == continuation("", [5], 3)
        group.gate.set()
        await receiver.close()

    play(root, story)


def test_a_client_that_leaves_frees_its_request(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        leaving = asyncio.create_task(engine.generate(request("gone", [1], 100), NOWHERE))
        await until_running(engine)
        leaving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await leaving
        group.gate.set()
        # As large as the whole cache: it only fits when nothing of the other is left.
        answer = await engine.generate(request("next", [3], 100), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 100)]

    play(root, story)


def test_too_many_requests_are_refused_with_a_retry_time(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        requests = [
            asyncio.create_task(engine.generate(request(f"r{i}", [i], 3), NOWHERE))
            for i in range(12)
        ]
        await asyncio.wait(requests, return_when=asyncio.FIRST_COMPLETED)
        group.gate.set()
        endings = [answer.sequences[0].ending for answer in await asyncio.gather(*requests)]
        refused = [e for e in endings if isinstance(e, Failed)]
        assert all(e.kind is ErrorKind.OVERLOADED and e.retry_after_s for e in refused)
        assert 0 < len(refused) < 12

    limits = {"max_step_tokens": 16, "max_running": 2, "max_queued": 3}
    play(root, story, limits=limits)


def test_an_impossible_request_is_refused_with_numbers(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        ending = (await engine.generate(request("r", [1], 500), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.VALIDATION
        assert "128" in ending.message

    play(root, story)


def test_requests_of_a_lost_ingress_are_cancelled_at_the_ranks(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        gone = asyncio.create_task(engine.generate(request("r", [5], 120), NOWHERE))
        await until_running(engine)
        engine._connections._events.on_lost(NOWHERE)
        assert isinstance((await gone).sequences[0].ending, Cancelled)
        group.gate.set()
        left = await until(engine, lambda s: not (s.running or s.draining or s.queued))
        assert left.num_generated_tokens < 20, "it ran on without a client"

    play(root, story)


def test_a_lost_ingress_is_not_noticed_by_the_requests_of_another(root: Path) -> None:
    """Over real sockets; the two requests share steps."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        heard: list[int] = []
        lost = FrameReceiver(lambda frame: None)
        other = FrameReceiver(
            lambda frame: heard.extend(t for run in frame.runs for t in run.tokens)
        )
        group.gate.clear()
        tasks = [
            asyncio.create_task(engine.generate(request(f"r{i}", [5 + i], 60), address))
            for i, address in enumerate(
                [await lost.start("127.0.0.1"), await other.start("127.0.0.1")]
            )
        ]
        await until(engine, lambda s: s.running + s.queued == 2)  # Else one may take all steps.
        group.gate.let(20)
        await until_true(lambda: bool(heard))
        await lost.close()
        assert isinstance((await tasks[0]).sequences[0].ending, Cancelled)
        group.gate.set()
        expected = continuation("", [6], 60)
        assert tokens(await tasks[1]) == [expected]
        await until_true(lambda: len(heard) == 60)
        assert heard == expected
        await other.close()

    play(root, story)


def test_if_one_of_several_sequences_does_not_fit_none_runs(root: Path) -> None:
    """Both ends of such a request may reach the streams in any order."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        requests = [engine.generate(request(f"r{i}", [i], 4, num=2), NOWHERE) for i in range(12)]
        for answer in await asyncio.gather(*requests):
            assert len({type(sequence.ending) for sequence in answer.sequences}) == 1

    limits = {"max_step_tokens": 16, "max_running": 2, "max_queued": 3}
    play(root, story, limits=limits)


def test_a_value_that_no_plan_can_encode_is_refused(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        bad = GenerateRequest("bad", [SequenceRequest([2**70], Sampling(), Stopping(3))])
        ending = (await engine.generate(bad, NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.VALIDATION
        answer = await engine.generate(request("good", [3], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 9)]

    play(root, story)
