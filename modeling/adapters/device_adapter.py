"""DeviceAdapter: a loaded adapter's pages in the device's pools."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from modeling.adapters.expert_pages import ExpertPages, runs
from modeling.adapters.host_cache import StagedAdapter
from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.output_rows import OutputRows
from modeling.transfer import ints


@dataclass(frozen=True)
class Pool:
    """One projection's rank rows: a [pages, layers, 8, in], bt [pages, layers, 8, out].

    The widths are this rank's own slices. Of a map of experts a page is of one expert, and they are
    [layers, pages, 8, width]: neighbouring pages of one layer are one piece of memory.
    """

    a: Tensor
    bt: Tensor

    @property
    def nbytes(self) -> int:
        """Return the bytes of both tensors."""
        return self.a.nbytes + self.bt.nbytes


@dataclass(frozen=True)
class Factors:
    """Both factors of one projection and layer, ready to multiply: a [in, rank], bt [rank, out]."""

    a: Tensor
    bt: Tensor


class ExpertStacks:
    """A loaded adapter's factors of one map of the experts.

    experts: those of this rank's that have some, ascending.
    """

    def __init__(self, pool: Pool, pages: list[int], own: ExpertPages) -> None:
        """pages: as `ExpertPages` orders them."""
        self.experts = own.own
        self._pool = pool
        device = pool.a.device
        of_chunks = [pages[chunk.start : chunk.stop] for chunk in own.of_chunks]
        self._pages = [
            slice(each[0], each[-1] + 1) if len([*runs(each)]) == 1 else ints(each, device)
            for each in of_chunks
        ]
        self._numbers = None
        if len(own.own) < own.local:
            numbers = [len(own.own)] * (own.local + 1)
            for number, expert in enumerate(own.own):
                numbers[expert] = number
            self._numbers = ints(numbers, device)

    def numbers(self, ids: Tensor) -> Tensor:
        """Return the experts' numbers among `experts`; those of others are behind the last.

        ids: this rank's experts; those of other ranks are behind the last.
        """
        return ids if self._numbers is None else self._numbers[ids]

    def at(self, layer: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each 8 rank rows of all `experts`: a [experts, 8, in], bt [experts, 8, out].

        layer: its index among those with experts.
        """
        for pages in self._pages:
            yield self._pool.a[layer][pages], self._pool.bt[layer][pages]


class DeviceAdapter:
    """An adapter on the device: its pages in the pools, and its true ranks.

    experts: its factors of each map of the experts, by the projection.
    """

    def __init__(
        self, pools: tuple[Pool, ...], pages: list[list[int]], staged: StagedAdapter
    ) -> None:
        """pages: for each projection, its page indices."""
        self._pools = pools
        self._pages = pages
        self._ranks: list[list[int]] = staged.ranks.tolist()
        own = zip(pools, pages, staged.output_rows, strict=True)
        self._output_rows = tuple(starmap(_rows_in_pool, own))
        self.experts = {
            i: ExpertStacks(pools[i], pages[i], each) for i, each in staged.experts.items()
        }
        self._views: dict[tuple[int, int], Factors] = {}

    def rank(self, projection: int, layer: int) -> int:
        """Return the true rank in a projection and layer; 0 where it is not adapted."""
        return self._ranks[projection][layer]

    def adapts(self, projection: int) -> bool:
        """Return whether it changes a projection in some layer."""
        return bool(self._pages[projection])

    def factors(self, projection: int, layer: int) -> Factors:
        """Return the first `rank` rows of both factors, through the page table.

        For one page they are views of the pool, made once; for several, copies.
        """
        view = self._views.get((projection, layer))
        if view is not None:
            return view
        pool, pages = self._pools[projection], self._pages[projection]
        rank = self.rank(projection, layer)
        pages = pages[: -(-rank // PAGE_ROWS)]
        rows_a = _rows(pool.a, pages, layer)[:rank]
        rows_bt = _rows(pool.bt, pages, layer)[:rank]
        factors = Factors(rows_a.t(), rows_bt)
        if len(pages) == 1:  # Copies are not kept: they would double the pool's memory.
            self._views[projection, layer] = factors
        return factors

    def output_rows(self, projection: int) -> OutputRows:
        """Return the rows of layer 0 in Bt's pool, its first three dimensions as one.

        Layer l's are 8 l rows behind.
        """
        return self._output_rows[projection]

    def change_outputs(self, y: Tensor, projection: int, layer: int) -> Tensor:
        """Return y [n, out] scaled and with biases, as this adapter does (`output_rows.py`)."""
        scale, bias = self.output_vectors(projection, layer)
        if scale is not None:
            y = torch.addcmul(y, scale, y)
        return y if bias is None else y + bias

    def output_vectors(self, projection: int, layer: int) -> tuple[Tensor | None, Tensor | None]:
        """Return (c, d) of `output_rows.py`, [out] each; None where there is none."""
        pool, behind = self._pools[projection].bt.flatten(0, 2), layer * PAGE_ROWS
        scale, bias = (
            None if row < 0 else pool[row + behind] for row in self.output_rows(projection)
        )
        return scale, bias

    def page(self, projection: int) -> int:
        """Return the first page; -1 where the adapter has none."""
        pages = self._pages[projection]
        return pages[0] if pages else -1

    def matrix(self, projection: int) -> Tensor:
        """Return what is one matrix, [rows of the pool, width]: a view of its page."""
        (page,) = self._pages[projection]
        return self._pools[projection].a[page].flatten(0, 1)


def _rows_in_pool(pool: Pool, pages: list[int], rows: OutputRows) -> OutputRows:
    """Return where an adapter's output rows are in a pool."""
    layers = pool.bt.shape[1]
    own = (divmod(row, PAGE_ROWS) for row in rows)
    return OutputRows(
        *(-1 if page < 0 else pages[page] * layers * PAGE_ROWS + row for page, row in own)
    )


def _rows(pool: Tensor, pages: list[int], layer: int) -> Tensor:
    """Return the rows of some pages at a layer: [8 * pages, width]; a view for one page."""
    first, count = pages[0], len(pages)
    if count == 1:
        return pool[first, layer]
    if pages == list(range(first, first + count)):
        return pool[first : first + count, layer].reshape(count * PAGE_ROWS, -1)
    return torch.cat([pool[page, layer] for page in pages])
