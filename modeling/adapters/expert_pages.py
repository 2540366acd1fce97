"""Pages of routed experts' factors: each has LoRA rank rows of one map of one expert.

An adapter takes them for the experts that it adapts. In host memory all of them are one matrix: the
pages' rows of the first layer, in the order of `ExpertPages`, then those of the next one.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from modeling.adapters.host_pages import PAGE_ROWS, HostPage
from modeling.adapters.projection import ExpertMatrices, Projection


@dataclass(frozen=True)
class ExpertPages:
    """The pages that an adapter takes of one map of the experts.

    own: those of this rank's experts that it adapts, ascending.
    count: the most of them that a rank has: plans give all ranks the same number of pages.
    rank: the largest of all experts, also of other ranks'.
    local: how many experts this rank has, adapted or not.

    Page c * count + n has rank rows 8 c .. 8 c + 7 of expert own[n].
    """

    own: tuple[int, ...]
    count: int
    rank: int
    local: int

    @classmethod
    def of(cls, experts: ExpertMatrices, ranks: Mapping[int, int]) -> "ExpertPages":
        """ranks: of all adapted experts, by their numbers in the model."""
        shares = [[each for each in share if each in ranks] for share in experts.ranges]
        own = tuple(each - experts.own.start for each in experts.own if each in ranks)
        return cls(own, max(map(len, shares)), max(ranks.values()), len(experts.own))

    @property
    def chunks(self) -> int:
        """Return how many pages an expert has."""
        return -(-self.rank // PAGE_ROWS)

    @property
    def num_pages(self) -> int:
        """Return how many all have."""
        return self.count * self.chunks

    @property
    def of_chunks(self) -> list[range]:
        """Return the pages of the same rank rows of all `own`, for each such rows."""
        firsts = range(0, self.num_pages if self.own else 0, self.count)
        return [range(first, first + len(self.own)) for first in firsts]

    def write(
        self, page: HostPage, projection: Projection, layers: Sequence[int], a: Tensor, bt: Tensor
    ) -> None:
        """Write factors into host memory, which is zero elsewhere.

        page: of all pages. layers: as `Projection` counts those of experts. a: [layers, r, in] and
        bt: [layers, r, out], in the pools' type.
        """
        assert projection.experts is not None
        experts = len(projection.experts.own)
        numbers = {expert: n for n, expert in enumerate(self.own)}
        blocks = [layer // experts * self.num_pages + numbers[layer % experts] for layer in layers]
        for part in runs(blocks):
            for chunk in range(-(-a.shape[1] // PAGE_ROWS)):
                first = (blocks[part.start] + chunk * self.count) * PAGE_ROWS
                rows = slice(chunk * PAGE_ROWS, (chunk + 1) * PAGE_ROWS)
                page.a.write_blocks(first, a[part, rows])
                page.bt.write_blocks(first, bt[part, rows])


class AdaptedExpert(NamedTuple):
    """An expert by its number in the model, and the projection that is its map."""

    projection: int
    expert: int


def pages_of_maps(
    matrices: Mapping[int, ExpertMatrices], ranks: Iterable[tuple[AdaptedExpert, int]]
) -> dict[int, ExpertPages]:
    """Return the pages of each adapted map; ranks: of all ranks' experts, in any layer."""
    found: dict[int, dict[int, int]] = {}
    for (projection, expert), rank in ranks:
        of_map = found.setdefault(projection, {})
        of_map[expert] = max(rank, of_map.get(expert, 0))
    return {i: ExpertPages.of(matrices[i], found[i]) for i in sorted(found)}


def runs(numbers: Sequence[int]) -> Iterator[slice]:
    """Yield the longest parts in which each number is the one before it plus 1."""
    start = 0
    for at in range(1, len(numbers) + 1):
        if at == len(numbers) or numbers[at] != numbers[at - 1] + 1:
            yield slice(start, at)
            start = at
