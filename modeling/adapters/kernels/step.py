"""The launches of one step's adapters, as `TritonBuffers` describe it.

Grids are large enough for any mix of as many tokens, so a captured `add` stays correct.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from triton import next_power_of_2

from modeling.adapters.kernels.base import Shrink, launch_product, takes
from modeling.adapters.kernels.buffers import TritonBuffers
from modeling.adapters.kernels.forms import Blocks
from modeling.adapters.kernels.gated import COLUMNS, GATED_CONSTANTS, gated_arguments
from modeling.adapters.kernels.groups import MAX_TARGETS, LaunchGroup, split_columns
from modeling.adapters.kernels.product import product_form
from modeling.adapters.kernels.tiles import HEADER
from modeling.adapters.latents import LatentMap
from modeling.adapters.peft.tokens import DIGIT, NUM_DIGITS
from modeling.adapters.product import OutputSlice
from modeling.kernels.launch import aligned, launch_options
from modeling.kernels.pairs import PairDeltas
from sharding.linear_weight import LinearWeight


class TritonBatch:
    """The adapters of one step of `num_tokens` tokens, as the plan's buffers describe it.

    norm_pages: see `NormAdapters`; None for a step that is not captured. expert_deltas: see
    `ExpertAdapters`.
    """

    norm_pages: Tensor | None = None
    expert_deltas: PairDeltas | None = None

    def __init__(self, plan: TritonBuffers, num_tokens: int, num_tiles: int) -> None:
        """num_tiles: how many records of the plan are read."""
        self._plan = plan
        self._product = product_form(num_tokens)
        self._started: tuple[LaunchGroup, int] | None = None
        self._num_tokens = num_tokens
        self._num_tiles = num_tiles
        self._form = plan.form(num_tokens)
        bank = plan.bank
        self._tables = (plan.records, bank.page_table, bank.ranks, plan.partials)
        self._counters = (plan.summed, plan.summed.stride(0))
        self._constants: dict[str, Any] = {
            "PROJECTIONS": bank.ranks.shape[1],
            "TABLE_PAGES": bank.page_table.shape[2],
            "TABLE_LAYERS": bank.ranks.shape[2],
            "MAX_RANK": plan.max_rank,
            "HEADER": HEADER,
            "SUMMED": self._form.summed,
            "BLOCK_M": self._form.tile_tokens,
            "BLOCK_R": self._form.rank_rows,
            "MORE_ROWS": self._form.widest(bank.size.max_rank),
            "PDL": plan.dependent_launch,
        }
        shrink_splits = self._product.shrink_splits if self._product else 0
        self._key = (self._form.max_tokens, shrink_splits)
        self._launch = launch_options(plan.dependent_launch)

    def has_product(
        self, x: Tensor, weight: LinearWeight, targets: tuple[OutputSlice, ...]
    ) -> bool:
        """Return whether `product` is to compute the base product of these targets."""
        return (
            self._product is not None
            and len(targets) <= MAX_TARGETS
            and takes(x)
            and (self._num_tiles > 0 or not weight.is_fast_alone)
            and weight.joins(x)
        )

    def product(
        self,
        y: Tensor,
        x: Tensor,
        weight: LinearWeight,
        layer: int,
        targets: tuple[OutputSlice, ...],
    ) -> None:
        """y = x W^T, and the shrink of the next `add` if there are tiles, in one launch.

        x: [tokens, in], weight: of [out, in], y: [tokens, out].
        """
        form = self._product
        assert form is not None
        group = self._plan.group(targets)
        split_width, num_splits = split_columns(
            group.inputs, form.shrink_columns, form.shrink_splits
        )
        blocks, tile_programs = self._grid(group.count * num_splits)
        # fmt: off
        arguments = (
            *group.a, *self._tables, *self._counters, *group.projections, layer,
            x.stride(0), split_width, num_splits, self._num_tokens,
        )
        # fmt: on
        constants = {"BLOCK_K": form.shrink_columns, **self._constants_of(group)}
        shrink = Shrink(blocks * tile_programs, tile_programs, x, arguments, constants)
        launch_product(form, y, weight.operands(x), self._plan.sums, self._plan.arrived, shrink)
        self._started = (group, num_splits) if self._num_tiles else None

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        """Add the deltas of `targets` at `layer` to y [tokens, out]; x: [tokens, in].

        y[t, o + j] += sum_r (sum_i x[t, i] * A[r, i]) * Bt[r, j], r below the true rank.
        """
        assert x.shape[0] == y.shape[0] == self._num_tokens, (x.shape, y.shape, self._num_tokens)
        assert x.stride(1) == y.stride(1) == 1, (x.stride(), y.stride())
        if self._num_tiles == 0:
            return
        # `product` was called for the same targets and has left the partial sums.
        if self._started is not None:
            self._expand(y, layer, *self._started)
            self._started = None
            return
        for first in range(0, len(targets), MAX_TARGETS):
            group = self._plan.group(targets[first : first + MAX_TARGETS])
            self._expand(y, layer, group, self._shrink(x, layer, group))

    def gated(
        self, gate_up: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]
    ) -> Tensor | None:
        """Return silu(gate') * up' [tokens, n], gate' and up' with the deltas of two targets.

        gate_up: [tokens, 2 * n], contiguous; x: [tokens, in]. None: call `add`, and do it yourself.
        """
        blocks = self._form.gated
        if blocks is None or self._num_tiles == 0 or self._started is not None or len(targets) != 2:
            return None
        group, size = self._plan.group(targets), gate_up.shape[1] // 2
        if group.outputs[:2] != (size, size) or group.offsets[:2] != (0, size):
            return None
        if size % COLUMNS or aligned(gate_up) or not self._plan.has_gated:
            return None
        self._shrink(x, layer, group)
        out = gate_up.new_empty(len(gate_up), size)
        arguments, constants = gated_arguments(
            (gate_up, out), self._tables, self._plan.bank.output_rows, group, layer
        )
        known = self._constants_of(group)
        constants |= {name: known[name] for name in GATED_CONSTANTS}
        constants["BLOCK_N"] = blocks.columns
        grid = -(-size // blocks.columns), -(-self._num_tokens // self._form.tile_tokens)
        key = (*self._key, group.key, gate_up.dtype, aligned(gate_up, out))
        self._plan.gated(key, grid, arguments, constants, self._options(blocks))
        return out

    def latent_queries(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, latent], which is `LatentMap.queries` of x."""
        self._latents(y, x, latents, True)

    def latent_values(self, y: Tensor, x: Tensor, latents: LatentMap) -> None:
        """Change y [tokens, heads, values], which is `LatentMap.values` of x."""
        self._latents(y, x, latents, False)

    def _latents(self, y: Tensor, x: Tensor, latents: LatentMap, of_queries: bool) -> None:
        if self._num_tiles == 0:
            return
        assert x.stride(2) == y.stride(2) == 1, (x.stride(), y.stride())
        plan, at, weight = self._plan, latents.position, latents.weight
        group = plan.group((OutputSlice(at.projection, 0),))
        heads, both, width = weight.shape
        own = {
            "OF_QUERIES": of_queries,
            "HEADS": heads,
            "KEYS": latents.keys,
            "VALUES": both - latents.keys,
            "LATENT": width,
            "BLOCK_IN": max(16, next_power_of_2(x.shape[2])),
            "BLOCK_OUT": max(16, next_power_of_2(y.shape[2])),
        }
        strides = (*y.stride()[:2], *x.stride()[:2])
        arguments = (
            *(y, x, weight, group.a[0], group.bt[0], *self._tables[:3], plan.bank.output_rows),
            *(at.projection, at.layer, *strides),
        )
        names = ("PROJECTIONS", "TABLE_PAGES", "TABLE_LAYERS", "LAYERS", "HEADER", "BLOCK_M")
        known = self._constants_of(group)
        constants = own | {name: known[name] for name in names} | {"ROWS": 16}
        divisible = tuple(stride % 16 == 0 for stride in strides)
        key = (*self._key, group.key, y.dtype, *own.values(), divisible, aligned(y, x, weight))
        plan.latents(key, self._grid(heads), arguments, constants, {"num_warps": 4})

    def _grid(self, num_blocks: int) -> tuple[int, int]:
        """Return the grid: blocks of columns, and programs that each take one or more tiles."""
        return num_blocks, min(self._num_tiles, -(-self._form.programs // num_blocks))

    def _shrink(self, x: Tensor, layer: int, group: LaunchGroup) -> int:
        """s[p, r] = sum_i x[token(p), i] A[row(p, r), i], as partial sums; returns their number."""
        blocks = self._form.shrink
        constants = {"BLOCK_K": blocks.columns, **self._constants_of(group)}
        splits = constants["SPLITS"]
        split_width, num_splits = split_columns(group.inputs, blocks.columns, splits)
        # fmt: off
        arguments = (
            x, *group.a, *self._tables, *self._counters, *group.projections, layer,
            group.inputs, x.stride(0), split_width, num_splits, self._num_tokens,
        )
        # fmt: on
        grid = self._grid(group.count * num_splits)
        # All that Triton compiles the kernel for; see Launcher.
        key = (*self._key, group.key, x.dtype, x.stride(0), aligned(x))
        self._plan.shrink(key, grid, arguments, constants, self._options(blocks))
        return num_splits

    def _expand(self, y: Tensor, layer: int, group: LaunchGroup, num_splits: int) -> None:
        """y[token(p), o + j] += sum_r s[p, r] Bt[row(p, r), j], s the sum of the partial sums."""
        blocks = self._form.expand
        num_blocks = sum(-(-width // blocks.columns) for width in group.outputs)
        # fmt: off
        arguments = (
            y, *group.bt, *self._tables, self._plan.bank.output_rows, *group.projections, layer,
            *group.outputs, *group.offsets, y.stride(0), num_splits, self._num_tokens,
        )
        # fmt: on
        constants = {"BLOCK_N": blocks.columns, **self._constants_of(group)}
        key = (*self._key, group.key, y.dtype, y.stride(0), aligned(y))
        grid = self._grid(num_blocks)
        self._plan.expand(key, grid, arguments, constants, self._options(blocks))

    def _constants_of(self, group: LaunchGroup) -> dict[str, Any]:
        """Return the constants of a group's launches."""
        product = self._product
        splits = (
            product.shrink_splits if product else self._form.splits_of(group.inputs, group.count)
        )
        return {"LAYERS": group.layers, "SPLITS": splits, **self._constants}

    def _options(self, blocks: Blocks) -> dict[str, Any]:
        """Return a kernel's options of compilation and launch."""
        return {
            "num_warps": blocks.warps,
            "num_stages": blocks.stages,
            "maxnreg": blocks.registers,
            **self._launch,
        }


class TritonRows(TritonBatch):
    """The adapters of a captured step, with trained tokens; see `TokenAdapters`.

    Every token gets logits, if any does.
    """

    def set_embedded(self, y: Tensor, input_ids: Tensor) -> None:
        """y[t] = R[r] where token t is row r's; y: [tokens, hidden], input_ids: int64 [tokens]."""
        if self._plan.bank.token_rows is None:
            return
        plan, index = self._plan, self._plan.bank.token_rows[0]
        group = plan.group((OutputSlice(index, 0),))
        # fmt: off
        arguments = (
            y, input_ids, group.a[0], group.bt[0], *self._tables[:3], index, group.inputs,
            y.stride(0),
        )
        # fmt: on
        names = ("PROJECTIONS", "TABLE_PAGES", "TABLE_LAYERS", "HEADER", "BLOCK_M")
        constants = self._token_constants(group, names) | {"COLUMNS": 256}
        key = (*self._key, group.key, y.dtype, aligned(y, input_ids))
        plan.set_embedded(key, (self._num_tiles,), arguments, constants, {"num_warps": 4})

    def set_logits(self, z: Tensor, x: Tensor) -> None:
        """z[t, id(r)] = sum_i R[r, i] x[t, i]; z: [tokens, vocab_size], x: [tokens, hidden]."""
        if self._plan.bank.token_rows is None:
            return
        plan, index = self._plan, self._plan.bank.token_rows[1]
        group = plan.group((OutputSlice(index, 0),))
        splits = self._shrink(x, 0, group)
        # fmt: off
        arguments = (
            z, group.bt[0], *self._tables, index, z.stride(0), splits, self._num_tokens,
        )
        # fmt: on
        names = ("PROJECTIONS", "TABLE_PAGES", "TABLE_LAYERS", "MAX_RANK", "HEADER", "SPLITS")
        constants = self._token_constants(group, (*names, "SUMMED", "BLOCK_M"))
        key = (*self._key, group.key, z.dtype, aligned(z))
        plan.set_logits(key, (self._num_tiles,), arguments, constants, {"num_warps": 4})

    def _token_constants(self, group: LaunchGroup, names: Sequence[str]) -> dict[str, Any]:
        """Return the constants of these names, and those of rows of tokens."""
        own = {"LAYERS": group.layers, "ROWS": self._form.rank_rows}
        known = self._constants_of(group)
        return {name: known[name] for name in names} | own | {"DIGITS": NUM_DIGITS, "DIGIT": DIGIT}


class TritonEnds(TritonRows):
    """The adapters of a captured step, of embedding and head too; see `EndAdapters`.

    Every token gets logits, if any does.
    """

    def embed(self, y: Tensor, local_ids: Tensor, foreign: Tensor | None) -> None:
        """y[t, o] += sum_r A[r, local_ids[t]] Bt[r, o]; y: [tokens, hidden]."""
        plan = self._plan
        assert plan.bank.embedding is not None
        group = plan.group((OutputSlice(plan.bank.embedding, 0),))
        # fmt: off
        arguments = (
            local_ids, local_ids if foreign is None else foreign.view(torch.uint8), group.a[0],
            *self._tables, group.projections[0], group.inputs,
        )
        # fmt: on
        names = ("PROJECTIONS", "TABLE_PAGES", "TABLE_LAYERS", "MAX_RANK", "HEADER", "BLOCK_M")
        constants = {name: self._constants[name] for name in (*names, "PDL")}
        constants |= {"LAYERS": group.layers, "ROWS": self._form.rank_rows}
        constants["HAS_FOREIGN"] = foreign is not None
        key = (*self._key, group.key, constants["HAS_FOREIGN"], aligned(arguments[0], arguments[1]))
        plan.embed(key, (self._num_tiles,), arguments, constants, {"num_warps": 1, **self._launch})
        self._expand(y, 0, group, 1)

    def logits(self, z: Tensor, x: Tensor) -> None:
        """z[t, v] += sum_r (sum_i x[t, i] A[r, i]) Bt[r, v]; z: [tokens, this rank's range]."""
        bank = self._plan.bank
        assert bank.head is not None
        if bank.projections[bank.head].local_outputs:  # A rank may have padding alone.
            self.add(z, x, 0, (OutputSlice(bank.head, 0),))
