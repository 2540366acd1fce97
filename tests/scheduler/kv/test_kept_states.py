"""Which states of recurrent layers are kept, found and given up."""

import msgspec
import pytest

from configs.kv_groups import KvGroup
from configs.wire.plan import StepPlan, StepResult
from scheduler.admission.limits import Limits
from scheduler.kv.kept_states import KeptStates
from scheduler.kv.prefix_cache import PrefixCache, extend_chain
from scheduler.scheduler import Scheduler
from tests.scheduler.small import capacity, make_request

BLOCK = 4


def scheduler_of(kept: int | None = 3, chunk: int = 100) -> Scheduler:
    ranks = capacity(num_blocks=100, block_size=BLOCK)
    ranks = msgspec.structs.replace(ranks, kept_states=kept, kept_after=16, drafts=False)
    return Scheduler(Limits(max_step_tokens=chunk, max_running=8, steps_ahead=2), ranks)


def run(scheduler: Scheduler, plan: StepPlan) -> None:
    tokens = [7] * sum(row.samples for row in plan.rows)
    scheduler.apply(plan, StepResult(plan.epoch, plan.step, tokens), 0.0)
    scheduler.check()


def first_plan(scheduler: Scheduler, index: int, prompt: list[int]) -> StepPlan:
    """The plan in which a request joins; it is the only one, and ends with one token."""
    scheduler.add(make_request(index, prompt, max_new_tokens=1), 0.0)
    plan = scheduler.schedule(0.0)
    run(scheduler, plan)
    return plan


def test_a_prompts_last_whole_block_is_kept_and_found() -> None:
    scheduler, prompt = scheduler_of(), [*range(30)]
    first = first_plan(scheduler, 0, prompt)
    assert (first.joins[0].state, first.rows[0].start) == (-1, 0)
    assert first.rows[0].keeps == ((28, 0),)
    again = first_plan(scheduler, 1, prompt)
    assert (again.joins[0].state, again.rows[0].start) == (0, 28)
    assert again.rows[0].keeps == ()


def test_where_a_second_prompt_goes_another_way_a_third_goes_on() -> None:
    scheduler, prefix = scheduler_of(), [*range(20)]
    first_plan(scheduler, 0, [*prefix, *range(50, 70)])
    second = first_plan(scheduler, 1, [*prefix, *range(70, 90)])
    assert (second.joins[0].state, second.rows[0].start) == (-1, 0), "no state lies in between"
    assert second.rows[0].keeps == ((20, 1), (36, 2))
    third = first_plan(scheduler, 2, [*prefix, *range(30, 37)])
    assert (third.joins[0].state, third.rows[0].start) == (1, 20)


def test_the_least_recently_used_gives_way() -> None:
    scheduler = scheduler_of(kept=2)
    prompts = [[start, *range(20)] for start in (50, 60, 70)]
    for index, prompt in enumerate(prompts[:2]):
        first_plan(scheduler, index, prompt)
    assert first_plan(scheduler, 2, prompts[0]).joins[0].state == 0
    assert first_plan(scheduler, 3, prompts[2]).rows[0].keeps == ((20, 1),)
    assert first_plan(scheduler, 4, prompts[0]).joins[0].state == 0
    assert first_plan(scheduler, 5, prompts[1]).joins[0].state == -1


def test_what_a_plan_keeps_is_found_by_the_next_one() -> None:
    """Ranks read kept states before they compute a plan's rows."""
    scheduler, prompt = scheduler_of(), [*range(30)]
    for index in range(2):
        scheduler.add(make_request(index, prompt, max_new_tokens=1), 0.0)
    plan = scheduler.schedule(0.0)
    assert [join.state for join in plan.joins] == [-1, -1]
    assert [row.keeps for row in plan.rows] == [((28, 0),), ()]
    scheduler.add(make_request(2, prompt, max_new_tokens=1), 0.0)
    assert scheduler.schedule(0.0).joins[0].state == 0


def test_a_prompt_in_pieces_keeps_in_the_piece_that_reaches_there() -> None:
    scheduler = scheduler_of(chunk=12)
    scheduler.add(make_request(0, [*range(30)], max_new_tokens=1), 0.0)
    plans = [scheduler.schedule(0.0), scheduler.schedule(0.0)]
    run(scheduler, plans[0])
    plans.append(scheduler.schedule(0.0))
    assert [plan.rows[0].keeps for plan in plans] == [(), (), ((28, 0),)]


@pytest.mark.parametrize("kept", [0, None])
def test_nothing_is_kept_without_room_or_without_states(kept: int | None) -> None:
    scheduler, prompt = scheduler_of(kept), [*range(30)]
    assert first_plan(scheduler, 0, prompt).rows[0].keeps == ()
    again = first_plan(scheduler, 1, prompt)
    assert again.joins[0].state == -1
    assert again.rows[0].start == (28 if kept is None else 0)


def test_short_prompts_are_not_cut() -> None:
    assert first_plan(scheduler_of(), 0, [*range(16)]).rows[0].keeps == ()
    assert first_plan(scheduler_of(), 0, [*range(17)]).rows[0].keeps == ((16, 0),)


def test_groups_windows_are_looked_at_where_states_are_kept_alone() -> None:
    """The window's blocks were lost behind the last one of three states, none behind the others."""
    states, groups = KeptStates(3, BLOCK), (KvGroup(BLOCK), KvGroup(BLOCK, window=2 * BLOCK))
    cache = PrefixCache(400, groups, True, states)
    first = make_request(0, [*range(100 * BLOCK)])
    first.tables = [cache.pool.allocate(100) for _ in groups]
    first.scheduled = len(first.prompt)
    cache.register(first)
    digests = extend_chain(first, 100, BLOCK)
    numbers = [states.keep(digests[at - 1]) for at in (20, 40, 90)]
    states.next_plan()
    cache._forget(first.tables[1][89])
    looked, common = [], cache._common_end

    def watched(tables: list[list[int]], end: int) -> int:
        looked.append(end)
        return common(tables, end)

    cache._common_end = watched  # type: ignore[method-assign]
    found = cache.match(make_request(1, [*first.prompt, 1]))
    assert (found.tokens, found.known) == (40 * BLOCK, 100 * BLOCK)
    assert found.state == numbers[1]
    assert looked == [100, 90, 40]


def test_a_number_that_the_plan_in_hand_gave_out_is_not_given_out_again() -> None:
    states = KeptStates(1, 4)
    assert states.keep(b"a") == 0
    assert states.keep(b"a") is None
    assert states.keep(b"b") is None
    states.next_plan()
    assert states.keep(b"b") == 0
    assert b"a" not in states
    states.check()
