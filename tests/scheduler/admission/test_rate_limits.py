"""What an adapter may take, on a clock that the test moves."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.runtime import AdapterShare
from configs.wire.adapters import AdapterKey
from scheduler.admission.rate_limits import BURST_SECONDS, RateLimits

ONE, TWO = AdapterKey(1), AdapterKey(2)
EVEN = AdapterShare()


def shares(
    own: AdapterShare, default: AdapterShare = EVEN, base: AdapterShare = EVEN
) -> RateLimits:
    given = RateLimits()
    given.replace(base, default, {ONE: own})
    return given


def test_each_has_its_own_share_or_the_default() -> None:
    slow, fast, base = (AdapterShare(weight=weight) for weight in (0.5, 2, 3))
    given = shares(slow, default=fast, base=base)
    assert [given.share_of(key) for key in (ONE, TWO, None)] == [slow, fast, base]
    given.set_share(TWO, slow)
    assert given.share_of(TWO) == slow


def test_so_many_run_and_no_more_until_one_is_freed() -> None:
    given = shares(AdapterShare(max_concurrent=2))
    for _ in range(2):
        assert not given.is_over_limit(ONE, 0.0)
        given.admitted(ONE, 10, 0.0)
    assert given.is_over_limit(ONE, 0.0)
    assert not given.is_over_limit(TWO, 0.0)
    given.freed(ONE)
    assert not given.is_over_limit(ONE, 0.0)
    assert given.next_wake is None, "no debt is left"
    given.check({ONE: 1}, {})
    given.reset()
    given.check({}, {})


def test_an_adapter_in_debt_is_returned_when_the_debt_is_paid() -> None:
    given = shares(AdapterShare(tokens_per_second=10))
    given.admitted(ONE, 30, 100.0)  # the bucket held 10
    assert given.is_over_limit(ONE, 100.0)
    assert given.is_over_limit(ONE, 101.9)
    assert given.next_wake == pytest.approx(102.0)
    assert given.take_expired(101.9) == []
    assert given.take_expired(102.0) == [ONE]
    assert not given.is_over_limit(ONE, 102.0)
    assert given.next_wake is None


def test_a_full_bucket_holds_a_burst_and_no_more() -> None:
    given = shares(AdapterShare(tokens_per_second=10))
    given.admitted(ONE, 1, 0.0)
    given.charge(ONE, int(10 * BURST_SECONDS), 1000.0)
    assert not given.is_over_limit(ONE, 1000.0)
    given.charge(ONE, 1, 1000.0)
    assert given.is_over_limit(ONE, 1000.0)


def test_a_new_rate_changes_the_time_to_wake() -> None:
    given = shares(AdapterShare(tokens_per_second=1))
    given.admitted(ONE, 101, 0.0)
    assert given.is_over_limit(ONE, 0.0)
    given.replace(EVEN, EVEN, {ONE: AdapterShare(tokens_per_second=100)})
    assert given.is_over_limit(ONE, 0.0)
    assert given.next_wake == pytest.approx(1.0)
    given.replace(EVEN, EVEN, {})
    assert not given.is_over_limit(ONE, 0.0)
    assert not given.has_rates


def test_adapters_that_come_and_go_leave_no_bucket_behind() -> None:
    given = shares(EVEN, default=AdapterShare(tokens_per_second=100))
    for index in range(2, 5000):
        given.admitted(AdapterKey(index), 10, float(index))
        given.freed(AdapterKey(index))
    assert len(given._buckets) < 5
    given.check({}, {})


@given(
    st.lists(st.tuples(st.floats(0, 3), st.integers(1, 40)), min_size=1, max_size=40),
    st.floats(1, 50),
)
def test_an_adapter_takes_what_its_rate_allows_the_burst_and_one_prompt(
    arrivals: list[tuple[float, int]], rate: float
) -> None:
    given = shares(AdapterShare(tokens_per_second=rate))
    now, taken = 0.0, 0
    longest = max(prompt for _, prompt in arrivals)
    for pause, prompt in arrivals:
        now += pause
        while given.is_over_limit(ONE, now):
            wake = given.next_wake
            assert wake is not None
            now = max(now, wake)
            assert given.take_expired(now) == [ONE]
        given.admitted(ONE, prompt, now)
        taken += prompt
        assert taken <= rate * (now + BURST_SECONDS) + longest + 1e-3
