"""Snapshot: the scheduler in numbers."""

from dataclasses import dataclass

from scheduler.resident import AdapterState


@dataclass(frozen=True)
class Snapshot:
    """The scheduler in numbers, for metrics.

    draining: ended or preempted requests that plans in flight still name. free_blocks: those
    that nobody holds. cached_blocks: those that the prefix cache can find. num_…: since start.
    step_tokens: positions computed by the last plan that was made.
    """

    queued: int
    running: int
    draining: int
    plans_in_flight: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    adapters: dict[AdapterState, int]
    step_tokens: int
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
