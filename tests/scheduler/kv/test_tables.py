"""KV groups: what each holds of a request, what it frees, and what a hit needs."""

from itertools import pairwise

import msgspec
import pytest

from configs.kv_groups import KvGroup, blocks_of, held_tokens
from configs.wire.plan import Capacity
from scheduler.admission.limits import InvalidRequest, Limits
from scheduler.kv.prefix_cache import FREED, PrefixCache
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request
from tests.scheduler.test_scheduler import answer

FULL = KvGroup(4)
SLIDING = KvGroup(4, window=8)
CHUNKED = KvGroup(4, chunk=8)


def grouped(num_blocks: int, *groups: KvGroup) -> Capacity:
    return msgspec.structs.replace(capacity(num_blocks), kv_groups=groups)


def run(scheduler: Scheduler) -> int:
    """Step until all is quiet; returns the most blocks that were held."""
    most = 0
    while scheduler.has_work:
        plan = scheduler.schedule(0.0)
        scheduler.apply(plan, answer(plan), 0.0)
        scheduler.check()
        snapshot = scheduler.snapshot()
        most = max(most, snapshot.num_blocks - snapshot.free_blocks)
    return most


@pytest.mark.parametrize("group", [SLIDING, CHUNKED, KvGroup(4, window=1), KvGroup(4, window=6)])
def test_what_is_needed_never_moves_back_and_never_exceeds_what_is_said(group: KvGroup) -> None:
    for position, following in pairwise(range(60)):
        assert group.first_seen(position) <= group.first_seen(following) <= following
        held = group.blocks(following) - group.first_block(position)
        assert held <= group.most_held(60), (group, position)


def test_tokens_and_blocks_of_whole_sequences() -> None:
    assert held_tokens((FULL,), 10) == 40
    assert held_tokens((FULL, KvGroup(12, window=3)), 10) == 24
    assert blocks_of((FULL, KvGroup(12, window=3)), 24) == 8


@pytest.mark.parametrize(("group", "most"), [(SLIDING, 3), (CHUNKED, 2)])
def test_a_long_answer_holds_a_window_of_blocks(group: KvGroup, most: int) -> None:
    scheduler = Scheduler(
        Limits(steps_ahead=1, max_step_tokens=4, max_running=2), grouped(3, group)
    )
    scheduler.add(make_request(0, [1] * 20, max_new_tokens=100), 0.0)
    assert run(scheduler) == most
    assert scheduler.snapshot().num_preemptions == 0


def test_a_longer_context_fits_beside_a_sliding_group() -> None:
    """Half of the layers slide: 24 blocks hold 48 tokens of both, or 84 of one request."""
    limits = Limits(steps_ahead=1, max_step_tokens=4, max_running=2)
    for groups, most in (((FULL, FULL), 48), ((FULL, SLIDING), 84)):
        scheduler = Scheduler(limits, grouped(24, *groups))
        with pytest.raises(InvalidRequest, match=f"which holds {most} tokens"):
            scheduler.add(make_request(0, [1] * 30, max_new_tokens=most - 28), 0.0)
        scheduler.add(make_request(0, [1] * 30, max_new_tokens=most - 29), 0.0)
        assert run(scheduler) <= 24


def test_more_requests_run_at_once_where_layers_slide() -> None:
    def running(*groups: KvGroup) -> int:
        limits = Limits(steps_ahead=1, max_step_tokens=8, max_running=8, prefix_caching=False)
        scheduler = Scheduler(limits, grouped(64, *groups))
        for index in range(8):
            scheduler.add(make_request(index, [index + 1] * 40, max_new_tokens=40), 0.0)
        most = 0
        while scheduler.has_work:
            plan = scheduler.schedule(0.0)
            scheduler.apply(plan, answer(plan), 0.0)
            most = max(most, scheduler.snapshot().running)
        return most

    counts = [running(FULL, FULL), running(FULL, SLIDING), running(SLIDING, SLIDING)]
    assert counts == [2, 4, 6]


def test_blocks_are_freed_when_no_plan_in_flight_reads_them() -> None:
    scheduler = Scheduler(Limits(max_step_tokens=4, max_running=2), grouped(8, SLIDING))
    request = make_request(0, [1] * 20, max_new_tokens=9)
    scheduler.add(request, 0.0)
    flying = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    for freed in (0, 0, 1, 2):
        oldest = flying.pop(0)
        scheduler.apply(oldest, answer(oldest), 0.0)
        # The next position is the first that a plan in flight may compute.
        assert request.freed == [freed] == [SLIDING.first_block(request.computed)]
        flying.append(scheduler.schedule(0.0))


def test_a_hit_needs_a_window_of_sliding_blocks_and_all_others() -> None:
    scheduler = Scheduler(Limits(steps_ahead=1, max_step_tokens=8), grouped(30, FULL, SLIDING))
    scheduler.add(make_request(0, list(range(40)), max_new_tokens=1), 0.0)
    run(scheduler)
    for length in (40, 17):
        request = make_request(length, list(range(length)), max_new_tokens=1)
        scheduler.add(request, 0.0)
        plan = scheduler.schedule(0.0)
        found = (length - 1) // 4
        assert request.cached_tokens == plan.rows[0].start == found * 4
        full, sliding = request.tables
        assert FREED not in full
        assert sliding[: found - 2] == [FREED] * (found - 2)
        assert FREED not in sliding[found - 2 :]
        scheduler.cancel(request.id)
        scheduler.apply(plan, answer(plan), 0.0)


def test_a_hit_ends_where_a_group_has_lost_its_window() -> None:
    cache = PrefixCache(40, (FULL, SLIDING), enabled=True)
    first = make_request(0, list(range(32)))
    first.tables = [cache.pool.allocate(8), cache.pool.allocate(8)]
    first.scheduled = first.computed = 32
    cache.register(first)
    longer = make_request(1, list(range(40)))
    assert cache.match(longer).tokens == 32
    cache._forget(first.tables[1][6])
    assert cache.match(longer).tokens == 24
    cache._forget(first.tables[1][4])
    found = cache.match(longer)
    assert (found.tokens, found.known, found.state) == (16, 16, -1)
    assert found.tables == [first.tables[0][:4], [FREED, FREED, *first.tables[1][2:4]]]


def test_a_hit_ends_where_a_block_of_every_group_does() -> None:
    cache = PrefixCache(40, (KvGroup(12), SLIDING), enabled=True)
    first = make_request(0, list(range(40)))
    first.tables = [cache.pool.allocate(4), cache.pool.allocate(10)]
    first.scheduled = first.computed = 40
    cache.register(first)
    assert [cache.match(make_request(1, list(range(n)))).tokens for n in (12, 13, 24, 36, 37)] == [
        0, 12, 12, 24, 36,
    ]  # fmt: skip
