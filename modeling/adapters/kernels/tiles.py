"""Cut a step's tokens into tiles: sorted by slot, each tile of one slot."""

import numpy as np
import numpy.typing as npt

HEADER = 8
"""Integers of a record before its tokens, 32 bytes: slot, first position, tiles of adapters, tiles
with those of the base's tokens, unused."""

Ints = npt.NDArray[np.int32]


BASE = np.iinfo(np.int32).max
"""Sorts the base's tokens behind all others."""


def cut_tiles(
    of_token: Ints, size: int, max_tiles: int, with_base: bool = False
) -> tuple[Ints, int]:
    """Sort tokens by slot and cut them into tiles of up to `size` tokens of one slot.

    of_token: int32 [tokens], -1 for the base; with_base: its tokens have tiles too, the last
    ones. Returns records int32 [max_tiles, HEADER + size], padded with -1, and the number of
    adapters' tiles. Each tile's record holds it too, and the number of all.
    """
    if with_base:
        of_token = np.where(of_token < 0, BASE, of_token)
    records = np.full((max_tiles, HEADER + size), -1, dtype=np.int32)
    # Stable: a request's tokens stay together, as x holds them, so loads of a tile are contiguous.
    order = np.argsort(of_token, kind="stable")
    order = order[np.searchsorted(of_token[order], 0) :]
    slots, starts, counts = np.unique(of_token[order], return_index=True, return_counts=True)
    tiles = -(-counts // size)
    num_tiles = int(tiles[slots != BASE].sum())
    records[:, 2], records[:, 3] = num_tiles, tiles.sum()
    first_tiles = np.cumsum(tiles) - tiles
    positions = np.arange(len(order))
    within = positions - np.repeat(starts, counts)
    tile_of = np.repeat(first_tiles, counts) + within // size
    heads = within % size == 0
    records[tile_of[heads], 0] = np.repeat(np.where(slots == BASE, -1, slots), tiles)
    records[tile_of[heads], 1] = positions[heads]
    records[tile_of, HEADER + within % size] = order
    return records, num_tiles
