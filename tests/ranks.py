"""Several ranks in one process: threads over gloo, each with its own view of the group."""

from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

from sharding.connect import connect
from sharding.group import SingleRank, TensorParallel, memory_store

T = TypeVar("T")

TIMEOUT_S = 20.0


def run_ranks(size: int, fn: Callable[[TensorParallel], T]) -> list[T]:
    """Run `fn(group)` once on each of `size` ranks; returns the results by rank.

    The exception that was raised first is raised again here; the other ranks, which may hang in
    a collective, end by the group's timeout.
    """
    if size == 1:
        torch.set_num_threads(1)
        return [fn(SingleRank())]
    store = memory_store()

    def rank_main(rank: int) -> T:
        torch.set_num_threads(1)
        return fn(connect(store, rank, size, torch.device("cpu"), TIMEOUT_S))

    with ThreadPoolExecutor(size) as pool:
        futures = [pool.submit(rank_main, rank) for rank in range(size)]
        finished, _ = wait(futures, return_when=FIRST_EXCEPTION)
        first = next((future for future in finished if future.exception()), None)
        return _results(futures, first)


def _results(futures: list[Future[T]], failed: Future[T] | None) -> list[T]:
    """All results in order, or the failure that came first."""
    if failed is not None:
        error = failed.exception()
        assert error is not None
        raise error
    return [future.result() for future in futures]
