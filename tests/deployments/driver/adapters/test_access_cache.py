"""Rights belong to callers and end; versions are the same for all; tokens are not kept."""

import pytest

from configs.adapters import FetchConfig
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from deployments.driver.adapters.access_cache import AccessCache
from sources.base import FoundAdapter
from tests.clocks import Clock

SQL = AdapterReference(AdapterSource.HUB, "acme/sql")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def answers(clock: Clock) -> AccessCache:
    return AccessCache(FetchConfig(recheck_s=30, grace_s=100, refusal_s=5), clock)


def found(origin: str = "v1", open_to_all: bool = False) -> FoundAdapter:
    return FoundAdapter(SQL, origin, open_to_all=open_to_all)


def test_an_access_is_for_its_caller_and_for_a_while(answers: AccessCache, clock: Clock) -> None:
    good, other = answers.caller("hf_good"), answers.caller("hf_other")
    answers.record(SQL, good, found())
    assert answers.fresh(SQL, good) == found()
    for caller in (other, answers.caller(False), answers.caller(True)):
        assert answers.fresh(SQL, caller) is None
        assert answers.confirmed(SQL, caller) is None
    clock.now += 29
    assert answers.fresh(SQL, good) == found()
    clock.now += 1
    assert answers.fresh(SQL, good) is None


def test_open_adapters_are_for_all_callers_while_they_are_open(answers: AccessCache) -> None:
    good, anonymous = answers.caller("hf_good"), answers.caller(False)
    answers.record(SQL, anonymous, found(open_to_all=True))
    assert answers.fresh(SQL, good) is not None
    answers.record(SQL, good, found())
    assert answers.fresh(SQL, good) is not None
    assert answers.fresh(SQL, anonymous) is None


def test_an_unreachable_source_serves_confirmed_callers_for_a_while(
    answers: AccessCache, clock: Clock
) -> None:
    good = answers.caller("hf_good")
    answers.record(SQL, good, found())
    clock.now += 99
    assert answers.confirmed(SQL, good) == found()
    assert answers.fresh(SQL, good) == found(), "the source is not called again at once"
    clock.now += 5
    assert answers.fresh(SQL, good) is None
    assert answers.confirmed(SQL, good) is None, "grace does not renew itself"


def test_a_refusal_ends_an_access_and_is_repeated_for_a_while(
    answers: AccessCache, clock: Clock
) -> None:
    good, other = answers.caller("hf_good"), answers.caller("hf_other")
    for caller in (good, other):
        answers.record(SQL, caller, found())
    answers.refuse(SQL, good, AdapterError(AdapterRefusal.NOT_FOUND, "gone"))
    with pytest.raises(AdapterError, match="gone"):
        answers.fresh(SQL, good)
    assert answers.fresh(SQL, other) is not None
    clock.now += 5
    assert answers.fresh(SQL, good) is None
    assert answers.confirmed(SQL, good) is None


def test_an_unreachable_source_ends_no_access(answers: AccessCache, clock: Clock) -> None:
    good = answers.caller("hf_good")
    answers.record(SQL, good, found())
    answers.refuse(SQL, good, AdapterError(AdapterRefusal.UNAVAILABLE, "broken"))
    clock.now += 5
    assert answers.confirmed(SQL, good) == found()


def test_a_new_version_is_for_all_callers(answers: AccessCache) -> None:
    """Otherwise the version of a name would depend on the caller."""
    good, other = answers.caller("hf_good"), answers.caller("hf_other")
    answers.record(SQL, good, found("v1"))
    answers.record(SQL, other, found("v2"))
    assert answers.fresh(SQL, good) == found("v2")


def test_tokens_are_not_kept(answers: AccessCache) -> None:
    caller = answers.caller("hf_secret")
    answers.record(SQL, caller, found())
    answers.refuse(SQL, caller, AdapterError(AdapterRefusal.NOT_FOUND, "gone"))
    assert "hf_secret" not in repr(vars(answers))
    assert caller != AccessCache(FetchConfig()).caller("hf_secret"), "the hash has a key"


def test_memory_is_bounded(answers: AccessCache, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.driver.adapters.access_cache._MAX_ENTRIES", 10)
    for index in range(50):
        reference = AdapterReference(AdapterSource.HUB, f"acme/a{index}")
        answers.record(reference, "me", found())
        answers.refuse(reference, "you", AdapterError(AdapterRefusal.NOT_FOUND, "gone"))
    sizes = [len(answers._accesses), len(answers._refused), len(answers._found)]
    assert max(sizes) <= 10
