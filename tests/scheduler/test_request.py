"""A request's lengths and how it ends."""

import pytest

from configs.wire.plan import TokenLogprobs
from configs.wire.sampling import FinishReason, Sampling, Stopping
from scheduler.events import ClientCancelled
from scheduler.request import Request, Status
from tests.scheduler.small import make_request


def test_it_ends_by_length_at_its_last_permitted_token() -> None:
    request = make_request(0, max_new_tokens=2)
    assert request.accept(5) is None
    assert request.accept(5) is FinishReason.LENGTH
    assert request.num_generated == 2


def test_a_stop_token_as_the_last_permitted_token_counts_as_a_stop_token() -> None:
    request = make_request(0, max_new_tokens=2, stop=(9,))
    request.accept(5)
    assert request.accept(9) is FinishReason.STOP_TOKEN


def test_stop_tokens_wait_for_the_minimum() -> None:
    stopping = Stopping(max_new_tokens=5, stop_token_ids=(9,), min_new_tokens=3)
    request = Request(("r", 0), [1], Sampling(), stopping)
    assert [request.accept(9) for _ in range(3)] == [None, None, FinishReason.STOP_TOKEN]


def test_pending_tokens_count_towards_the_budget() -> None:
    request = make_request(0, [1, 2], max_new_tokens=2)
    request.pending = 1
    assert (request.total, request.exhausted) == (3, False)
    request.accept(4)
    assert (request.total, request.exhausted) == (4, True)


def test_truncation_cuts_tokens_and_logprobs_but_never_the_prompt() -> None:
    request = make_request(0, [1, 2], max_new_tokens=9)
    for token in (4, 5, 6):
        request.accept(token)
        request.logprobs.append(TokenLogprobs(-1.0, [], []))
    request.truncate(2)
    assert request.tokens == [1, 2, 4, 5]
    assert len(request.logprobs) == 2
    request.truncate(7)
    assert request.num_generated == 2
    request.truncate(-1)
    assert request.tokens == [1, 2]


def test_it_ends_once_with_all_its_results() -> None:
    request = make_request(0, [1, 2], max_new_tokens=9)
    request.accept(4)
    ended = request.ended(ClientCancelled())
    assert (ended.tokens, ended.logprobs, ended.ending) == ([4], None, ClientCancelled())
    assert request.status is Status.ENDED
    with pytest.raises(AssertionError, match="ended twice"):
        request.ended(ClientCancelled())


def test_rewinding_keeps_the_tokens_and_nothing_else() -> None:
    request = make_request(0, [1, 2], max_new_tokens=9)
    request.accept(4)
    request.computed, request.scheduled, request.pending, request.batch_slot = 2, 3, 1, 7
    request.tables, request.registered = [[3]], 1
    request.rewind()
    assert request.tokens == [1, 2, 4]
    assert (request.computed, request.scheduled, request.pending, request.batch_slot) == (
        0,
        0,
        0,
        -1,
    )
    assert (request.tables, request.registered, request.status) == ([], 0, Status.WAITING)


def test_lengths_out_of_order_are_noticed() -> None:
    request = make_request(0, [1, 2])
    request.check(4)
    request.computed = 1
    with pytest.raises(AssertionError):
        request.check(4)
    request.scheduled = 2
    with pytest.raises(AssertionError):
        request.check(4)
    request.tables, request.covered = [[0]], 4
    request.check(4)
