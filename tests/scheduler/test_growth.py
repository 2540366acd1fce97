"""What a step costs does not grow with the adapters that are known: counted in lines of Python."""

import gc
import sys
from types import FrameType
from typing import Any

from configs.wire.adapters import AdapterKey, AdapterShape
from configs.wire.plan import Capacity, StepResult
from configs.wire.sampling import Sampling, Stopping
from scheduler.admission.limits import Limits
from scheduler.events import AdapterLoaded, AdapterStaged
from scheduler.request import Request
from scheduler.scheduler import Scheduler

ROWS, SLOTS = 8, 4


def knowing(num_adapters: int) -> Scheduler:
    """Eight requests over the four adapters of the device, and others that lie on the host."""
    capacity = Capacity(
        num_blocks=1000,
        block_size=16,
        projections=("q_proj",),
        adapter_pages=SLOTS,
        adapter_slots=SLOTS,
        host_bytes=10**9,
        max_total_tokens=500,
    )
    limits = Limits(max_step_tokens=256, max_running=ROWS, max_queued=num_adapters + ROWS)
    scheduler = Scheduler(limits, capacity)
    for i in range(num_adapters):
        scheduler.add(request("known", i, i + 1), 0.0)
    while keys := scheduler.to_stage():
        for key in keys:
            scheduler.handle_adapter_event(AdapterStaged(key, AdapterShape((1,), 1)))
    for i in range(num_adapters):
        scheduler.cancel(("known", i))
    for i in range(ROWS):
        scheduler.add(request("r", i, 1 + i % SLOTS), 0.0)
    return scheduler


def request(name: str, index: int, adapter: int) -> Request:
    prompt = [index + 1, 2, 3]
    return Request((name, index), prompt, Sampling(), Stopping(400), AdapterKey(adapter))


def step(scheduler: Scheduler) -> int:
    """Play one step; returns how many rows it had."""
    plan = scheduler.schedule(0.0)
    if plan.empty:
        return 0
    tokens = [9] * sum(row.samples for row in plan.rows)
    scheduler.apply(plan, StepResult(plan.epoch, plan.step, tokens), 0.0)
    for load in plan.loads:
        scheduler.handle_adapter_event(AdapterLoaded(load.key))
    return len(plan.rows)


def settle(scheduler: Scheduler) -> None:
    """Step until all requests decode: adapters come first."""
    for _ in range(20):
        last = step(scheduler)
    assert last == ROWS


def lines(scheduler: Scheduler) -> int:
    """How many lines a step runs."""
    count = 0

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal count
        count += event == "line"
        return trace

    before = sys.gettrace()
    # Callbacks of a collection would be counted too.
    gc.collect()
    gc.disable()
    sys.settrace(trace)
    try:
        step(scheduler)
    finally:
        sys.settrace(before)
        gc.enable()
    return count


def cost(num_adapters: int) -> int:
    scheduler = knowing(num_adapters)
    settle(scheduler)
    assert len(scheduler.adapter_states()) == num_adapters
    return lines(scheduler)


def test_the_cost_of_a_step_does_not_grow_with_known_adapters_and_blocks() -> None:
    assert cost(SLOTS) == cost(50) == cost(1000)


def test_a_step_costs_the_same_however_many_wait_for_the_device() -> None:
    def waiting(num_adapters: int) -> int:
        scheduler = knowing(num_adapters)
        for i in range(SLOTS, num_adapters):
            scheduler.add(request("waits", i, i + 1), 0.0)
        settle(scheduler)
        return lines(scheduler)

    # Only so many pending loads are looked at (MAX_LOADS_SEEN).
    assert waiting(50) == waiting(1000)
