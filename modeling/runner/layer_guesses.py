"""A layer that guesses in an engine's steps (EAGLE-3, MTP): entries for all tokens, and guesses.

Heads attend to an entry of each position, so each step computes those of its tokens, whether
guesses are wanted or not. They lie in a cache of their own, by the block tables of the layers that
see all tokens. The entry of position p is made of the token p + 1 too. It may be another request's
where p ends a cached prefix: that changes guesses, and no token.

Entries of guessed tokens go behind the last right one, into the row's own last page and then into
scratch pages. The next row of the request writes its own there before it reads them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from configs.architectures.rope import POSITIONS_PER_SET
from configs.engine import AttentionKind, EngineConfig
from modeling.attention.base import AttentionBackend
from modeling.attention.kv_cache import CacheSpec, allocate
from modeling.attention.kv_layout import KvLayout
from modeling.attention.select import select_attention
from modeling.batch import ForwardBatch
from modeling.models.draft_layer import DraftLayer, DraftStep
from modeling.runner.block_tables import GroupLayout, Ints
from modeling.runner.cuda_graphs import Record, graph_sizes
from modeling.runner.guesses import GuessedRows, RightSamples, draw, right_samples
from modeling.runner.input_batch import InputBatch, StepLayout
from modeling.runner.layer_graphs import Draw, HeadParts, LayerGraphs, Pages
from modeling.transfer import pack_to_device, to_device
from sharding.group import summed

RESTED = 8
"""After so many decode steps in a row without guesses, entries are made no more until some are
wanted again: requests that rest then guess worse at first, and others lose nothing."""


class LayerStates:
    """What some of a model's modules made of the last step's tokens."""

    def __init__(self, sources: Sequence[nn.Module]) -> None:
        """sources: layers, or a decoder, in the order in which `take` returns their states."""
        self._found: list[Tensor | None] = [None] * len(sources)
        for index, module in enumerate(sources):
            module.register_forward_hook(self._hook(index))

    def take(self) -> Tensor:
        """Return them side by side, [tokens, all widths], and forget them."""
        found = [each for each in self._found if each is not None]
        assert len(found) == len(self._found), "not all of the model was computed"
        self._found = [None] * len(found)
        return torch.cat(found, dim=-1) if len(found) > 1 else found[0]

    def _hook(self, index: int) -> Any:
        def keep(_module: nn.Module, _given: object, out: Any) -> None:
            stream = getattr(out, "last_hidden_state", out)
            if not isinstance(stream, Tensor):
                stream = summed(out[0]) + out[1]
            self._found[index] = stream.flatten(0, -2)

        return keep


@dataclass(frozen=True)
class LayerDrafter:
    """Heads that are loaded, without memory for entries yet.

    backend: of their attention. stride: pages from one block to the next in the model's tables.
    rows: batch slots. most: tokens of a draft. most_running: requests beside which drafts are made.
    """

    heads: DraftLayer
    states: LayerStates
    backend: AttentionBackend
    stride: int
    rows: int
    most: int
    most_running: int

    @classmethod
    def of(
        cls, heads: DraftLayer | None, config: EngineConfig, layout: KvLayout
    ) -> "LayerDrafter | None":
        """A layer over the block tables of the target's layers that see all tokens.

        layout: of the target's cache. heads: None for none.
        """
        if heads is None:
            return None
        first, own = layout.groups[0], config.speculation
        if first.kv.forgets:
            raise ValueError(
                f"engine.speculation.kind {own.kind.value} reads all tokens, and each layer of "
                "this model has a window: set it to medusa or prompt_lookup"
            )
        # Its decode rows are planned in each step, which costs least with our own kernels.
        wanted = AttentionKind.AUTO if heads.device.type == "cpu" else AttentionKind.TRITON
        backend = select_attention(wanted, heads.attention_spec(first.spec.page_size)).backend
        rows, states = config.limits.max_running, LayerStates(heads.sources)
        sizes = first.stride, rows, own.max_tokens, own.max_running
        return cls(heads, states, backend, *sizes)

    @property
    def spec(self) -> CacheSpec:
        """What one page of entries is."""
        own = self.backend.spec
        sizes = 1, own.page_size, own.num_kv_heads, own.head_dim, own.dtype
        return CacheSpec(*sizes, keys_only=own.value_dim is not None)

    @property
    def scratch(self) -> int:
        """Pages that a row's guesses may take beyond its own."""
        return -(-(self.most - 1) // self.backend.spec.page_size)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of all scratch pages."""
        return self.rows * self.scratch * self.spec.bytes_per_page

    def allocate(self, num_blocks: int) -> "LayerGuesser":
        """Take the memory of entries of so many blocks."""
        pages = num_blocks + self.rows * self.scratch
        return LayerGuesser(self, pages, num_blocks)


class LayerGuesser:
    """Heads with their entries."""

    def __init__(self, drafter: LayerDrafter, num_pages: int, first_scratch: int) -> None:
        self._drafter, self._heads = drafter, drafter.heads
        self._backend = drafter.backend
        self._size = drafter.backend.spec.page_size
        device = drafter.backend.spec.device
        [self._cache] = allocate(drafter.spec, num_pages, device)
        self._first_scratch = first_scratch
        self._resting = 0

    def follow(
        self,
        batch: ForwardBatch,
        layout: StepLayout,
        tokens: Tensor,
        sampled: Tensor,
        kept: Tensor | None,
        graphs: LayerGraphs | None,
    ) -> GuessedRows | None:
        """Make the entries of a step's tokens, and guess where the batch wants it.

        tokens: the token buffer, with the step's samples. sampled: int64 [s]. kept: what a replay
        has kept of the layers' states, [s, layers * width]; None: they are taken.
        """
        self._resting = 0 if batch.guesses or not layout.most_queries else self._resting + 1
        if self._resting > RESTED:
            return None
        g = None
        if kept is None or graphs is None or not self._replayed(batch, layout, graphs):
            g = self._entries(layout, tokens, kept)
        if not batch.guesses or not len(layout.targets):
            return None
        count = min(batch.guesses, self._drafter.most)
        samples = [row.num_samples > 0 for row in batch.rows]
        size = None if graphs is None else graphs.chain.size(sum(samples))
        if size is None or graphs is None:
            return self._launched(count, batch, layout, sampled, g, graphs)
        right = None
        if g is not None or any(each.temperature > 0 for each in layout.sampling):
            right = right_samples(count, batch.rows, layout, sampled)
        if g is not None and right is not None:
            at, positions = pack_to_device([layout.last_tokens, layout.positions], g.device)
            at = at[right.at]
            graphs.chain.begin(g[at], positions[at] % POSITIONS_PER_SET)
        found = graphs.chain.run(size, *self._reach(batch, layout), count, _drawing(right))
        return GuessedRows(found, samples)

    def _replayed(self, batch: ForwardBatch, layout: StepLayout, graphs: LayerGraphs) -> bool:
        """Replay the entries of a step; False where no graph serves it."""
        return graphs.run_entries(batch.rows, layout, self._own_pages(layout.groups[0]))

    def _reach(self, batch: ForwardBatch, layout: StepLayout) -> tuple[Ints, Pages]:
        """Where the chain of each row that samples may begin, [m], and its pages, [m, pages]."""
        group = self._own_pages(layout.groups[0])
        counts = np.array([row.num_samples for row in batch.rows if row.num_samples])
        at = layout.last_tokens[counts.cumsum() - counts]
        rows = np.searchsorted(group.bounds, at, side="right") - 1
        longest = int(group.key_lengths[rows].max()) + self._drafter.most - 1
        return group.key_lengths[rows] - counts, self._tables(group, rows, longest)

    def _launched(
        self,
        count: int,
        batch: ForwardBatch,
        layout: StepLayout,
        sampled: Tensor,
        g: Tensor | None,
        graphs: LayerGraphs | None,
    ) -> GuessedRows:
        """Guess kernel by kernel; g: None where a replay has left the last tokens'."""
        right = right_samples(count, batch.rows, layout, sampled)
        # The lengths of rows must be known here, to plan their attention.
        at = layout.last_tokens[right.at.cpu().numpy()]
        if g is not None:
            own = g[to_device(at, g.device)]
        else:
            assert graphs is not None
            own = graphs.chain.g[: len(at)]
        return GuessedRows(self._chain(count, right, layout, at, own), right.rows)

    def _entries(self, layout: StepLayout, tokens: Tensor, kept: Tensor | None) -> Tensor:
        """Write the entries of all tokens and return g, [tokens, hidden]."""
        group = self._own_pages(layout.groups[0])
        lengths = np.diff(group.bounds).tolist(), group.key_lengths.tolist()
        behind, positions, slots, bounds, tables, samples = pack_to_device(
            [
                layout.ids_at + 1,
                layout.positions,
                group.slots,
                group.bounds.astype(np.int32),
                group.tables,
                layout.last_tokens,
            ],
            tokens.device,
        )
        plan = self._backend.prepare(*lengths, tables)
        step = DraftStep(self._cache, slots, bounds, tables, plan)
        if kept is None:
            inner = self._drafter.states.take()
        else:
            # Each token of a replay samples, in the order of the plan.
            inner = torch.empty_like(kept).index_copy_(0, samples, kept)
        out: Tensor = self._heads(tokens[behind], positions, self._heads.from_target(inner), step)
        return out

    def _chain(
        self, count: int, right: RightSamples, layout: StepLayout, at: Ints, g: Tensor
    ) -> Tensor:
        """Guess `count` tokens, int64 [m, count]; at: tokens of the step; g: theirs [m, hidden]."""
        group = self._own_pages(layout.groups[0])
        rows = np.searchsorted(group.bounds, at, side="right") - 1
        positions = group.key_lengths[rows] - group.bounds[rows + 1] + at
        tables = self._tables(group, rows, int(positions.max()) + count)
        found = [draw(self._heads.logits(g).unsqueeze(1), right)]
        for ahead in range(1, count):
            now = positions + ahead
            slots = tables[np.arange(len(rows)), now // self._size] * self._size + now % self._size
            columns = [now, slots, np.arange(len(rows) + 1, dtype=np.int32), tables]
            own, slot, bounds, pages = pack_to_device(columns, g.device)
            plan = self._backend.prepare([1] * len(rows), (now + 1).tolist(), pages)
            step = DraftStep(self._cache, slot, bounds, pages, plan)
            g = self._heads(found[-1][:, 0], own, g, step)
            found.append(draw(self._heads.logits(g).unsqueeze(1), right, ahead))
        return torch.cat(found, dim=1)

    def graphs(
        self,
        state: InputBatch,
        states: Tensor,
        rooms: Sequence[tuple[int, Sequence[int]]],
        record: Record,
    ) -> LayerGraphs:
        """Prepare entries and guesses to be captured.

        state: of the runner. states: where replays leave what heads read, [samples, any]. rooms:
        the sizes of captured steps, for each number of tokens of a row.
        """
        drafter = self._drafter
        parts = HeadParts(
            heads=self._heads,
            cache=self._cache,
            backend=self._backend,
            tokens=state.tokens,
            dummy_token=state.dummy_token,
            states=states,
            # The cache's dummy block is the last one.
            dummy_page=self._first_scratch - 1,
            pages=state.tables[0].max_pages + drafter.scratch,
            most=drafter.most,
        )
        chains = graph_sizes(min(drafter.rows, drafter.most_running))
        return LayerGraphs(parts, rooms, chains, record)

    def _tables(self, group: GroupLayout, rows: Ints, longest: int) -> Pages:
        """Return the rows' tables, int32 [m, pages], with scratch pages behind their own."""
        counts = -(-group.key_lengths[rows] // self._size)
        width = -(-longest // self._size)
        columns = np.arange(width)
        own = group.tables[rows][:, np.minimum(columns, group.tables.shape[1] - 1)]
        scratch = self._drafter.scratch
        beyond = np.clip(columns - counts[:, None], 0, max(0, scratch - 1))
        others = self._first_scratch + np.arange(len(rows))[:, None] * scratch + beyond
        is_own = columns < counts[:, None]
        return np.where(is_own, own, others if scratch else 0).astype(np.int32)

    def _own_pages(self, group: GroupLayout) -> GroupLayout:
        """Return a group's step with pages counted as blocks."""
        stride, size = self._drafter.stride, self._size
        slots = group.slots // (size * stride) * size + group.slots % size
        return GroupLayout(slots, group.bounds, group.tables // stride, group.key_lengths)


def _drawing(right: RightSamples | None) -> Draw | None:
    """How a chain draws; None where the best tokens are taken."""
    if right is None or all(each.temperature <= 0 for each in right.sampling):
        return None
    return lambda logits, ahead: draw(logits.unsqueeze(1), right, ahead)[:, 0]
