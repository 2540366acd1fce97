"""Bytes of the pools that adapters take, and of the chunks of host memory."""

from collections.abc import Sequence

import torch

from modeling.adapters.host_pages import PAGE_ROWS
from modeling.adapters.projection import COPIED_KINDS, Projection
from modeling.transfer import aligned

MAX_CHUNK_BYTES = 2**20
CHUNKS_OF_PAGE = 16
"""One page of every pool takes at least this many chunks in all: small models waste little."""


def chunk_size(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Return a chunk's bytes: a small part of one page of every pool, at least the widest row."""
    widest = max((max(p.local_inputs, p.local_outputs) for p in projections), default=0)
    part = min(MAX_CHUNK_BYTES, page_bytes(projections, dtype) // CHUNKS_OF_PAGE)
    return max(aligned(max(part, widest * dtype.itemsize)), aligned(1))


def page_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Return the bytes of 8 rows of every map with factors: the unit of the pools' size."""
    factors = [p for p in projections if not p.kind.whole and p.kind not in COPIED_KINDS]
    widths = sum(_layers(p) * (p.local_inputs + p.local_outputs) for p in factors)
    return PAGE_ROWS * dtype.itemsize * widths


def _layers(projection: Projection) -> int:
    """Return how many layers' rows a unit of a pool has: of experts as many as a rank has most."""
    experts = 1 if projection.experts is None else projection.experts.most
    return projection.page_layers * experts


def linear_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Return the bytes of the pools of whole linear maps and draft heads."""
    whole = [p for p in projections if p.kind in COPIED_KINDS]
    rows = sum(p.copies * p.num_layers * p.local_inputs for p in whole)
    return PAGE_ROWS * dtype.itemsize * rows


def copy_bytes(projections: Sequence[Projection], dtype: torch.dtype) -> int:
    """Return the bytes of one page of every pool of whole matrices."""
    whole = [p for p in projections if p.kind.whole]
    return PAGE_ROWS * dtype.itemsize * sum(p.num_layers * p.local_inputs for p in whole)
