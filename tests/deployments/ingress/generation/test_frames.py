import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.wire.sampling import FinishReason
from deployments.contract import Completion, Finished, SequenceOutcome, TokenFrame, TokenRun
from deployments.ingress.generation.frames import RequestInbox, RequestInboxes, SequenceUpdate
from tests.fakes import token_logprobs

T = TypeVar("T")
ENDING = Finished(FinishReason.LENGTH)


def run(work: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(work)


def _completion(*sequences: list[int]) -> Completion:
    return Completion(
        [
            SequenceOutcome(tokens, ENDING, [token_logprobs(token, 1) for token in tokens])
            for tokens in sequences
        ]
    )


def _run_of(tokens: list[int], start: int, index: int = 0) -> TokenRun:
    return TokenRun("r", index, start, tokens, [token_logprobs(token, 1) for token in tokens])


async def _take_at_once(inbox: RequestInbox) -> list[SequenceUpdate]:
    """What is there, without waiting for more."""
    reading = asyncio.create_task(inbox.take())
    await asyncio.sleep(0)
    if reading.done():
        return reading.result()
    reading.cancel()
    return []


def test_updates_are_in_order_and_the_ending_is_last() -> None:
    async def story() -> None:
        inbox = RequestInbox(2)
        inbox.deliver(_run_of([5, 6], 0, index=1))
        inbox.deliver(_run_of([1], 0))
        inbox.deliver(_run_of([2], 1))
        updates = {update.index: update for update in await inbox.take()}
        assert updates[0].tokens == [1, 2]
        assert updates[1].tokens == [5, 6]
        assert updates[0].ending is None
        inbox.complete(_completion([1, 2, 3], [5, 6]))
        last = await inbox.take()
        assert [(update.tokens, update.ending) for update in last] == [([3], ENDING), ([], ENDING)]
        assert await inbox.take() == []

    run(story())


@settings(deadline=None)
@given(
    total=st.integers(1, 20),
    cuts=st.lists(st.tuples(st.integers(0, 19), st.integers(1, 6)), max_size=30),
    taken=st.lists(st.booleans(), max_size=30),
)
def test_any_frames_and_the_completion_give_each_token_once(
    total: int, cuts: list[tuple[int, int]], taken: list[bool]
) -> None:
    """Runs in any order, lost, doubled, overlapping."""
    tokens = list(range(total))

    async def story() -> tuple[list[int], list[float]]:
        inbox = RequestInbox(1)
        updates: list[SequenceUpdate] = []
        for cut_index, (start, length) in enumerate(cuts):
            inbox.deliver(_run_of(tokens[start : start + length], start))
            if cut_index < len(taken) and taken[cut_index]:
                updates += await _take_at_once(inbox)
        inbox.complete(_completion(tokens))
        updates += await inbox.take()
        logprobs = [entry.logprob for update in updates for entry in update.logprobs or []]
        return [token for update in updates for token in update.tokens], logprobs

    seen, logprobs = run(story())
    assert seen == tokens
    assert logprobs == [token_logprobs(token, 1).logprob for token in tokens]


def test_a_gap_is_filled_by_a_late_frame() -> None:
    async def story() -> None:
        inbox = RequestInbox(1)
        inbox.deliver(_run_of([1], 0))
        inbox.deliver(_run_of([3], 2))
        [update] = await inbox.take()
        assert update.tokens == [1]
        inbox.deliver(_run_of([2], 1))
        [update] = await inbox.take()
        assert update.tokens == [2, 3]

    run(story())


def test_an_overlapping_run_releases_an_early_one() -> None:
    async def story() -> None:
        inbox = RequestInbox(1)
        inbox.deliver(_run_of([6, 7, 8], 5))
        inbox.deliver(_run_of([4], 3))
        inbox.deliver(_run_of([1, 2, 3, 4, 5, 6, 7], 0))
        [update] = await inbox.take()
        assert update.tokens == [1, 2, 3, 4, 5, 6, 7, 8]
        assert not inbox._channels[0].early

    run(story())


def test_a_reader_waits_and_gets_all_updates() -> None:
    async def story() -> None:
        inbox = RequestInbox(1)
        reading = asyncio.create_task(inbox.take())
        await asyncio.sleep(0)
        assert not reading.done()
        inbox.deliver(_run_of([1], 0))
        inbox.deliver(_run_of([2, 3], 1))
        [update] = await reading
        assert update.tokens == [1, 2, 3]

    run(story())


def test_a_failed_call_raises_for_the_reader() -> None:
    async def story() -> None:
        inbox = RequestInbox(1)
        inbox.fail(ValueError("lost"))
        with pytest.raises(ValueError, match="lost"):
            await inbox.take()

    run(story())


def test_unknown_requests_and_invalid_runs_are_ignored() -> None:
    async def story() -> None:
        inboxes = RequestInboxes()
        inbox = inboxes.open("r", 1)
        inboxes.open("silent", 1, listen=False)
        stranger = TokenRun("gone", 0, 0, [1])
        inboxes.deliver(TokenFrame([stranger, _run_of([9], 0, index=7), _run_of([1], 0)]))
        [update] = await inbox.take()
        assert (update.index, update.tokens) == (0, [1])
        assert len(inboxes) == 1
        inboxes.close("r")
        inboxes.close("r")
        assert len(inboxes) == 0

    run(story())
