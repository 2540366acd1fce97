"""A step's adapters for the Triton kernels: tokens cut into tiles, in buffers that never move.

Everything that varies between steps is in the buffers of a `TritonPlan`. `TritonBatch` launches
grids that are large enough for any mix of as many tokens. So a captured `add` stays correct: call
`update` before each replay, on the stream of the replay.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels.tiles import HEADER, cut_tiles
from modeling.adapters.kernels.triton_base import Shrink, launch_product, takes
from modeling.adapters.kernels.triton_embed import embed_kernel
from modeling.adapters.kernels.triton_expand import expand_kernel
from modeling.adapters.kernels.triton_forms import Blocks, Form, forms_of
from modeling.adapters.kernels.triton_groups import (
    MAX_TARGETS,
    LaunchGroup,
    group_of,
    split_columns,
)
from modeling.adapters.kernels.triton_product import MAX_BLOCKS, MAX_SUMS, product_form
from modeling.adapters.kernels.triton_shrink import shrink_kernel
from modeling.adapters.kernels.triton_tokens import set_embedded_kernel, set_logits_kernel
from modeling.adapters.peft_tokens import DIGIT, NUM_DIGITS
from modeling.adapters.product import OutputSlice
from modeling.triton_launch import Launcher, aligned, has_dependent_launch, launch_options
from sharding.linear_weight import LinearWeight


class TritonPlan:
    """The buffers of steps of up to `max_tokens` tokens, written by `update`.

    Steps share them in the order of their stream, so one plan serves a runner.
    """

    def __init__(
        self, bank: AdapterBank, max_tokens: int, forms: Sequence[Form] | None = None
    ) -> None:
        """Allocate on the bank's device; forms: None for the tuned table."""
        self.bank = bank
        self.forms = tuple(forms) if forms is not None else forms_of(bank.pools[0].a.dtype)
        self.max_tokens = max_tokens
        device = bank.page_table.device
        widest = max(form.widest(bank.size.max_rank) for form in self.forms)
        # Whole passes, so that a load past the true rank stays within its row of partial sums.
        self.max_rank = -(-bank.size.max_rank // widest) * widest
        self.dependent_launch = has_dependent_launch(device)
        self.shrink, self.expand = Launcher(shrink_kernel), Launcher(expand_kernel)
        self.embed = Launcher(embed_kernel)
        self.set_embedded = Launcher(set_embedded_kernel)
        self.set_logits = Launcher(set_logits_kernel)
        used = self._used_forms()
        records = max(self.max_tiles(tokens) * (HEADER + form.tile_tokens) for form, tokens in used)
        partials = max(form.splits * tokens for form, tokens in used)
        partials *= MAX_TARGETS * self.max_rank
        assert partials < 2**31, "kernels count partial sums in 32 bits"
        # Addresses that captured launches keep: no buffer is ever allocated again.
        self.records = torch.full((records,), -1, dtype=torch.int32, device=device)
        self.partials = torch.empty(partials, dtype=torch.float32, device=device)
        self.sums = torch.empty(MAX_SUMS, dtype=torch.float32, device=device)
        # Counters must be 0 before a launch; the last program to arrive sets them back.
        self.arrived = torch.zeros(MAX_BLOCKS, dtype=torch.int32, device=device)
        most_tiles = max(self.max_tiles(tokens) for _, tokens in used)
        self.summed = torch.zeros(MAX_TARGETS, most_tiles, dtype=torch.int32, device=device)
        self._groups: dict[tuple[OutputSlice, ...], LaunchGroup] = {}
        self.norm_pages = torch.full((max_tokens,), -1, dtype=torch.int32, device=device)
        self._has_norms = False

    def form(self, num_tokens: int) -> Form:
        """Return how a step of so many tokens is cut."""
        return next(form for form in self.forms if num_tokens <= form.max_tokens)

    def max_tiles(self, num_tokens: int) -> int:
        """Return the most tiles that any mix of so many tokens is cut into."""
        # n tokens of a slot give at most one tile, and one more for each whole tile beyond.
        distinct = min(self.bank.size.slots, num_tokens)
        return distinct + (num_tokens - distinct) // self.form(num_tokens).tile_tokens

    def update(self, slots: Sequence[int], lengths: Sequence[int]) -> int:
        """Write the next step's tiles: a slot (-1: base) and a length for each row, in x's order.

        Returns their number. A captured step is padded with rows of slot -1.
        """
        of_token = np.repeat(np.asarray(slots, dtype=np.int32), np.asarray(lengths))
        assert len(of_token) <= self.max_tokens, (len(of_token), self.max_tokens)
        size = self.form(len(of_token)).tile_tokens
        records, num_tiles = cut_tiles(of_token, size, self.max_tiles(len(of_token)))
        host = torch.from_numpy(records.reshape(-1))
        if self.records.device.type == "cuda":
            # torch gives pinned memory back only after the copy: two steps may be in flight.
            host = host.pin_memory()
        self.records[: len(host)].copy_(host, non_blocking=True)
        self._update_norms(of_token)
        return num_tiles

    def _update_norms(self, of_token: npt.NDArray[np.int32]) -> None:
        """Write each token's page of norms; nothing where no token of this step or the last has."""
        index, bank = self.bank.norms, self.bank
        if index is None:
            return
        slots = np.unique(of_token)
        pages = {slot: bank.page_of(slot, index) for slot in slots[slots >= 0].tolist()}
        had, self._has_norms = self._has_norms, max(pages.values(), default=-1) >= 0
        if not (had or self._has_norms):
            return
        found = np.full(self.max_tokens, -1, dtype=np.int32)
        for slot, page in pages.items():
            found[: len(of_token)][of_token == slot] = page
        host = torch.from_numpy(found)
        if self.norm_pages.device.type == "cuda":
            host = host.pin_memory()
        self.norm_pages.copy_(host, non_blocking=True)

    def batch(self, num_tokens: int, num_tiles: int | None = None) -> "TritonBatch":
        """Return the data of steps of so many tokens; num_tiles: `update`'s, None to capture."""
        if num_tiles is not None:
            return TritonBatch(self, num_tokens, num_tiles)
        kind = TritonBatch if self.bank.embedding is None else TritonEnds
        if kind is TritonBatch and self.bank.token_rows is not None:
            kind = TritonRows
        captured = kind(self, num_tokens, self.max_tiles(num_tokens))
        if self.bank.norms is not None:
            captured.norm_pages = self.norm_pages[:num_tokens]
        return captured

    def group(self, targets: tuple[OutputSlice, ...]) -> LaunchGroup:
        """Return what a launch for these targets reads, made once."""
        found = self._groups.get(targets)
        if found is None:
            found = self._groups[targets] = group_of(self.bank, targets, len(self._groups))
        return found

    def _used_forms(self) -> list[tuple[Form, int]]:
        """Return each form that steps may take, with the most tokens of such a step."""
        used = []
        smaller = 0
        for form in self.forms:
            if smaller < self.max_tokens:
                used.append((form, min(form.max_tokens, self.max_tokens)))
            smaller = form.max_tokens
        return used


class TritonBatch:
    """The adapters of one step of `num_tokens` tokens, as the plan's buffers describe it.

    norm_pages: see `NormAdapters`; None for a step that is not captured.
    """

    norm_pages: Tensor | None = None

    def __init__(self, plan: TritonPlan, num_tokens: int, num_tiles: int) -> None:
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
            "SPLITS": self._product.shrink_splits if self._product else self._form.splits,
            "BLOCK_M": self._form.tile_tokens,
            "BLOCK_R": self._form.rank_rows,
            "MORE_ROWS": self._form.widest(bank.size.max_rank),
            "PDL": plan.dependent_launch,
        }
        self._key = (self._form.max_tokens, self._constants["SPLITS"])
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
        constants = {"LAYERS": group.layers, "BLOCK_K": form.shrink_columns, **self._constants}
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

    def _grid(self, num_blocks: int) -> tuple[int, int]:
        """Return the grid: blocks of columns, and programs that each take one or more tiles."""
        return num_blocks, min(self._num_tiles, -(-self._form.programs // num_blocks))

    def _shrink(self, x: Tensor, layer: int, group: LaunchGroup) -> int:
        """s[p, r] = sum_i x[token(p), i] A[row(p, r), i], as partial sums; returns their number."""
        blocks = self._form.shrink
        splits = self._constants["SPLITS"]
        split_width, num_splits = split_columns(group.inputs, blocks.columns, splits)
        # fmt: off
        arguments = (
            x, *group.a, *self._tables, *self._counters, *group.projections, layer,
            group.inputs, x.stride(0), split_width, num_splits, self._num_tokens,
        )
        # fmt: on
        constants = {"LAYERS": group.layers, "BLOCK_K": blocks.columns, **self._constants}
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
        constants = {"LAYERS": group.layers, "BLOCK_N": blocks.columns, **self._constants}
        key = (*self._key, group.key, y.dtype, y.stride(0), aligned(y))
        grid = self._grid(num_blocks)
        self._plan.expand(key, grid, arguments, constants, self._options(blocks))

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
        known = {name: self._constants[name] for name in names}
        return known | own | {"DIGITS": NUM_DIGITS, "DIGIT": DIGIT}


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


def triton_batch(bank: AdapterBank, slots: Sequence[int], lengths: Sequence[int]) -> TritonBatch:
    """Return one step's data in new buffers; one slot (-1: base) and one length for each row."""
    num_tokens = sum(lengths)
    plan = TritonPlan(bank, num_tokens)
    return plan.batch(num_tokens, plan.update(slots, lengths))
