"""Ranks that meet in memory: they compute what gloo does, and say at once what gloo hangs over."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from sharding.group import TensorParallel
from tests.ranks import run_in_memory, run_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16, torch.int64]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives_are_those_of_gloo(size: int, dtype: torch.dtype) -> None:
    def on_rank(group: TensorParallel) -> list[Any]:
        found = []
        for turn in range(3):
            mine = torch.arange(6).view(3, 2).to(dtype) + 10 * group.rank + turn
            turned = group.all_gather(mine.T)
            summed = group.all_reduce(mine)
            assert size == 1 or summed is mine, "in place"
            found += [turned.tolist(), summed.tolist(), group.rank, group.size]
        return found

    assert run_in_memory(size, on_rank) == run_ranks(size, on_rank)


@pytest.mark.parametrize("run", [run_ranks, run_in_memory])
def test_ranks_that_need_no_other_do_not_wait(run: Callable[..., list[int]]) -> None:
    for _ in range(20):
        assert run(4, lambda group: int(group.rank)) == [0, 1, 2, 3]


def test_a_rank_that_fails_ends_those_that_wait_for_it() -> None:
    def on_rank(group: TensorParallel) -> None:
        if group.rank == 1:
            raise KeyError("rank 1 broke")
        group.all_reduce(torch.ones(2))

    with pytest.raises(KeyError, match="rank 1 broke"):
        run_in_memory(3, on_rank)


def other_kind(group: TensorParallel) -> None:
    (group.all_reduce if group.rank else group.all_gather)(torch.ones(2))


def other_shape(group: TensorParallel) -> None:
    group.all_reduce(torch.ones(2 + group.rank))


def other_type(group: TensorParallel) -> None:
    group.all_reduce(torch.ones(2, dtype=torch.float64 if group.rank else torch.float32))


@pytest.mark.parametrize("fault", [other_kind, other_shape, other_type])
def test_ranks_that_ask_for_different_things(fault: Callable[[TensorParallel], None]) -> None:
    with pytest.raises(AssertionError, match="ranks ask for different things"):
        run_in_memory(2, fault)


def test_what_does_not_lie_together_is_not_summed() -> None:
    with pytest.raises(AssertionError, match="does not lie together"):
        run_in_memory(2, lambda group: group.all_reduce(torch.ones(2, 3).T))
