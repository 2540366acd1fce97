"""Snapshot: the numbers that metrics and adapter reports are made of."""

from dataclasses import dataclass

from configs.wire.adapters import AdapterKey
from scheduler.adapters.resident import AdapterState


@dataclass(frozen=True)
class AdapterView:
    """One adapter: where it is and how many requests use it.

    running, waiting: its requests.
    draining: it is unloaded when its requests have ended.
    host_bytes: of its copy on each rank; 0 without one.
    device_pages: over all projections.
    """

    key: AdapterKey
    state: AdapterState
    running: int
    waiting: int
    pinned: bool
    draining: bool
    host_bytes: int
    device_pages: int


@dataclass(frozen=True)
class AdapterTiers:
    """What the tiers hold and can hold: bytes of each rank, pages over all pools."""

    host_bytes: int
    host_capacity_bytes: int
    device_pages: int
    device_capacity_pages: int
    device_adapters: int
    device_slots: int


@dataclass(frozen=True)
class AdapterCounts:
    """What happened to adapters since start.

    device_hits, host_hits, misses: queued requests by where their adapter was then; a miss had
    to be staged.
    device_evictions, host_evictions: adapters that made room for others.
    staged, staged_bytes: adapters that came to host memory, and their bytes on each rank.
    loads, load_bytes: adapters that were copied from there to the device.
    """

    device_hits: int
    host_hits: int
    misses: int
    device_evictions: int
    host_evictions: int
    staged: int = 0
    staged_bytes: int = 0
    loads: int = 0
    load_bytes: int = 0


@dataclass(slots=True)
class Counters:
    """Counted since start; see Snapshot."""

    num_steps: int = 0
    num_preemptions: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_generated_tokens: int = 0

    def admitted(self, num_prompt: int, num_cached: int) -> None:
        """Count the tokens of a request's prompt, and those from the prefix cache."""
        self.num_prompt_tokens += num_prompt
        self.num_cached_tokens += num_cached


@dataclass(frozen=True)
class Snapshot:
    """The state of the scheduler, for metrics.

    queued: requests that wait. running: requests that hold a batch slot and have not left it.
    isolated: requests that run or will run in isolation after losses of the ranks.
    draining: ended or preempted requests that plans in flight still name.
    free_blocks: blocks that no request holds. cached_blocks: those that the prefix cache can find.
    adapters: how many are in each state.
    num_…: since start.
    oldest_arrival: of the requests that wait, in seconds of the caller's clock; None: none waits.
    """

    queued: int
    isolated: int
    running: int
    draining: int
    plans_in_flight: int
    num_blocks: int
    free_blocks: int
    cached_blocks: int
    adapters: dict[AdapterState, int]
    tiers: AdapterTiers
    adapter_counts: AdapterCounts
    num_steps: int
    num_preemptions: int
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    oldest_arrival: float | None = None
