"""Several ranks in one process, as threads: over gloo, or through memory where it costs less."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor

from sharding.connect import connect
from sharding.group import SingleRank, TensorParallel, memory_store

T = TypeVar("T")

TIMEOUT_S = 120.0
"""Of a collective: only a rank that hangs takes as long, however busy the machine is."""


def run_ranks(size: int, fn: Callable[[TensorParallel], T]) -> list[T]:
    """Run `fn(group)` once on each of `size` ranks; returns the results by rank.

    The exception that was raised first is raised again here; the other ranks, which may hang in
    a collective, end by the group's timeout.
    """
    store = memory_store()
    return _run(size, fn, lambda rank: connect(store, rank, size, torch.device("cpu"), TIMEOUT_S))


def run_in_memory(size: int, fn: Callable[[TensorParallel], T]) -> list[T]:
    """As `run_ranks`, without sockets; ranks that ask for different things are an error."""
    table = Table(size)
    return _run(size, fn, partial(MemoryRank, table), table.barrier.abort)


def _run(
    size: int,
    fn: Callable[[TensorParallel], T],
    join: Callable[[int], TensorParallel],
    fail: Callable[[], None] = lambda: None,
) -> list[T]:
    """join: a rank's view of the group. fail: ends the others' wait for a failed rank."""
    if size == 1:
        torch.set_num_threads(1)
        return [fn(SingleRank())]
    # Kept until all ranks are done: a rank that closes it earlier breaks those that still connect.
    groups: list[TensorParallel] = []
    errors: list[BaseException] = []

    def rank_main(rank: int) -> T:
        torch.set_num_threads(1)
        try:
            group = join(rank)
            groups.append(group)
            return fn(group)
        except BaseException as error:
            errors.append(error)
            fail()
            raise

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
        wait(futures)
    if errors:
        raise errors[0]
    return [future.result() for future in futures]


@dataclass
class Table:
    """Where the ranks of one process lay down what they bring to a collective."""

    size: int
    brought: list[tuple[str, Tensor]] = field(init=False)
    barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self.brought = [("", torch.empty(0))] * self.size
        self.barrier = threading.Barrier(self.size, timeout=TIMEOUT_S)


class MemoryRank(TensorParallel):
    """One rank's seat at a table. Sums are taken in the order of ranks, so all have the same."""

    method = "memory"

    def __init__(self, table: Table, rank: int) -> None:
        self._table = table
        self.rank = rank
        self.size = table.size

    def all_reduce(self, x: Tensor) -> Tensor:
        first, *others = self._bring("sum", x)
        total = first.clone()
        for other in others:
            total += other
        self._table.barrier.wait()  # Before it other ranks may still read x.
        return x.copy_(total)

    def all_gather(self, x: Tensor) -> Tensor:
        whole = torch.cat(self._bring("gather", x.contiguous()), dim=-1)
        self._table.barrier.wait()
        return whole

    def _bring(self, kind: str, x: Tensor) -> list[Tensor]:
        """What all ranks brought, once all have come."""
        assert x.is_contiguous(), f"a {kind} of what does not lie together: {x.stride()}"
        self._table.brought[self.rank] = (kind, x)
        self._table.barrier.wait()
        brought = list(self._table.brought)
        shapes = [(each, part.shape, part.dtype) for each, part in brought]
        assert shapes == [shapes[self.rank]] * self.size, (
            f"ranks ask for different things: {shapes}"
        )
        return [part for _, part in brought]
