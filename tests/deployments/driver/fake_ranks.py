"""A group of ranks without a model: the real worker and sockets over a token automaton.

The next token depends on the adapter's content and on every token before it, so a mixed-up
batch, a stale slot shows up as wrong tokens.
"""

import contextlib
import math
import socket
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path

from configs.wire.adapters import (
    AdapterDeferred,
    AdapterError,
    AdapterKey,
    AdapterRefusal,
    AdapterShape,
    FetchedAdapter,
)
from configs.wire.plan import Capacity
from deployments.rank.messages import LoadReport
from deployments.rank.transport import Channel, RankLinks, RanksLost
from deployments.rank.worker import Worker
from modeling.batch import ForwardBatch, SampledTokens, StepOutput

VOCABULARY = 1000
POISON = 5000
HELD_SECONDS = 600.0
"""How long a gate holds a caller, so that a test that fails comes to an end."""


def next_token(adapter: str, tokens: Sequence[int]) -> int:
    """What the automaton says after `tokens` under `adapter` ("" is the base)."""
    digest = blake2b(f"{adapter}:{list(tokens)}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % VOCABULARY


def continuation(adapter: str, prompt: Sequence[int], count: int) -> list[int]:
    """The `count` tokens that a request generates when it is alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(adapter, tokens))
    return tokens[len(prompt) :]


class Gate:
    """Open, closed, or closed for all but so many."""

    def __init__(self) -> None:
        """Open."""
        self._changed = threading.Condition()
        self._room = math.inf

    def set(self) -> None:
        """Open it."""
        self.let(math.inf)

    def clear(self) -> None:
        """Close it."""
        with self._changed:
            self._room = 0.0

    def let(self, count: float) -> None:
        """So many more may pass."""
        with self._changed:
            self._room += count
            self._changed.notify_all()

    def wait(self, timeout_s: float) -> None:
        """Pass when it may be."""
        with self._changed:
            if self._changed.wait_for(lambda: self._room > 0, timeout_s):
                self._room -= 1


@dataclass
class FakeFill:
    """Bytes that reach their slot once `wait` was called; before, they are wrong."""

    runner: "FakeRunner"
    slot: int
    digest: str

    def wait(self) -> None:
        self.runner.load_gate.wait(HELD_SECONDS)
        self.runner.loaded[self.slot] = self.digest


@dataclass
class FakeRunner:
    """Implements `modeling.runner.base.Runner`; adapters are named by their digest.

    gate: steps wait for it, so that a test can hold a step in flight.
    staging_gate: adapters with "slow" in their names wait for it.
    load_gate: loads wait for it.
    poison: a token that breaks the step of its row.
    full: how many adapters are deferred before one is kept.
    num_unrecorded: graphs that are still to be recorded.
    """

    gate: Gate
    staging_gate: threading.Event
    load_gate: threading.Event
    poison: int
    tokens: dict[int, dict[int, int]] = field(default_factory=dict)
    slots: dict[int, int] = field(default_factory=dict)
    staged: dict[AdapterKey, str] = field(default_factory=dict)
    loaded: dict[int, str] = field(default_factory=dict)
    batch_sizes: list[int] = field(default_factory=list)
    full: int = 0
    num_unrecorded: int = 0

    def record_next(self) -> None:
        self.num_unrecorded -= 1
        self.batch_sizes.append(-1)

    def step(self, batch: ForwardBatch) -> StepOutput:
        for join in batch.joins:
            self.tokens[join.batch_slot] = dict(enumerate(join.tokens))
            self.slots[join.batch_slot] = join.adapter_slot
        self.batch_sizes.append(len(batch.rows))
        sampled = []
        for row in batch.rows:
            if row.samples:
                known = self.tokens[row.batch_slot]
                if self.poison in known.values():
                    raise RuntimeError("this token breaks the step")
                end = row.start + row.length
                adapter = self.loaded[slot] if (slot := self.slots[row.batch_slot]) >= 0 else ""
                known[end] = next_token(adapter, [known[i] for i in range(end)])
                sampled.append(known[end])

        def wait() -> SampledTokens:
            if batch.rows:
                self.gate.wait(HELD_SECONDS)
            return SampledTokens(sampled)

        return StepOutput(wait)

    def stage(self, adapter: FetchedAdapter) -> AdapterShape:
        if "broken" in adapter.name:
            raise AdapterError(AdapterRefusal.UNSUPPORTED, f"{adapter.name} is not a LoRA")
        for member in adapter.members:
            if "damaged" in (Path(member.folder) / "adapter_config.json").read_text():
                raise AdapterError(AdapterRefusal.UNSUPPORTED, f"{member.name} is damaged")
        if "crash" in adapter.name:
            raise RuntimeError("disk on fire")
        if "slow" in adapter.name:
            self.staging_gate.wait(HELD_SECONDS)
        if self.full:
            self.full -= 1
            raise AdapterDeferred(AdapterShape((1,), 100))
        self.staged[adapter.key] = adapter.digest
        return AdapterShape((1,), 100)

    def load_adapter(self, key: AdapterKey, slot: int, pages: Sequence[Sequence[int]]) -> FakeFill:
        self.loaded[slot] = ""
        return FakeFill(self, slot, self.staged[key])

    def drop(self, key: AdapterKey) -> None:
        self.staged.pop(key, None)

    def prepare(self, number: int, constraint: str, gone: Sequence[int]) -> str:
        if "slow" in constraint:
            self.staging_gate.wait(HELD_SECONDS)
        return "too costly" if "costly" in constraint else ""


def _work(worker: Worker) -> None:
    """As an actor does: a step that raises ends the process, here the thread."""
    with contextlib.suppress(RuntimeError):
        worker.run()


class FakeGroup:
    """`driver.rank_start.RankGroup` over threads; ranks can be killed and starts failed."""

    def __init__(self, num_ranks: int = 2) -> None:
        self.num_ranks = num_ranks
        self.capacity = Capacity(
            num_blocks=64,
            block_size=4,
            projections=("q_proj",),
            adapter_pages=4,
            adapter_slots=4,
            host_bytes=1000,
            max_total_tokens=128,
        )
        self.gate = Gate()
        self.staging_gate = threading.Event()
        self.load_gate = threading.Event()
        self.load_gate.set()
        self.starts = 0
        self.graphs_left = 0
        self.failing_starts = 0
        self.may_start = threading.Event()
        self.may_start.set()
        self.runners: list[FakeRunner] = []
        self._ends: list[Channel] = []
        self._threads: list[threading.Thread] = []
        self._links: RankLinks | None = None
        self._changing = threading.Lock()

    def start(self) -> tuple[RankLinks, list[LoadReport]]:
        self.may_start.wait(HELD_SECONDS)
        self.starts += 1
        if self.failing_starts:
            self.failing_starts -= 1
            raise RanksLost("no room")
        with self._changing:
            self._links = self._start_ranks()
            return self._links, [self._report(rank) for rank in range(self.num_ranks)]

    def stop(self) -> None:
        self.gate.set()
        self.staging_gate.set()
        self.load_gate.set()
        with self._changing:  # another thread may be starting more
            threads, self._threads = self._threads, []
            if self._links is not None:
                self._links.close()
        for thread in threads:
            thread.join(HELD_SECONDS)

    def release(self) -> None:
        self.stop()

    def await_ends(self) -> None:
        assert not self._threads, "the ranks live"

    def kill(self, rank: int) -> None:
        """As SIGKILL does: the rank's socket closes."""
        self._ends[rank].close()

    def _start_ranks(self) -> RankLinks:
        pairs = [socket.socketpair() for _ in range(self.num_ranks)]
        # Rank 0 alone answers steps: the others are not held.
        gates = [self.gate, *(Gate() for _ in pairs[1:])]
        self.runners = [
            FakeRunner(
                gate, self.staging_gate, self.load_gate, POISON, num_unrecorded=self.graphs_left
            )
            for gate in gates
        ]
        self._ends = [Channel(theirs) for _, theirs in pairs]
        for rank, (runner, end) in enumerate(zip(self.runners, self._ends, strict=True)):
            thread = threading.Thread(target=_work, args=(Worker(runner, rank, end),), daemon=True)
            thread.start()
            self._threads.append(thread)
        return RankLinks([Channel(ours) for ours, _ in pairs])

    def _report(self, rank: int) -> LoadReport:
        return LoadReport(
            rank=rank,
            pid=0,
            capacity=self.capacity,
            dtype="float32",
            device="fake",
            attention="none",
            adapter_kernel="none",
            all_reduce="none",
            weight_bytes_resident=0,
            cache_bytes=0,
            adapter_bytes=0,
            load_seconds=0.0,
            graphs_left=self.graphs_left,
        )
