"""Count what the scheduler holds, for a Snapshot."""

from dataclasses import asdict

from scheduler.adapters.residency import Residency
from scheduler.adapters.resident import AdapterState
from scheduler.admission.crash_isolation import CrashIsolation
from scheduler.running import RunningRequests
from scheduler.snapshot import Counters, Snapshot


def census(
    isolation: CrashIsolation,
    running: RunningRequests,
    residency: Residency,
    counters: Counters,
    plans_in_flight: int,
) -> Snapshot:
    """Count the requests, blocks and adapters."""
    adapters = dict.fromkeys(AdapterState, 0)
    for state in residency.states().values():
        adapters[state] += 1
    counts = asdict(counters)
    counts["num_preemptions"] += running.num_preemptions
    return Snapshot(
        queued=len(isolation),
        isolated=isolation.num_isolated,
        running=len(running.members),
        draining=len(running.draining),
        plans_in_flight=plans_in_flight,
        num_blocks=running.num_blocks,
        free_blocks=running.num_free_blocks,
        cached_blocks=len(running.prefix),
        adapters=adapters,
        tiers=residency.tiers(),
        adapter_counts=residency.counts(),
        oldest_arrival=min((request.arrival for request in isolation), default=None),
        **counts,
    )
