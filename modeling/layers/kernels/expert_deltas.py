"""What lies around the products of one layer's experts, and what adapters change of them.

Of one or two tokens the products' kernels add the deltas themselves. Of more, a tile of the tensor
cores has pairs of many adapters, and their rows of Bt would come number by number: so launches
between the products read them in whole lines, and leave float32 numbers for gate and up, or add
those of down to the sum of a token's pairs.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
from torch import Tensor

from modeling.kernels.launch import Launcher, aligned, has_dependent_launch, launch_options
from modeling.kernels.pairs import ROWS, PairDeltas
from modeling.layers.kernels.expert_products import (
    enter_deltas_kernel,
    enter_kernel,
    sum_deltas_kernel,
    sum_kernel,
)
from modeling.layers.kernels.expert_tiles import shrink_tile_kernel

DELTA_COLUMNS = 512
"""Of gate or up that a program computes."""

SUM_COLUMNS, DELTA_SUM_COLUMNS = 512, 64
"""Of a token's sum that a program computes, without deltas and with them."""

_ENTER, _ENTER_DELTAS = Launcher(enter_kernel), Launcher(enter_deltas_kernel)
_SUM, _SUM_DELTAS = Launcher(sum_kernel), Launcher(sum_deltas_kernel)
_SHRINK_TILE = Launcher(shrink_tile_kernel)


SHRINK_INPUTS = 128
"""That a program of a tile reads at once."""

FEW_IN_TILE = 64
"""Pairs for which four warps have registers enough."""


@dataclass(frozen=True)
class PairTiles:
    """Where kernels find the pairs of each expert, and how they are cut into tiles.

    counts: int32 [experts], pairs of each. order: int32 [experts, tokens], them. size: pairs of a
    tile. tiles, is_cut: see `tile_of`. programs: of each block of outputs.
    """

    counts: Tensor
    tiles: Tensor
    order: Tensor
    active: int
    size: int
    is_cut: bool
    programs: tuple[int, int]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the kernels' constants."""
        return {"PAIRS": self.size, "TILED": self.is_cut}


@dataclass(frozen=True)
class LayerDeltas:
    """A step's adapters of one layer's experts.

    up: the projections of gate and up, or one of both. down: that of down. layer: its index among
    those with experts.
    """

    deltas: PairDeltas
    up: tuple[int, ...]
    down: int
    layer: int

    def of_tokens(self, at: slice) -> "LayerDeltas":
        """Return those of a part of the step's tokens."""
        return replace(self, deltas=replace(self.deltas, slots=self.deltas.slots[at]))

    def enter(self, x: Tensor, ids: Tensor, counts: Tensor, order: Tensor) -> Tensor:
        """Return the deltas of gate and up, float32 [maps, pairs, width], and enter all pairs.

        x: [tokens, hidden]. ids: [tokens, experts of one]. counts, order: see `enter_kernel`.
        """
        (tokens, active), pairs = ids.shape, ids.numel()
        own = self.shrink_up(x, ids, len(counts))
        width = own.bt[0].shape[3]
        deltas = x.new_empty(len(self.up), pairs, width, dtype=torch.float32)
        columns = min(DELTA_COLUMNS, max(64, triton.next_power_of_2(width)))
        constants = {"WIDTH": width, "ACTIVE": active, "BLOCK_N": columns}
        constants |= {**own.deltas.sizes, "PDL": has_dependent_launch(x.device)}
        tensors = [ids, counts, order, deltas]
        key = (ids.device, ids.dtype, own.bt[0].dtype, tokens % 16 == 0, tokens == 1)
        key = (*key, aligned(*tensors, *own.tensors), *constants.values())
        arguments = [*tensors, tokens, pairs, *own.arguments(2)]
        grid = (pairs, len(self.up), -(-width // columns))
        _ENTER_DELTAS(key, grid, arguments, constants, _options(x.device, 4))
        return deltas

    def sum(
        self,
        out: Tensor,
        y: Tensor,
        counts: Tensor,
        ids: Tensor,
        shares: Tensor,
        shrunk: "ShrunkPairs",
    ) -> None:
        """Set y [tokens, hidden] to the sums of out's pairs and of the deltas of down.

        out: [pairs, hidden], by the pairs' weights. shares: [tokens, experts of one]. counts are
        left as zeros.
        """
        (tokens, active), hidden = ids.shape, y.shape[1]
        constants = {
            **{"WIDTH": hidden, "ACTIVE": active, "PAIRS": triton.next_power_of_2(active)},
            **{"BLOCK_N": DELTA_SUM_COLUMNS, "EXPERTS": len(counts)},
            **{"COUNTS": triton.next_power_of_2(len(counts)), **shrunk.deltas.sizes},
            "PDL": has_dependent_launch(y.device),
        }
        tensors = [out, y, counts, ids, shares]
        key = (y.device, y.dtype, shares.dtype, ids.dtype, shrunk.bt[0].dtype)
        key = (*key, aligned(*tensors, *shrunk.tensors), *constants.values())
        grid = (tokens, -(-hidden // DELTA_SUM_COLUMNS))
        arguments = [*tensors, *shrunk.arguments(1)]
        _SUM_DELTAS(key, grid, arguments, constants, _options(y.device, 4))

    def shrink_up(self, x: Tensor, ids: Tensor, count: int) -> "ShrunkPairs":
        """Shrink x [tokens, hidden] for gate and up; ids: [tokens, experts of one]."""
        return self._shrunk(x, ids, self.up, count)

    def shrink_down(self, inner: Tensor, ids: Tensor, count: int) -> "ShrunkPairs":
        """Shrink inner [pairs, width] for down."""
        # The kernel ahead, of gate and up, waited for what wrote ids.
        return self._shrunk(inner, ids, (self.down,), count, early=True)

    def shrink_up_tiles(self, x: Tensor, tiles: PairTiles) -> "ShrunkPairs":
        """Shrink x [tokens, hidden] for gate and up."""
        return self._shrunk_tiles(x, self.up, tiles)

    def shrink_down_tiles(self, inner: Tensor, tiles: PairTiles) -> "ShrunkPairs":
        """Shrink inner [pairs, width] for down."""
        return self._shrunk_tiles(inner, (self.down,), tiles)

    def _shrunk_tiles(
        self, x: Tensor, projections: tuple[int, ...], tiles: PairTiles
    ) -> "ShrunkPairs":
        own, pdl = self.deltas, has_dependent_launch(x.device)
        (_, tokens), inputs = tiles.order.shape, x.shape[1]
        pairs = tokens * tiles.active
        shrunk = x.new_empty(
            len(projections), pairs, own.sizes["PAGES"] * ROWS, dtype=torch.float32
        )
        both = (projections[0], projections[-1])
        pools = [own.pools[each][0] for each in both]
        constants: dict[str, Any] = {
            **{"INPUTS": inputs, "ACTIVE": tiles.active, "SHARED": pairs // len(x)},
            **{**tiles.constants, "BLOCK_K": min(SHRINK_INPUTS, triton.next_power_of_2(inputs))},
            **{**own.sizes, "PDL": pdl},
        }
        tensors = [x, shrunk, tiles.counts, tiles.tiles, tiles.order]
        more = [*pools, own.slots, own.table]
        maps = [own.maps[each] for each in both]
        arguments = [*tensors, tokens, *more, *maps, self.layer, pools[0].shape[1]]
        kinds = (x.device, x.dtype, pools[0].dtype, tokens % 16 == 0, tokens == 1)
        key = (*kinds, aligned(*tensors, *more), *constants.values())
        grid = (tiles.programs[0], len(projections), tiles.programs[1])
        options = _options(x.device, 4 if tiles.size <= FEW_IN_TILE else 8)
        _SHRINK_TILE(key, grid, arguments, constants, options)
        bt = tuple(own.pools[each][1] for each in projections)
        return ShrunkPairs(own, shrunk, bt, projections, self.layer)

    def _shrunk(
        self,
        x: Tensor,
        ids: Tensor,
        projections: tuple[int, ...],
        count: int,
        early: bool = False,
    ) -> "ShrunkPairs":
        own = self.deltas
        shrunk = own.shrink(x, ids, own.slots, projections, self.layer, count, early)
        bt = tuple(own.pools[each][1] for each in projections)
        return ShrunkPairs(own, shrunk, bt, projections, self.layer)


@dataclass(frozen=True)
class ShrunkPairs:
    """What kernels read to add deltas, of one or two projections.

    shrunk: as `PairDeltas.shrink` returns it. bt: the projections' pools.
    """

    deltas: PairDeltas
    shrunk: Tensor
    bt: tuple[Tensor, ...]
    projections: tuple[int, ...]
    layer: int

    @property
    def tensors(self) -> list[Tensor]:
        """Return the tensors among the kernels' arguments."""
        return [self.shrunk, *self.bt, self.deltas.slots, self.deltas.table]

    def arguments(self, count: int) -> list[Any]:
        """Return the arguments of kernels that take so many projections; the last one repeats."""
        at = [min(each, len(self.bt) - 1) for each in range(count)]
        own = self.deltas
        pools, maps = ([self.bt[i] for i in at], [own.maps[self.projections[i]] for i in at])
        tensors = [self.shrunk, *pools, own.slots, own.table]
        return [*tensors, *maps, self.layer, self.bt[0].shape[1]]

    @property
    def constants(self) -> dict[str, Any]:
        """Return the kernels' constants."""
        return {"DELTAS": True, **self.deltas.sizes}


def without_deltas(x: Tensor, projections: int) -> tuple[list[Any], dict[str, Any]]:
    """Return arguments and constants of kernels that add none; x: any tensor of the launch."""
    constants = {"DELTAS": False, "MAPS": 1, "STRIDE": 1, "PAGES": 1, "WIDE": 1}
    return [x] * (projections + 3) + [0] * (projections + 2), constants


def enter_pairs(
    x: Tensor, ids: Tensor, counts: Tensor, order: Tensor, deltas: LayerDeltas | None
) -> Tensor:
    """Enter all pairs in the table; return what `LayerDeltas.enter` does, any tensor without.

    x: [tokens, hidden]. ids: [tokens, experts of one]. counts, order: see `enter_kernel`.
    """
    if deltas is not None:
        return deltas.enter(x, ids, counts, order)
    tokens, active = ids.shape
    constants = {"ACTIVE": active, "WIDTH": triton.next_power_of_2(active)}
    constants |= {"PDL": has_dependent_launch(x.device)}
    key = (ids.device, ids.dtype, tokens % 16 == 0, tokens == 1, aligned(ids, counts, order))
    arguments = [ids, counts, order, tokens]
    _ENTER((*key, *constants.values()), (tokens,), arguments, constants, _options(x.device, 1))
    return x


def sum_pairs(
    out: Tensor,
    counts: Tensor,
    ids: Tensor,
    shares: Tensor,
    deltas: LayerDeltas | None,
    shrunk: ShrunkPairs | None,
) -> Tensor:
    """Sum out's pairs [pairs, hidden] to tokens [tokens, hidden]; counts are left as zeros.

    shrunk: of down. See `LayerDeltas.sum`.
    """
    (tokens, active), hidden, experts = ids.shape, out.shape[1], len(counts)
    y = out.new_empty(tokens, hidden)
    if deltas is not None and shrunk is not None:
        deltas.sum(out, y, counts, ids, shares, shrunk)
        return y
    constants = {
        **{"WIDTH": hidden, "ACTIVE": active},
        **{"BLOCK_N": SUM_COLUMNS, "EXPERTS": experts, "COUNTS": triton.next_power_of_2(experts)},
        "PDL": has_dependent_launch(y.device),
    }
    key = (y.device, y.dtype, aligned(out, y, counts), *constants.values())
    grid = (tokens, -(-hidden // SUM_COLUMNS), 1)
    _SUM(key, grid, [out, y, counts], constants, _options(y.device, 4))
    return y


def _options(device: torch.device, warps: int) -> dict[str, Any]:
    return {"num_warps": warps, **launch_options(has_dependent_launch(device))}
