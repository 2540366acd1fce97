"""Census: everything that the scheduler holds, counted."""

from dataclasses import asdict

from scheduler.adapters.residency import Residency
from scheduler.adapters.resident import AdapterState
from scheduler.admission.crash_isolation import CrashIsolation
from scheduler.running import RunningRequests
from scheduler.snapshot import Counters, Snapshot


def census(
    trials: CrashIsolation,
    running: RunningRequests,
    residency: Residency,
    tally: Counters,
    plans_in_flight: int,
) -> Snapshot:
    """Count who waits, who runs and what they hold."""
    adapters = dict.fromkeys(AdapterState, 0)
    for state in residency.states().values():
        adapters[state] += 1
    counts = asdict(tally)
    counts["num_preemptions"] += running.num_preemptions
    return Snapshot(
        queued=len(trials),
        isolated=trials.num_isolated,
        running=len(running.members),
        draining=len(running.draining),
        plans_in_flight=plans_in_flight,
        num_blocks=running.num_blocks,
        free_blocks=running.num_free_blocks,
        cached_blocks=len(running.prefix),
        adapters=adapters,
        tiers=residency.tiers(),
        adapter_counts=residency.counts(),
        **counts,
    )
