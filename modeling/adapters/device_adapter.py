"""DeviceAdapter: a loaded adapter's pages in the device's pools."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import starmap

import torch
from torch import Tensor

from modeling.adapters.host_cache import StagedAdapter
from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.output_rows import OutputRows


@dataclass(frozen=True)
class Pool:
    """One projection's rank rows: a [pages, layers, 8, in], bt [pages, layers, 8, out].

    The widths are this rank's own slices.
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


class DeviceAdapter:
    """An adapter on the device: its pages in the pools, and its true ranks."""

    def __init__(
        self, pools: tuple[Pool, ...], pages: list[list[int]], staged: StagedAdapter
    ) -> None:
        """pages: for each projection, its page indices."""
        self._pools = pools
        self._pages = pages
        self._ranks: list[list[int]] = staged.ranks.tolist()
        own = zip(pools, pages, staged.output_rows, strict=True)
        self._output_rows = tuple(starmap(_rows_in_pool, own))
        self._views: dict[tuple[int, int], Factors] = {}

    def rank(self, projection: int, layer: int) -> int:
        """Return the true rank in a projection and layer; 0 where it is not adapted."""
        return self._ranks[projection][layer]

    def adapts(self, projection: int) -> bool:
        """Return whether it changes a projection in some layer."""
        return any(self._ranks[projection])

    def stacked(self, projection: int, first: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each page's rows of consecutive layers: a [count, 8, in], bt [count, 8, out]."""
        pool = self._pools[projection]
        for page in self._pages[projection]:
            yield pool.a[page, first : first + count], pool.bt[page, first : first + count]

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
        own = self.output_rows(projection)
        pool, behind = self._pools[projection].bt.flatten(0, 2), layer * PAGE_ROWS
        if own.scale >= 0:
            y = torch.addcmul(y, pool[own.scale + behind], y)
        return y if own.bias < 0 else y + pool[own.bias + behind]

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
