"""Cut a step's tokens into tiles: sorted by slot, each tile of one slot."""

import numpy as np
import numpy.typing as npt

HEADER = 8
"""Integers of a record before its tokens, 32 bytes: slot, first position, tiles in all, unused."""

Ints = npt.NDArray[np.int32]


def cut_tiles(of_token: Ints, size: int, max_tiles: int) -> tuple[Ints, int]:
    """Sort tokens by slot and cut them into tiles of up to `size` tokens of one slot.

    of_token: int32 [tokens], -1 for the base. Returns records int32 [max_tiles, HEADER + size],
    padded with -1, and the number of tiles, which each tile's record holds too.
    """
    records = np.full((max_tiles, HEADER + size), -1, dtype=np.int32)
    # Stable: a request's tokens stay together, as x holds them, so loads of a tile are contiguous.
    order = np.argsort(of_token, kind="stable")
    order = order[np.searchsorted(of_token[order], 0) :]
    slots, starts, counts = np.unique(of_token[order], return_index=True, return_counts=True)
    tiles = -(-counts // size)
    num_tiles = int(tiles.sum())
    records[:, 2] = num_tiles
    first_tiles = np.cumsum(tiles) - tiles
    positions = np.arange(len(order))
    within = positions - np.repeat(starts, counts)
    tile_of = np.repeat(first_tiles, counts) + within // size
    heads = within % size == 0
    records[tile_of[heads], 0] = np.repeat(slots, tiles)
    records[tile_of[heads], 1] = positions[heads]
    records[tile_of, HEADER + within % size] = order
    return records, num_tiles
