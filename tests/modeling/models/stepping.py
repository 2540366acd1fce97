"""Runs a paged model by hand: rows of tokens in, logits out, pages in a shuffled order."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from configs.architectures.rope import POSITIONS_PER_SET
from configs.architectures.select import load_architecture
from configs.engine import AttentionKind
from configs.rope_sets import SHORT
from modeling.adapters.product import AdapterData
from modeling.attention.kv_cache import allocate
from modeling.attention.select import select_attention
from modeling.models.base import PagedModel
from modeling.models.context import GroupStep, PagedContext
from modeling.models.kv_groups import attention_specs, kv_layout
from modeling.models.paged_base import FlashBase
from modeling.models.select import build_model
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import TensorParallel
from sharding.loader import Weights

CPU = torch.device("cpu")


def load(folder: Path, group: TensorParallel, dtype: torch.dtype = torch.float32) -> PagedModel:
    """One rank's share of the checkpoint in `folder`."""
    weights = Weights(SafetensorsCheckpoint(folder), group, dtype, CPU)
    return build_model(load_architecture(folder), weights)


@dataclass
class Stepper:
    """A model with a cache of its own; sequences are known by their index.

    Pages are handed out from a shuffled list, so tables are never in order. rope_set: that of all
    positions.
    """

    model: PagedModel
    page_size: int = 16
    num_pages: int = 24
    rope_set: int = SHORT
    lengths: dict[int, int] = field(default_factory=dict)
    tables: dict[int, list[int]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        layout = kv_layout(self.model, self.page_size)
        (group,) = layout.groups
        self.cache = allocate(group.spec, self.num_pages, CPU)
        (spec,) = attention_specs(self.model, layout)
        self.backend = select_attention(AttentionKind.AUTO, spec).backend
        order = torch.randperm(self.num_pages, generator=torch.Generator().manual_seed(7))
        self.free = order.tolist()

    def step(self, rows: Sequence[tuple[int, Sequence[int]]]) -> list[Tensor]:
        """Append tokens to sequences, one row each; returns each row's logits [tokens, vocab]."""
        return list(torch.split(self.run(rows), [len(tokens) for _, tokens in rows]))

    @torch.inference_mode()
    def run(
        self,
        rows: Sequence[tuple[int, Sequence[int]]],
        adapter_data: AdapterData | None = None,
        stored: Tensor | None = None,
        **options: Any,
    ) -> Tensor:
        """One forward over the packed rows; options: the last ones of `paged`."""
        positions: list[int] = []
        slots: list[int] = []
        for sequence, tokens in rows:
            start = self.lengths.get(sequence, 0)
            self.lengths[sequence] = start + len(tokens)
            table = self._grown_table(sequence)
            new = range(start, start + len(tokens))
            positions += new
            slots += [table[p // self.page_size] * self.page_size + p % self.page_size for p in new]
        sequences = [sequence for sequence, _ in rows]
        queries = [len(tokens) for _, tokens in rows]
        tables = self._block_tables(sequences)
        step = self.backend.prepare(queries, [self.lengths[s] for s in sequences], tables)
        starts = torch.tensor([0, *accumulate(queries)], dtype=torch.int32)
        group = GroupStep(starts, tables, torch.tensor(slots), step)
        context = PagedContext(self.cache, (group,), adapter_data, stored)
        out, speculative = self.compute(
            torch.tensor([token for _, tokens in rows for token in tokens]),
            torch.tensor(positions) + self.rope_set * POSITIONS_PER_SET,
            context,
            **options,
        )
        assert speculative is None
        return out

    def compute(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one step; here by the engine's interface."""
        return self.model.paged(input_ids, position_ids, context, **options)

    def _grown_table(self, sequence: int) -> list[int]:
        """The sequence's pages, enough for its length."""
        table = self.tables.setdefault(sequence, [])
        while len(table) * self.page_size < self.lengths[sequence]:
            table.append(self.free.pop())
        return table

    def _block_tables(self, sequences: list[int]) -> Tensor:
        """Block tables padded with a page that no row may read."""
        longest = max(len(self.tables[sequence]) for sequence in sequences) + 1
        rows = [self.tables[s] + [10**6] * (longest - len(self.tables[s])) for s in sequences]
        return torch.tensor(rows, dtype=torch.int32)


class FlashStepper(Stepper):
    """Steps by the seeds' `forward`, which takes the context's fields one by one."""

    def compute(
        self, input_ids: Tensor, position_ids: Tensor, context: PagedContext, **options: Any
    ) -> tuple[Tensor, Tensor | None]:
        """Compute one step by `forward`."""
        assert isinstance(self.model, FlashBase)
        (group,) = context.groups
        return self.model.forward(
            input_ids,
            position_ids,
            group.cu_seqlens,
            context.caches,
            group.block_tables,
            group.slots,
            group.attention,
            max(group.attention.key_lengths),
            context.adapter_data,
            context.stored,
            **options,
        )
