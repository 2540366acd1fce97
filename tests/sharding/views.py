"""One rank's view of a group of which the other ranks are not there."""

from dataclasses import dataclass

from torch import Tensor


@dataclass
class LoneRank:
    """For tests that build and never compute: any collective is an error."""

    rank: int
    size: int

    def all_reduce(self, x: Tensor) -> Tensor:
        raise AssertionError(f"rank {self.rank} of {self.size} is alone")

    def all_gather(self, x: Tensor) -> Tensor:
        raise AssertionError(f"rank {self.rank} of {self.size} is alone")
