"""Loads of routed experts' factors: many pages come to the device together, and part there."""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from modeling.adapters.host_pages import PAGE_ROWS, HostMatrix, HostPage
from modeling.adapters.projection import Projection
from modeling.transfer import to_device

LOAD_BYTES = 2**25
"""Of the numbers that lie between host and pools at a time."""


class ExpertLoads:
    """Copies adapters' pages of experts into pools; one load after the other."""

    def __init__(
        self, projections: Sequence[Projection], dtype: torch.dtype, device: torch.device
    ) -> None:
        """Allocate the memory of a load, if there are experts."""
        maps = [each for each in projections if each.experts is not None]
        widest = max((max(p.local_inputs, p.local_outputs) for p in maps), default=0)
        size = max(LOAD_BYTES // dtype.itemsize, PAGE_ROWS * widest) if maps else 0
        # One memory for all: loads follow each other on their stream.
        self._memory = torch.empty(size, dtype=dtype, device=device)

    def load(self, pages: HostPage, a: Tensor, bt: Tensor, indices: Sequence[int]) -> None:
        """Queue copies of an adapter's pages of one map, which are as one in host memory.

        a, bt: the pool, [layers, pages, 8, width]. indices: of the adapter's pages in it.
        """
        num_layers, num_pages = a.shape[:2]
        layers = np.arange(num_layers, dtype=np.int64)[:, None]
        blocks = (layers * num_pages + np.array(indices, dtype=np.int64)).ravel()
        at = to_device(blocks, a.device)
        for matrix, pool in ((pages.a, a), (pages.bt, bt)):
            self._scatter(matrix, pool.flatten(0, 1), at)

    def _scatter(self, matrix: HostMatrix, pool: Tensor, at: Tensor) -> None:
        """Copy each 8 rows of a matrix to where they belong in a pool [blocks, 8, width]."""
        _, height, width = pool.shape
        step = len(self._memory) // max(height * width, 1)
        for first in range(0, len(at), step):
            own = at[first : first + step]
            part = self._memory[: len(own) * height * width].view(-1, width)
            matrix.copy_to(part, first * height)
            pool.index_copy_(0, own, part.view(len(own), height, width))
