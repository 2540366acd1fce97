"""Experts of a step of few tokens in Triton.

    inner[p, i] = silu( sum_h Wg[e(p), i, h] x[t(p), h] ) * sum_h Wu[e(p), i, h] x[t(p), h]
    y[t, h]     = sum_{p of t} w[p] sum_i Wd[e(p), h, i] inner[p, i]

p: a pair of a token t(p) and one of the experts that compute it, e(p); w: its weight. Two ways:

* One or two tokens share few experts, so every pair reads its expert's weights for itself: two
  launches, sums without tensor cores.
* More tokens: a table has the pairs of each expert, and a program reads a tile of one expert's
  weights once for many pairs, which are the narrow side of the tensor cores' instruction. An expert
  without pairs costs an empty program, or, in steps of prompts, none. In which order an expert's
  pairs lie in the table is left to chance; no pair's result depends on it. What adapters change is
  computed pair by pair, or, in steps of more tokens, for all of a tile's pairs of one adapter.

Launches are programmatic dependent ones, as in `modeling.layers.kernels.operations`.
"""

from dataclasses import dataclass, replace
from functools import cache
from math import gcd
from typing import Any

import torch
import triton
from torch import Tensor

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.layers.kernels.expert_deltas import (
    LayerDeltas,
    PairTiles,
    ShrunkPairs,
    enter_pairs,
    sum_pairs,
    without_deltas,
)
from modeling.layers.kernels.expert_products import (
    down_kernel,
    down_of_token_kernel,
    tiles_kernel,
    up_kernel,
    up_of_pair_kernel,
)


@dataclass(frozen=True)
class Tile:
    """What a program reads of a weight at once, and how it is compiled."""

    outputs: int
    inputs: int
    warps: int
    stages: int = 3

    def fitted(self, outputs: int, inputs: int) -> "Tile":
        """Return the largest part of it of which whole numbers make a weight [outputs, inputs]."""
        return replace(self, outputs=gcd(self.outputs, outputs), inputs=gcd(self.inputs, inputs))


@dataclass(frozen=True)
class ExpertsCut:
    """How the experts of some steps are cut.

    most: tokens of such a step; in PROMPT_CUT, pairs of an expert on the average.
    pairs: of a program; 0: every pair for itself. tiled: whether programs are of tiles that have
    pairs, which one more launch finds, and not of all that may have some. widths: how many there
    are of tiles: `pairs`, half of it, ...: an expert's last pairs take the least that has them.
    """

    most: int
    pairs: int
    up: Tile
    down: Tile
    tiled: bool = False
    widths: int = 1


CUTS = (
    ExpertsCut(2, 0, Tile(2, 2048, 4), Tile(4, 256, 4)),
    ExpertsCut(128, 16, Tile(64, 128, 4, 3), Tile(64, 128, 4, 3)),
    ExpertsCut(256, 32, Tile(64, 64, 4, 4), Tile(128, 64, 4, 4)),
)
"""As measured on an H200 with 128 experts of 768, 8 of them a token, hidden size 2048."""

PROMPT_CUT = ExpertsCut(256, 128, Tile(64, 64, 4, 3), Tile(64, 64, 4, 4), tiled=True, widths=3)
"""Of more tokens than CUTS have: of eight cuts the best or within 2 % of it for 36 and 128 pairs an
expert of two mixtures, with adapters of experts and without. From 512 pairs on a library's grouped
products are faster."""

DELTA_TILES_FROM = 256
"""Tokens of a step from which deltas are computed tile by tile instead of pair by pair."""

LEAST = 32
"""Of which an expert's sizes are multiples: smaller tiles are too slow."""

LINE = 64
"""Numbers of half precision that a cache line holds."""


_UP, _DOWN, _TILES = Launcher(up_kernel), Launcher(down_kernel), Launcher(tiles_kernel)
_UP_OF_PAIR, _DOWN_OF_TOKEN = Launcher(up_of_pair_kernel), Launcher(down_of_token_kernel)


def experts(
    x: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    shares: Tensor,
    counts: Tensor,
    deltas: LayerDeltas | None = None,
) -> Tensor:
    """[tokens, hidden] to the same shape, where `takes` allows.

    up: [experts, 2 * inner, hidden], gate's rows first. down: [experts, hidden, inner].
    ids, shares: [tokens, experts of one]. counts: int32 [experts] zeros, which it leaves as zeros.
    deltas: what adapters change.
    """
    cut = _cut(len(x), *down.shape[1:])
    if not cut.pairs:
        return _by_pair(cut, x, up, down, ids, shares, deltas)
    return _by_expert(cut, x, up, down, ids, shares, counts, deltas)


@cache
def _cut(tokens: int, hidden: int, width: int) -> ExpertsCut:
    cut = next((each for each in CUTS if tokens <= each.most), PROMPT_CUT)
    return replace(cut, up=cut.up.fitted(width, hidden), down=cut.down.fitted(hidden, width))


def takes(x: Tensor, active: int, count: int) -> bool:
    """Whether a step of tokens [tokens, hidden], with `active` of `count` experts each, is cut.

    PROMPT_CUT was compared in bfloat16 alone.
    """
    has_few_pairs = len(x) * active <= PROMPT_CUT.most * count
    return len(x) <= CUTS[-1].most or (has_few_pairs and x.dtype is torch.bfloat16)


def _with_deltas(
    shrunk: ShrunkPairs | None, tensors: list[Any], constants: dict[str, Any], projections: int
) -> list[Any]:
    """Return a product's arguments with those of its deltas, and join the constants."""
    own, more = without_deltas(tensors[0], projections)
    if shrunk is not None:
        own, more = shrunk.arguments(projections), shrunk.constants
    constants |= more
    return [*tensors, *own]


def _by_pair(
    cut: ExpertsCut,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    shares: Tensor,
    deltas: LayerDeltas | None,
) -> Tensor:
    (tokens, hidden), active, width = x.shape, ids.shape[1], down.shape[2]
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    y = torch.empty_like(x)
    pdl = has_dependent_launch(x.device)
    shrunk = None if deltas is None else deltas.shrink_up(x, ids, len(up))
    kinds = (x.device, x.dtype, shares.dtype, ids.dtype)
    constants: dict[str, Any] = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active}
    constants |= _sizes(cut.up) | {"PDL": pdl}
    tensors = _with_deltas(shrunk, [x, up, ids, inner, tokens * active], constants, 2)
    grid = (width // cut.up.outputs, tokens * active)
    _UP_OF_PAIR(
        (kinds, _alike(tensors), *constants.values()),
        *(grid, tensors, constants, _options(cut.up, pdl)),
    )
    shrunk = None if deltas is None else deltas.shrink_down(inner, ids, len(up))
    constants = {"INPUTS": width, "WIDTH": hidden, "ACTIVE": active, **_sizes(cut.down)}
    constants |= {"POWER": triton.next_power_of_2(active), **_lines(width), "PDL": pdl}
    tensors = _with_deltas(shrunk, [inner, down, ids, shares, y], constants, 1)
    _DOWN_OF_TOKEN(
        (kinds, _alike(tensors), *constants.values()),
        *((hidden // cut.down.outputs, tokens), tensors, constants, _options(cut.down, pdl)),
    )
    return y


def _by_expert(
    cut: ExpertsCut,
    x: Tensor,
    up: Tensor,
    down: Tensor,
    ids: Tensor,
    shares: Tensor,
    counts: Tensor,
    deltas: LayerDeltas | None,
) -> Tensor:
    (tokens, hidden), active, count = x.shape, ids.shape[1], len(up)
    width = down.shape[2]
    table = torch.empty(count, tokens, dtype=torch.int32, device=x.device)
    inner = torch.empty(tokens * active, width, dtype=x.dtype, device=x.device)
    out = torch.empty(tokens * active, hidden, dtype=x.dtype, device=x.device)
    pdl = has_dependent_launch(x.device)
    kinds = (x.device, x.dtype, shares.dtype, ids.dtype, tokens % 16 == 0, tokens == 1)
    has_tiles = tokens >= DELTA_TILES_FROM
    by_tile, by_pair = (deltas, None) if has_tiles else (None, deltas)
    added = enter_pairs(x, ids, counts, table, by_pair)
    tiles, programs = _tiles(cut, counts, tokens, active)
    own = PairTiles(counts, tiles, table, active, cut.pairs, cut.tiled, programs)
    shrunk = None if by_tile is None else by_tile.shrink_up_tiles(x, own)
    constants = {"INPUTS": hidden, "WIDTH": width, "ACTIVE": active, **own.constants}
    constants |= _sizes(cut.up) | {"WIDTHS": cut.widths, "MADE": by_pair is not None, "PDL": pdl}
    grid = (programs[0], width // cut.up.outputs, programs[1])
    tensors = [x, up, inner, counts, tiles, table, added, tokens]
    tensors = _with_deltas(shrunk, tensors, constants, 2)
    key = (kinds, _alike(tensors), *constants.values())
    _UP(key, grid, tensors, constants, _options(cut.up, pdl))
    shrunk = None if by_tile is None else by_tile.shrink_down_tiles(inner, own)
    after = None if by_pair is None else by_pair.shrink_down(inner, ids, count)
    constants = {"INPUTS": width, "WIDTH": hidden, "ACTIVE": active, **own.constants}
    constants |= _sizes(cut.down) | {"WIDTHS": cut.widths, **_lines(width), "PDL": pdl}
    grid = (programs[0], hidden // cut.down.outputs, programs[1])
    tensors = [inner, down, shares, out, counts, tiles, table, tokens]
    tensors = _with_deltas(shrunk, tensors, constants, 1)
    key = (kinds, _alike(tensors), *constants.values())
    _DOWN(key, grid, tensors, constants, _options(cut.down, pdl))
    return sum_pairs(out, counts, ids, shares, by_pair, after)


def _tiles(
    cut: ExpertsCut, counts: Tensor, tokens: int, active: int
) -> tuple[Tensor, tuple[int, int]]:
    """Return tiles int32 [most, 2], and how many programs each block of outputs has."""
    if not cut.tiled:
        # An expert has at most one pair of a token. Nothing reads tiles: any tensor will do.
        return counts, (-(-tokens // cut.pairs), len(counts))
    pairs = tokens * active
    most = pairs // cut.pairs + min(len(counts), pairs)
    tiles = torch.empty(most, 2, dtype=torch.int32, device=counts.device)
    pdl = has_dependent_launch(counts.device)
    constants = {
        **{"EXPERTS": len(counts), "WIDTH": triton.next_power_of_2(len(counts))},
        **{"PAIRS": cut.pairs, "BLOCK": 256, "PDL": pdl},
    }
    key = (counts.device, aligned(counts, tiles), *constants.values())
    options = {"num_warps": 4, **launch_options(pdl)}
    _TILES(key, (1,), [counts, tiles, most], constants, options)
    return tiles, (most, 1)


def _alike(arguments: list[Any]) -> int:
    """Whether all tensors among a launch's arguments are aligned; see `aligned`."""
    return aligned(*(each for each in arguments if isinstance(each, Tensor)))


def _sizes(tile: Tile) -> dict[str, int]:
    return {"BLOCK_N": tile.outputs, "BLOCK_K": tile.inputs}


def _options(tile: Tile, pdl: bool) -> dict[str, Any]:
    return {"num_warps": tile.warps, "num_stages": tile.stages, **launch_options(pdl)}


def _lines(inputs: int) -> dict[str, int]:
    return {"LINE": LINE, "LINES": triton.next_power_of_2(-(-inputs // LINE))}


def fits(up: Tensor, down: Tensor) -> bool:
    """Whether the tiles fit weights of these shapes; see `experts`."""
    is_whole = all(size % LEAST == 0 for size in down.shape[1:])
    is_half = up.dtype in (torch.bfloat16, torch.float16)
    return is_half and is_whole and up.is_contiguous() and down.is_contiguous()
