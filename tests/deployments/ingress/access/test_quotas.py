import pytest

from deployments.contract import ErrorKind
from deployments.ingress.access.quotas import Bucket, Quota
from deployments.ingress.http.errors import RequestError
from tests.clocks import Clock


def test_a_bucket_fills_by_the_minute_and_no_more_than_that() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    bucket.take(60)
    assert bucket.seconds_until(1) == pytest.approx(1.0)
    clock.now += 10
    assert bucket.seconds_until(10) == pytest.approx(0.0)
    assert bucket.seconds_until(11) == pytest.approx(1.0)
    clock.now += 3600
    assert bucket.seconds_until(60) == 0.0
    assert bucket.seconds_until(61) > 0.0


def test_requests_beyond_the_quota_wait_and_are_not_counted() -> None:
    clock = Clock()
    quota = Quota(2, None, clock)
    quota.count_request()
    quota.count_request()
    for _ in range(5):
        with pytest.raises(RequestError, match="requests per minute") as refusal:
            quota.count_request()
        assert refusal.value.kind is ErrorKind.QUOTA
        assert refusal.value.retry_after_s == pytest.approx(30.0)
    clock.now += 30
    quota.count_request()


def test_a_long_answer_leaves_a_debt_that_time_reduces() -> None:
    clock = Clock()
    quota = Quota(None, 600, clock)
    quota.admit_tokens()
    quota.take_tokens(1799)
    with pytest.raises(RequestError, match="tokens per minute") as refusal:
        quota.admit_tokens()
    assert refusal.value.retry_after_s == pytest.approx(120.0)
    clock.now += 120
    quota.admit_tokens()


def test_no_limit_is_no_limit() -> None:
    quota = Quota(None, None)
    for _ in range(1000):
        quota.count_request()
        quota.take_tokens(10**9)
        quota.admit_tokens()
