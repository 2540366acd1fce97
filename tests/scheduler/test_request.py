"""A request's lengths and how it ends."""

import pytest

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler.events import ClientCancelled
from scheduler.request import Request, Status
from tests.scheduler.small import request


def test_it_ends_by_length_at_its_last_permitted_token() -> None:
    asked = request(0, max_new_tokens=2)
    assert asked.accept(5) is None
    assert asked.accept(5) is FinishReason.LENGTH
    assert asked.num_generated == 2


def test_a_stop_token_as_the_last_permitted_token_counts_as_a_stop_token() -> None:
    asked = request(0, max_new_tokens=2, stop=(9,))
    asked.accept(5)
    assert asked.accept(9) is FinishReason.STOP_TOKEN


def test_stop_tokens_wait_for_the_minimum() -> None:
    stopping = Stopping(max_new_tokens=5, stop_token_ids=(9,), min_new_tokens=3)
    asked = Request(("r", 0), [1], Sampling(), stopping)
    assert [asked.accept(9) for _ in range(3)] == [None, None, FinishReason.STOP_TOKEN]


def test_pending_tokens_count_towards_the_budget() -> None:
    asked = request(0, [1, 2], max_new_tokens=2)
    asked.pending = 1
    assert (asked.total, asked.exhausted) == (3, False)
    asked.accept(4)
    assert (asked.total, asked.exhausted) == (4, True)


def test_truncation_cuts_tokens_and_logprobs_but_never_the_prompt() -> None:
    asked = request(0, [1, 2], max_new_tokens=9)
    for token in (4, 5, 6):
        asked.accept(token)
        asked.logprobs.append(TokenLogprobs(-1.0, [], []))
    asked.truncate(2)
    assert asked.tokens == [1, 2, 4, 5]
    assert len(asked.logprobs) == 2
    asked.truncate(7)
    assert asked.num_generated == 2
    asked.truncate(-1)
    assert asked.tokens == [1, 2]


def test_it_ends_once_and_tells_everything() -> None:
    asked = request(0, [1, 2], max_new_tokens=9)
    asked.accept(4)
    ended = asked.ended(ClientCancelled())
    assert (ended.tokens, ended.logprobs, ended.ending) == ([4], None, ClientCancelled())
    assert asked.status is Status.ENDED
    with pytest.raises(AssertionError, match="ended twice"):
        asked.ended(ClientCancelled())


def test_rewinding_keeps_the_tokens_and_nothing_else() -> None:
    asked = request(0, [1, 2], max_new_tokens=9)
    asked.accept(4)
    asked.computed, asked.scheduled, asked.pending, asked.batch_slot = 2, 3, 1, 7
    asked.blocks, asked.registered = [3], 1
    asked.rewind()
    assert asked.tokens == [1, 2, 4]
    assert (asked.computed, asked.scheduled, asked.pending, asked.batch_slot) == (0, 0, 0, -1)
    assert (asked.blocks, asked.registered, asked.status) == ([], 0, Status.WAITING)


def test_lengths_out_of_order_are_noticed() -> None:
    asked = request(0, [1, 2])
    asked.check(4)
    asked.computed = 1
    with pytest.raises(AssertionError):
        asked.check(4)
    asked.scheduled = 2
    with pytest.raises(AssertionError):
        asked.check(4)
    asked.blocks = [0]
    asked.check(4)
