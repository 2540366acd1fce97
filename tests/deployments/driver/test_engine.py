"""The engine over fake ranks: every story ends once, with the tokens of a request alone."""

import asyncio
from pathlib import Path

import msgspec
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
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
from scheduler.adapters.resident import AdapterState
from tests.deployments.driver.fake_ranks import POISON, FakeGroup, continuation
from tests.deployments.driver.routing.stories import (
    NOWHERE,
    PATIENCE_S,
    Clock,
    digest_of,
    healthy,
    pass_by,
    play,
    request,
    together,
    tokens,
    until,
    until_lost,
    until_running,
)

OVERDUE_S = 1.1 * PATIENCE_S


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


def test_bad_adapters_are_refused_and_disturb_no_other_request(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        good = [engine.generate(request(f"g{i}", [i], 40, "red"), NOWHERE) for i in range(4)]
        bad = [
            engine.generate(request(f"b-{name}", [1], 5, name), NOWHERE)
            for name in ("missing", "../adapters/red/../../..", "broken", "crash")
        ]
        answers = await asyncio.gather(*good, *bad)
        for i, answer in enumerate(answers[:4]):
            assert tokens(answer) == [continuation(digest_of(engine, "red"), [i], 40)]
        endings = [answer.sequences[0].ending for answer in answers[4:]]
        assert all(isinstance(ending, Failed) for ending in endings)
        kinds = [ending.kind for ending in endings if isinstance(ending, Failed)]
        assert kinds == [
            ErrorKind.ADAPTER_NOT_FOUND,
            ErrorKind.ADAPTER_NOT_FOUND,
            ErrorKind.ADAPTER_UNSUPPORTED,
            ErrorKind.ADAPTER_UNAVAILABLE,
        ]

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


def test_a_dead_rank_is_replaced_and_requests_go_on(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        requests = [
            engine.generate(request(f"r{i}", [i], 60, "red" if i % 2 else None), NOWHERE)
            for i in range(6)
        ]
        await engine.generate(request("first", [50], 3), NOWHERE)
        group.gate.clear()
        answers = asyncio.gather(*requests)
        await until_running(engine)
        group.kill(1)
        for i, answer in enumerate(await answers):
            digest = digest_of(engine, "red") if i % 2 else ""
            assert tokens(answer) == [continuation(digest, [i], 60)]
        assert (await engine.describe()).healthy

    assert play(root, story).starts == 2


def test_a_request_that_breaks_every_step_ends_and_the_others_go_on(root: Path) -> None:
    """It is tried again after a loss of the ranks, but not for ever."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        poison = engine.generate(request("poison", [1, POISON], 5), NOWHERE)
        ending = (await poison).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.GENERATION
        assert "3 times in a row" in ending.message
        answer = await engine.generate(request("good", [3], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 9)]

    assert play(root, story).starts == 4


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


def test_adapters_that_cannot_be_read_in_time_fail_and_others_are_served(
    root: Path, clock: Clock
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        slow = [
            asyncio.create_task(engine.generate(request(f"s{i}", [i], 5, f"slow{i}"), NOWHERE))
            for i in (1, 2)
        ]
        await until(engine, lambda snapshot: snapshot.adapters[AdapterState.STAGING] == 2)
        answer = await engine.generate(request("good", [3], 9, "red"), NOWHERE)
        assert tokens(answer) == [continuation(digest_of(engine, "red"), [3], 9)]
        assert not any(task.done() for task in slow)
        await until(engine, lambda snapshot: not snapshot.plans_in_flight)
        await pass_by(engine, clock, OVERDUE_S)
        for completion in await asyncio.gather(*slow):
            ending = completion.sequences[0].ending
            assert isinstance(ending, Failed)
            assert ending.kind is ErrorKind.ADAPTER_UNAVAILABLE

    assert play(root, story).starts == 1


def test_names_of_equal_content_read_the_files_that_were_verified_last(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        folder = root / "adapters"
        (folder / "blue" / "adapter_config.json").write_bytes(
            (folder / "red" / "adapter_config.json").read_bytes()
        )
        for name in ("red", "blue"):
            await engine.generate(request(name, [1], 2, name), NOWHERE)
        key = engine._directory._references[AdapterReference(AdapterSource.LOCAL, "red")]
        assert key == engine._directory._references[AdapterReference(AdapterSource.LOCAL, "blue")]
        (folder / "red" / "adapter_config.json").write_text('{"name": "new"}')
        await engine.generate(request("again", [1], 2, "blue"), NOWHERE)
        assert engine._directory.fetched(key).folder.endswith("blue")
        await engine.generate(request("other", [1], 2, "red"), NOWHERE)
        assert digest_of(engine, "red") != digest_of(engine, "blue")

    play(root, story)


@pytest.mark.parametrize("name", ["./red", "a" * 300, "red\0", "red/", "../adapters/red"])
def test_odd_names_are_not_found(root: Path, name: str) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        ending = (await engine.generate(request("r", [1], 2, name), NOWHERE)).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.ADAPTER_NOT_FOUND

    play(root, story)


def test_a_rank_that_hangs_is_replaced(root: Path, clock: Clock) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("warm", [9], 2), NOWHERE)
        group.gate.clear()
        hung = asyncio.create_task(engine.generate(request("r", [4], 10), NOWHERE))
        await until_running(engine)
        await pass_by(engine, clock, OVERDUE_S)
        assert tokens(await hung) == [continuation("", [4], 10)]

    assert play(root, story).starts == 2


def test_ranks_that_do_not_come_back_end_requests_with_a_retryable_error(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.gate.clear()
        answer = asyncio.create_task(engine.generate(request("r", [4], 120), NOWHERE))
        await until_running(engine)
        group.failing_starts = 100
        group.kill(0)
        ending = (await answer).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.UNAVAILABLE
        assert ending.retry_after_s is not None
        assert engine.failure is not None
        later = (await engine.generate(request("later", [4], 1), NOWHERE)).sequences[0].ending
        assert isinstance(later, Failed)

    play(root, story)


def test_a_rebuild_that_takes_too_long_ends_requests_and_later_ones_are_served(
    root: Path, clock: Clock
) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        await engine.generate(request("first", [50], 3), NOWHERE)
        group.gate.clear()
        group.may_start.clear()
        answer = asyncio.create_task(engine.generate(request("r", [4], 60), NOWHERE))
        await until_running(engine)
        group.kill(0)
        await until_lost(engine)
        await pass_by(engine, clock, OVERDUE_S)
        ending = (await answer).sequences[0].ending
        assert isinstance(ending, Failed)
        assert ending.kind is ErrorKind.UNAVAILABLE
        assert not (await engine.describe()).healthy
        assert engine.failure is None, "the replica is still waiting for its ranks"
        group.may_start.set()
        await healthy(engine)
        later = await engine.generate(request("later", [4], 6), NOWHERE)
        assert tokens(later) == [continuation("", [4], 6)]

    assert play(root, story).starts == 2


def test_preloaded_adapters_are_there_and_a_bad_one_stops_the_start(root: Path) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        assert set(group.runners[0].loaded.values()) == {digest_of(engine, "red")}

    adapters = {"local_roots": [str(root / "adapters")], "default_source": "local"}
    play(root, story, adapters={**adapters, "preload": ["red"]})
    with pytest.raises(ValueError, match=r"preload.*broken is not a LoRA"):
        play(root, story, adapters={**adapters, "preload": ["local:broken"]})


def test_rows_use_an_adapter_only_when_every_rank_has_its_bytes(root: Path) -> None:
    """Others are served while they load, and no step waits."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.filling_gate.clear()
        red = asyncio.create_task(engine.generate(request("red", [3], 9, "red"), NOWHERE))
        await until(engine, lambda snapshot: snapshot.adapters[AdapterState.LOADING] == 1)
        answer = await engine.generate(request("base", [3], 9), NOWHERE)
        assert tokens(answer) == [continuation("", [3], 9)]
        assert (await engine.snapshot()).adapters[AdapterState.LOADING] == 1
        assert not red.done()
        group.filling_gate.set()
        assert tokens(await red) == [continuation(digest_of(engine, "red"), [3], 9)]

    assert play(root, story).starts == 1


def test_a_load_that_does_not_end_is_a_loss_of_the_ranks(root: Path, clock: Clock) -> None:
    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.filling_gate.clear()
        red = asyncio.create_task(engine.generate(request("red", [3], 9, "red"), NOWHERE))
        filling = AdapterState.LOADING
        await until(engine, lambda s: s.adapters[filling] == 1 and not s.plans_in_flight)
        await pass_by(engine, clock, OVERDUE_S)
        assert tokens(await red) == [continuation(digest_of(engine, "red"), [3], 9)]

    assert play(root, story).starts == 2


def test_an_adapter_that_a_rank_has_no_room_for_waits_for_room(root: Path) -> None:
    """As when two are staged at once and one is larger than any so far."""

    async def story(engine: DriverEngine, group: FakeGroup) -> None:
        group.runners[1].full = 2
        requests = [engine.generate(request(n, [3], 9, n), NOWHERE) for n in ("red", "blue")]
        for name, answer in zip(("red", "blue"), await asyncio.gather(*requests), strict=True):
            assert tokens(answer) == [continuation(digest_of(engine, name), [3], 9)]
        assert group.runners[1].full == 0
        for runner in group.runners:
            assert len(runner.staged) == 2

    play(root, story)
