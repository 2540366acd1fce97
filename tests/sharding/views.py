"""Views of a group: one rank without its peers, and one that counts."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from sharding.group import Summand, TensorParallel


@dataclass
class LoneRank(TensorParallel):
    """For tests that build and never compute: any collective is an error."""

    rank: int
    size: int
    method: str = "alone"

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError(f"rank {self.rank} of {self.size} is alone")

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError(f"rank {self.rank} of {self.size} is alone")


class CountedRanks:
    """A group that records its collectives, in order: "sum" or "gather"."""

    def __init__(self, ranks: TensorParallel) -> None:
        self._ranks = ranks
        self.calls: list[str] = []
        self.rank, self.size, self.method = ranks.rank, ranks.size, ranks.method

    def all_reduce(self, x: Tensor) -> Tensor:
        self.calls.append("sum")
        return self._ranks.all_reduce(x)

    def all_gather(self, x: Tensor) -> Tensor:
        self.calls.append("gather")
        return self._ranks.all_gather(x)

    def output_buffer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        return self._ranks.output_buffer(shape, dtype)

    def summand(self, shape: Sequence[int], dtype: torch.dtype) -> Summand | None:
        return self._ranks.summand(shape, dtype)
