"""Census: everything that the scheduler holds, counted."""

from dataclasses import asdict

from scheduler.residency import Residency
from scheduler.resident import AdapterState
from scheduler.running import Running
from scheduler.snapshot import Snapshot, Tally
from scheduler.trials import Trials


def census(
    trials: Trials, running: Running, residency: Residency, tally: Tally, plans_in_flight: int
) -> Snapshot:
    """Count who waits, who runs and what they hold."""
    adapters = dict.fromkeys(AdapterState, 0)
    for state in residency.states().values():
        adapters[state] += 1
    counts = asdict(tally)
    counts["num_preemptions"] += running.num_preemptions
    return Snapshot(
        queued=len(trials),
        suspects=trials.num_suspects,
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
