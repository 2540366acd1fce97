"""Limits and refusals, with the numbers that matter in their messages."""

import pytest

from configs.engine import CacheConfig, EngineConfig, LimitsConfig
from configs.model import ModelConfig
from scheduler.admission.limits import (
    DrainRate,
    InvalidRequest,
    Limits,
    Overloaded,
    refuse_impossible,
)
from tests.scheduler.small import capacity, make_request


def test_limits_come_from_the_engine_config() -> None:
    config = EngineConfig(
        model=ModelConfig(id="tiny"),
        cache=CacheConfig(prefix_caching=False),
        limits=LimitsConfig(
            max_step_tokens=300,
            max_mixed_prompt_tokens=30,
            max_running=20,
            max_queued=7,
            max_total_tokens=99,
        ),
    )
    limits = Limits.from_config(config, steps_ahead=1)
    assert limits.max_step_tokens == limits.quantum_tokens == 300
    assert limits.max_mixed_prompt_tokens == 30
    assert (limits.max_running, limits.max_queued, limits.max_total_tokens) == (20, 7, 99)
    assert not limits.prefix_caching
    assert limits.steps_ahead == 1


@pytest.mark.parametrize(
    "wrong",
    [
        {"max_step_tokens": 0},
        {"max_mixed_prompt_tokens": 0},
        {"steps_ahead": 0},
        {"max_queued": -1},
        {"max_running": 0},
    ],
)
def test_limits_under_which_nothing_runs_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="must"):
        Limits(**wrong)  # type: ignore[arg-type]


def test_an_empty_prompt_is_refused() -> None:
    with pytest.raises(InvalidRequest, match="no tokens"):
        refuse_impossible(make_request(0, []), Limits(), capacity())


def test_a_sequence_longer_than_the_ranks_buffers_is_refused() -> None:
    refuse_impossible(make_request(0, [1] * 190, 10), Limits(), capacity())
    with pytest.raises(InvalidRequest, match="at most 200"):
        refuse_impossible(make_request(0, [1] * 190, 11), Limits(), capacity())
    with pytest.raises(InvalidRequest, match="at most 50"):
        refuse_impossible(make_request(0, [1] * 40, 11), Limits(max_total_tokens=50), capacity())


def test_a_sequence_that_the_cache_never_holds_is_refused() -> None:
    tiny = capacity(num_blocks=5)
    refuse_impossible(make_request(0, [1] * 10, 11), Limits(), tiny)
    with pytest.raises(InvalidRequest, match="holds 20 tokens"):
        refuse_impossible(make_request(0, [1] * 10, 12), Limits(), tiny)


def test_overload_says_when_to_try_again() -> None:
    error = Overloaded(12, 3.0)
    assert error.retry_after_s == 3.0
    assert "12" in str(error)


def test_the_pace_follows_how_fast_requests_leave() -> None:
    pace = DrainRate()
    assert pace.overload(1000).retry_after_s == 1.0
    for second in range(1, 101):
        pace.record(2, float(second))
    assert pace.overload(40).retry_after_s == pytest.approx(10.0, rel=0.01)
    assert pace.overload(10_000).retry_after_s == 60.0


def test_the_pace_knows_waves_and_forgets_idle_hours() -> None:
    """64 requests that end together, every 5 seconds, are 78 ms each."""
    pace = DrainRate()
    for hour in (1, 2):
        pace.begin(3600.0 * hour)
        for wave in range(1, 9):
            for step, count in enumerate((1, 20, 40, 3)):
                pace.record(count, 3600.0 * hour + 5.0 * wave + 0.01 * step)
    assert pace.overload(256).retry_after_s == pytest.approx(256 / 2 * 5 / 64, rel=0.3)
