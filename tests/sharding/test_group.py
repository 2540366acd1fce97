"""The two collectives, over threads and gloo, in every type that models compute in."""

import pytest
import torch

from sharding.group import ProcessGroupRanks, SingleRank, TensorParallel
from tests.ranks import run_ranks

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [1, 2, 4])
def test_collectives(size: int, dtype: torch.dtype) -> None:
    def on_rank(group: TensorParallel) -> tuple[list[float], list[list[float]]]:
        with torch.inference_mode():
            mine = torch.tensor([[1.0], [2.0]], dtype=dtype) + 10 * group.rank
            gathered = group.all_gather(mine)
            return group.all_reduce(mine).flatten().tolist(), gathered.tolist()

    tens = 10 * sum(range(size))
    rows = [[first + 10 * rank for rank in range(size)] for first in (1.0, 2.0)]
    assert run_ranks(size, on_rank) == [([size + tens, 2 * size + tens], rows)] * size


def test_one_rank_copies_nothing() -> None:
    x = torch.ones(2, 3)
    assert SingleRank().all_reduce(x) is x
    assert SingleRank().all_gather(x) is x


def test_the_first_exception_is_raised_again() -> None:
    def on_rank(group: TensorParallel) -> None:
        if group.rank == 1:
            raise KeyError("rank 1 broke")

    with pytest.raises(KeyError, match="rank 1 broke"):
        run_ranks(2, on_rank)


def test_the_greatest_of_each_value() -> None:
    def on_rank(group: TensorParallel) -> list[float]:
        assert isinstance(group, ProcessGroupRanks)
        return group.maximum([1.5 + group.rank, 5.0 - group.rank], torch.device("cpu"))

    assert run_ranks(3, on_rank) == [[3.5, 5.0]] * 3
