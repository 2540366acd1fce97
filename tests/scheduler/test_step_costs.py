"""The prompt budget of mixed steps: learned from what steps take, here by a made-up GPU."""

from collections.abc import Callable

import pytest
from msgspec import structs

from configs.wire.plan import StepPlan, StepResult
from scheduler.admission.limits import Limits
from scheduler.scheduler import Scheduler
from scheduler.step_costs import FIRST_TOKENS, LEAST_TOKENS, StepCosts
from tests.scheduler.small import capacity, make_request

GAP_S = 0.028

Cost = Callable[[int, int], float]
"""From prompt tokens and generating rows to seconds."""


def gpu(prompt_tokens: int, generating: int) -> float:
    """All weights are read; beyond 160 tokens the products are bound by operations."""
    decode = 0.0045 + 0.00006 * generating
    return max(decode, decode + 0.000022 * (prompt_tokens + generating - 160))


def slow(prompt_tokens: int, generating: int) -> float:
    return 12 * gpu(prompt_tokens, generating)


def quick(prompt_tokens: int, generating: int) -> float:
    return 0.002 + 0.000001 * prompt_tokens


def budgets(costs: StepCosts, cost: Cost, generating: int, steps: int) -> list[int]:
    """The prompt tokens of so many full mixed steps, each after a step that only generates."""
    found = []
    for _ in range(steps):
        costs.record(generating, generating, cost(0, generating))
        found.append(costs.budget(GAP_S, generating))
        tokens = found[-1]
        costs.record(tokens + generating, generating, cost(tokens, generating))
    return found


@pytest.mark.parametrize("generating", [1, 64, 200])
def test_steps_take_nearly_the_gap_and_no_more(generating: int) -> None:
    costs = StepCosts()
    found = budgets(costs, gpu, generating, 30)
    taken = [gpu(tokens, generating) for tokens in found[10:]]
    # Sizes are whole multiples of 128 tokens.
    bound = max(GAP_S, 3 * gpu(0, generating))
    assert min(taken) > bound - 0.000022 * 140
    assert max(taken) < bound * 1.02
    assert all((tokens + generating) % 128 == 0 for tokens in found[1:])


@pytest.mark.parametrize("seconds", [0.0, 0.019])
def test_a_first_step_that_seems_to_cost_nothing_is_corrected(seconds: float) -> None:
    """The result before it arrived late, together with its own."""
    costs = StepCosts()
    costs.record(1, 1, seconds)
    costs.record(513, 1, seconds)
    assert costs.budget(GAP_S, 1) == FIRST_TOKENS
    found = budgets(costs, gpu, 64, 30)
    assert gpu(found[-1], 64) < GAP_S * 1.02


def test_it_follows_those_that_generate() -> None:
    costs = StepCosts()
    few = budgets(costs, gpu, 2, 20)[-1]
    many = budgets(costs, gpu, 64, 20)[-1]
    assert many < few - 100
    assert budgets(costs, gpu, 2, 20)[-1] == few


def test_where_decoding_takes_longer_than_the_gap_prompts_still_go_on() -> None:
    found = budgets(StepCosts(), slow, 8, 40)
    longest = slow(found[-1], 8)
    assert found[-1] >= LEAST_TOKENS - 8
    assert longest < 3.1 * slow(0, 8)


def test_cheap_prompts_have_large_steps() -> None:
    assert budgets(StepCosts(), quick, 4, 12)[-1] > 10000


def test_a_disturbed_step_is_soon_forgotten() -> None:
    costs = StepCosts()
    before = budgets(costs, gpu, 16, 20)[-1]
    costs.record(before + 16, 16, 9.0)
    assert costs.budget(GAP_S, 16) >= before / 2
    assert budgets(costs, gpu, 16, 20)[-1] == before


def test_nothing_is_known_at_first() -> None:
    assert StepCosts().budget(GAP_S, 3) == FIRST_TOKENS


def run(scheduler: Scheduler, plan: StepPlan, now: float) -> None:
    tokens = [7] * sum(row.samples for row in plan.rows)
    scheduler.apply(plan, StepResult(plan.epoch, plan.step, tokens), now)


def test_the_scheduler_measures_its_steps() -> None:
    """One request generates while long prompts come; each step's time follows from its tokens."""
    limits = Limits(max_step_tokens=4096, token_gap_s=GAP_S, steps_ahead=2, max_running=8)
    large = structs.replace(capacity(), num_blocks=9000, max_total_tokens=100000)
    scheduler = Scheduler(limits, large)
    scheduler.add(make_request(0, [1] * 8, 90), 0.0)
    now, taken, plans = 0.0, [], []
    for step in range(60):
        if step == 4:
            scheduler.add(make_request(1, [2] * 30000, 5), now)
        while not (plan := scheduler.schedule(now)).empty:
            plans.append(plan)
        plan = plans.pop(0)
        tokens = sum(row.length for row in plan.rows)
        generating = sum(row.length == 1 for row in plan.rows)
        now += gpu(tokens - generating, generating)
        run(scheduler, plan, now)
        if tokens > 8:
            taken.append(gpu(tokens - generating, generating))
    assert len(taken) > 20
    assert max(taken) < GAP_S * 1.1
    assert max(taken[8:]) < GAP_S * 1.02
    assert min(taken[8:20]) > GAP_S * 0.85


def test_a_step_without_prompts_shows_what_many_rows_take() -> None:
    """Prompts come all the time, so no step would be without them."""
    limits = Limits(max_step_tokens=4096, token_gap_s=GAP_S, max_running=256)
    large = structs.replace(capacity(), num_blocks=90000, max_total_tokens=100000)
    scheduler = Scheduler(limits, large)
    for number in range(200):
        scheduler.add(make_request(number, [number + 1] * 8, 900), 0.0)
    now, plain = 0.0, []
    for step in range(400):
        if step % 10 == 0:
            scheduler.add(make_request(1000 + step, [1000 + step] * 20000, 2), now)
        plan = scheduler.schedule(now)
        tokens, generating = (
            sum(r.length for r in plan.rows),
            sum(r.length == 1 for r in plan.rows),
        )
        now += 3 * gpu(tokens - generating, generating)
        run(scheduler, plan, now)
        plain.append(tokens == generating)
    # 200 rows take 49.5 ms, more than the bound; beside them prompts may take twice as long.
    assert gpu(0, 200) * 3 > GAP_S
    assert 2 < sum(plain[20:]) < 12
    assert tokens - generating > 1000


def test_alone_or_beside_the_background_a_prompt_takes_whole_steps() -> None:
    limits = Limits(max_step_tokens=2048, token_gap_s=GAP_S, max_running=8)
    large = structs.replace(capacity(), num_blocks=9000, max_total_tokens=100000)
    for background in (False, True):
        scheduler = Scheduler(limits, large)
        first = make_request(0, [1] * 8, 90)
        first.background = True
        if background:
            scheduler.add(first, 0.0)
            scheduler.schedule(0.0)
        scheduler.add(make_request(1, [2] * 9000, 5), 0.0)
        assert max(row.length for row in scheduler.schedule(0.0).rows) >= 2040
