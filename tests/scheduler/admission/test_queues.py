"""AdapterQueues: which request is next, counted in tokens."""

from collections import Counter
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.admission.queues import PASSED_OVER, AdapterQueues, QueueState, _Round, cost
from scheduler.admission.rate_limits import QueueKey, RateLimits
from scheduler.request import Request
from tests.scheduler.small import make_request

ONE, TWO, THREE = AdapterKey(1), AdapterKey(2), AdapterKey(3)


class Shares(RateLimits):
    """Rate limits with the shares that a function returns."""

    def __init__(self, share_of: Callable[[QueueKey], AdapterShare]) -> None:
        super().__init__()
        self._given = share_of

    def share_of(self, key: QueueKey) -> AdapterShare:
        return self._given(key)


def queued(queues: AdapterQueues, request: Request, serial: int) -> Request:
    request.serial = serial
    queues.append(request)
    if not queues.admits(request.adapter):
        queues.enter(request.adapter, QueueState.ADMITS)
    return request


def take(queues: AdapterQueues) -> Request | None:
    request = queues.next_request()
    if request is not None:
        assert queues.next_request() is request, "a second call changes the order"
        queues.admit(request)
    queues.check()
    return request


def test_one_queue_is_first_come_first_served() -> None:
    queues = AdapterQueues(10)
    request = [queued(queues, make_request(i), i) for i in range(3)]
    assert [take(queues) for _ in range(4)] == [*request, None]


def test_a_flood_of_one_adapter_lets_the_others_through() -> None:
    queues = AdapterQueues(7)
    for index in range(20):
        queued(queues, make_request(index, adapter=1), index)
    late = queued(queues, make_request(20, adapter=2), 20)
    order = [take(queues) for _ in range(21)]
    assert order.index(late) <= 2


def test_rounds_are_fair_in_tokens_not_in_requests() -> None:
    queues = AdapterQueues(50)
    for index in range(200):
        queued(queues, make_request(index, [1] * 45, 5, adapter=1), index)
        queued(queues, make_request(300 + index, [1] * 5, 5, adapter=2), 300 + index)
    tokens: Counter[int | None] = Counter()
    for _ in range(110):
        request = take(queues)
        assert request is not None
        tokens[request.adapter] += cost(request)
    assert abs(tokens[1] - tokens[2]) <= 100


def test_a_preempted_request_is_first_and_costs_nothing() -> None:
    queues = AdapterQueues(1)
    for index in range(1, 4):
        queued(queues, make_request(index), index)
    for serial in (7, 0):
        request = make_request(serial)
        request.serial, request.first_scheduled = serial, 0.0
        queues.requeue(request)
        assert cost(request) == 0
    order = [take(queues) for _ in range(5)]
    assert [each.serial for each in order if each] == [0, 7, 1, 2, 3]


def test_a_pending_load_keeps_its_order_outside_the_round() -> None:
    queues = AdapterQueues(100)
    for serial, key in enumerate((1, 2, 3)):
        queued(queues, make_request(serial, adapter=key), serial)
    queues.enter(TWO, QueueState.WAITS_FOR_DEVICE, 5)
    queues.enter(ONE, QueueState.WAITS_FOR_DEVICE, 9)
    assert queues.pending_loads(9) == [TWO, ONE]
    assert queues.pending_loads(1) == [TWO]
    request = take(queues)
    assert request is not None
    assert request.adapter == THREE
    assert take(queues) is None
    queues.enter(TWO, QueueState.OVER_LIMIT)
    assert queues.pending_loads(9) == [ONE]
    queues.enter(TWO, QueueState.WAITS_FOR_DEVICE, 20)
    assert queues.pending_loads(9) == [TWO, ONE]
    assert queues.pending_since(TWO) == 5
    queues.check()


def test_a_queue_keeps_its_wait_until_a_request_of_it_is_admitted() -> None:
    queues = AdapterQueues(100)
    for serial in range(2):
        queued(queues, make_request(serial, adapter=1), serial)
    queues.enter(ONE, QueueState.WAITS_FOR_DEVICE, 5)
    queues.enter(ONE, QueueState.ADMITS)
    assert queues.admits(ONE)
    assert queues.pending_loads(9) == []
    assert queues.pending_since(ONE) == 5
    assert take(queues) is not None
    assert queues.pending_since(ONE) is None
    queues.enter(ONE, QueueState.WAITS_FOR_DEVICE, 8)
    assert queues.pending_since(ONE) == 8


def test_a_queue_over_its_limit_is_not_served() -> None:
    queues = AdapterQueues(100)
    queued(queues, make_request(0, adapter=1), 0)
    queues.enter(ONE, QueueState.OVER_LIMIT)
    assert take(queues) is None
    assert len(queues) == 1
    queues.enter(ONE, QueueState.ADMITS)
    assert take(queues) is not None
    assert take(queues) is None


def test_removing_the_last_request_removes_the_queue_wherever_it_is() -> None:
    queues = AdapterQueues(100)
    request = [queued(queues, make_request(i, adapter=i + 1), i) for i in range(3)]
    queues.enter(ONE, QueueState.WAITS_FOR_DEVICE, 0)
    queues.enter(TWO, QueueState.OVER_LIMIT)
    for each in request:
        assert queues.waiting_for(each.adapter) == [each]
        queues.remove(each)
        queues.check()
    assert len(queues) == 0
    assert list(queues) == []


@settings(deadline=None)
@given(
    st.lists(st.tuples(st.integers(0, 4), st.integers(1, 30)), min_size=1, max_size=60),
    st.integers(1, 40),
)
def test_between_two_admissions_others_take_a_quantum_and_a_request_each(
    arrivals: list[tuple[int, int]], quantum: int
) -> None:
    """The bound of the module: rounds are counted in the longest request over the quantum."""
    queues = AdapterQueues(quantum)
    for serial, (key, length) in enumerate(arrivals):
        queued(queues, make_request(serial, [1] * length, 1, adapter=key + 1), serial)
    longest = max(length for _, length in arrivals) + 1
    rounds = -(-longest // quantum) + 1
    bound = (rounds * quantum + longest) * len({key for key, _ in arrivals})
    waited: Counter[int] = Counter()
    while (request := take(queues)) is not None:
        served = request.adapter or 0
        waited.pop(served, None)
        for key in {each.adapter or 0 for each in queues}:
            if key != served:
                waited[key] += cost(request)
                assert waited[key] <= bound


def test_weights_share_tokens_in_their_proportion() -> None:
    weights = {1: 1.0, 2: 3.0, 3: 0.5}
    queues = AdapterQueues(20, Shares(lambda key: AdapterShare(weight=weights[key or 0])))
    for index in range(400):
        for key in weights:
            serial = 3 * index + key
            queued(queues, make_request(serial, [1] * 30, 10, adapter=key), serial)
    tokens: Counter[int] = Counter()
    for _ in range(450):
        request = take(queues)
        assert request is not None
        tokens[request.adapter or 0] += cost(request)
    assert tokens[2] == pytest.approx(3 * tokens[1], abs=160)
    assert tokens[1] == pytest.approx(2 * tokens[3], abs=160)


def test_rounds_in_which_no_queue_can_pay_take_no_time() -> None:
    """As many rounds as a long request and a small quantum need, skipped and not walked."""
    queues = AdapterQueues(1, Shares(lambda _: AdapterShare(weight=0.01)))
    for key in range(1, 4):
        queued(queues, make_request(key, [1] * 2_000_000, 1, adapter=key), key)
    assert take(queues) is not None
    assert all(abs(queue.credit) < 2_000_010 for queue in queues._queues.values())


def test_skipping_rounds_changes_no_order() -> None:
    """The same order as walking every round."""

    def order(patch: pytest.MonkeyPatch | None) -> list[int]:
        if patch is not None:
            patch.setattr(_Round, "_skip", lambda self, quantum: None)
        queues = AdapterQueues(3, Shares(lambda key: AdapterShare(weight=(key or 1) / 2)))
        for serial in range(60):
            length = 1 + serial * 7 % 40
            queued(queues, make_request(serial, [1] * length, 1, adapter=serial % 4 + 1), serial)
        return [each.serial for _ in range(60) if (each := take(queues)) is not None]

    skipped = order(None)
    with pytest.MonkeyPatch.context() as patch:
        assert order(patch) == skipped
    assert len(skipped) == 60


def test_the_highest_priority_is_first_and_lower_ones_are_still_served() -> None:
    queues = AdapterQueues(100, Shares(lambda key: AdapterShare(priority=(key or 0) - 2)))
    for serial in range(300):
        queued(queues, make_request(serial, adapter=serial % 3 + 1), serial)
    served = [each.adapter or 0 for _ in range(90) if (each := take(queues)) is not None]
    assert set(served[:PASSED_OVER]) == {3}
    counts = Counter(served)
    assert counts[3] > counts[2] >= 4
    assert counts[3] > counts[1] >= 4


@settings(deadline=None)
@given(st.sets(st.integers(-8, 8), min_size=2, max_size=17), st.integers(100, 400))
def test_every_priority_has_one_of_so_many_admissions(present: set[int], num: int) -> None:
    priorities = sorted(present)
    n = len(priorities)
    queues = AdapterQueues(100, Shares(lambda key: AdapterShare(priority=priorities[key or 0])))
    last = dict.fromkeys(range(n), 0)
    for key in range(n):
        queued(queues, make_request(key, adapter=key), key)
    for tick in range(1, num):
        request = take(queues)
        assert request is not None
        key = request.adapter or 0
        last[key] = tick
        queued(queues, make_request(n + tick, adapter=key), n + tick)
        assert tick - min(last.values()) <= PASSED_OVER + 3 * n


def test_a_change_of_priority_moves_a_queue_that_waits() -> None:
    priorities = {1: 0, 2: 0}
    queues = AdapterQueues(100, Shares(lambda key: AdapterShare(priority=priorities[key or 0])))
    for serial in range(8):
        queued(queues, make_request(serial, adapter=serial % 2 + 1), serial)
    priorities[2] = 5
    queues.update_shares()
    assert take(queues) is None, "no queue is in the round until resumed"
    for key in (ONE, TWO):
        queues.enter(key, QueueState.ADMITS)
    assert [each.adapter for _ in range(4) if (each := take(queues)) is not None] == [TWO] * 4


def test_a_higher_priority_counts_as_steps_waited() -> None:
    queues = AdapterQueues(100, Shares(lambda key: AdapterShare(priority=1 if key == TWO else 0)))
    for key in (1, 2, 3):
        queued(queues, make_request(key, adapter=key), key)
    queues.enter(ONE, QueueState.WAITS_FOR_DEVICE, 0, priority_steps=10)
    queues.enter(TWO, QueueState.WAITS_FOR_DEVICE, 12, priority_steps=10)
    queues.enter(THREE, QueueState.WAITS_FOR_DEVICE, 3, priority_steps=10)
    assert queues.pending_loads(9) == [ONE, TWO, THREE]
    assert queues.pending_since(TWO) == 12


def test_a_flood_is_refused_before_other_adapters() -> None:
    queues = AdapterQueues(100)
    for serial in range(10):
        assert not queues.is_full(ONE, 10)
        queued(queues, make_request(serial, adapter=1), serial)
    assert queues.is_full(ONE, 10)
    for serial in range(10, 15):
        assert not queues.is_full(TWO, 10)
        queued(queues, make_request(serial, adapter=2), serial)
    assert queues.is_full(TWO, 10), "half of it is theirs"
    assert not queues.is_full(THREE, 10)
    for serial in range(15, 20):
        queued(queues, make_request(serial, adapter=serial), serial)
    assert queues.is_full(THREE, 10), "never more than twice as many"
    assert queues.is_full(None, 0)
