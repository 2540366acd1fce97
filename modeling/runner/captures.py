"""Which steps a runner captures at start, and the memory that they will take."""

import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch

from configs.engine import (
    DRAFT_LENGTHS,
    CudaGraphs,
    EngineConfig,
    LimitsConfig,
    SpeculationConfig,
)
from modeling.attention.base import AttentionBackend
from modeling.runner.cuda_graphs import (
    DecodeGraphs,
    GraphParts,
    StepOutputs,
    graph_sizes,
)
from modeling.runner.forward import PagedForward
from modeling.runner.graph_recorder import GraphRecorder, PieceRecorder
from modeling.runner.layer_graphs import ChainGraphs, EntryGraphs, LayerGraphs
from modeling.runner.layer_guesses import LayerGuesser
from modeling.runner.memory import GRAPH_BYTES, PIECE_BYTES
from modeling.runner.pieces import CapturedParts
from modeling.runner.piecewise import PiecewiseGraphs, piecewise_sizes
from sharding.progress import counted

MOST_CHECKED = 320
"""Tokens of a captured step that checks drafts, at most."""


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of captured steps, ascending.

    decode: rows of decode steps.
    mixed: tokens of mixed steps.
    checked: of steps that check drafts, (tokens of a row, rows) for each length.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    checked: tuple[tuple[int, tuple[int, ...]], ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is captured."""
        return bool(self.decode or self.mixed)

    @property
    def largest(self) -> "GraphSizes":
        """The largest of each alone."""
        checked = [(queries, rows[-1:]) for queries, rows in self.checked]
        most = sorted(checked, key=lambda each: each[0] * each[1][0])[-1:]
        return GraphSizes(self.decode[-1:], self.mixed[-1:], tuple(most))

    def others_bytes(self, num_attends: int) -> int:
        """Device bytes of all but the largest, for base rows alone or for rows with adapters.

        num_attends: how often a step attends, which cuts it into pieces.
        """
        # The last piece does not attend, and a tail of the size may follow it.
        pieces = (num_attends + 2) * max(0, len(self.mixed) - 1)
        checked = sum(len(rows) for _, rows in self.checked)
        graphs = max(0, len(self.decode) - 1) + max(0, checked - 1)
        return graphs * GRAPH_BYTES + pieces * PIECE_BYTES


class StepGraphs(NamedTuple):
    """A runner's captured steps; None where there are none.

    checked: those that check drafts, by tokens of a row, ascending.
    heads: entries and guesses of a layer beside the model.
    """

    decode: DecodeGraphs | None
    mixed: PiecewiseGraphs | None
    checked: tuple[DecodeGraphs, ...] = ()
    heads: LayerGraphs | None = None

    @property
    def all(self) -> tuple[DecodeGraphs | PiecewiseGraphs | ChainGraphs | EntryGraphs, ...]:
        """Those that there are, in the order in which they are recorded."""
        heads = self.heads.all if self.heads else ()
        return tuple(filter(None, (self.decode, *self.checked, *heads, self.mixed)))

    @property
    def num_unrecorded(self) -> int:
        """How many sizes are not recorded yet: their steps are launched kernel by kernel."""
        return sum(len(graphs.unrecorded) for graphs in self.all)

    def record_next(self) -> None:
        """Record one more size; all ranks call it between the same steps."""
        for graphs in self.all:
            if graphs.unrecorded:
                graphs.record_next()
                return

    def record_all(self) -> None:
        """Record every size; garbage may hold device memory, so it is collected once before."""
        gc.collect()
        for _ in counted("sizes of steps recorded", range(self.num_unrecorded)):
            self.record_next()

    def forget_unrecorded(self) -> None:
        """Leave what is not recorded as it is."""
        for graphs in self.all:
            graphs.unrecorded.clear()


def graph_sizes_of(config: EngineConfig, has_form: bool, checks: bool) -> GraphSizes:
    """Return the sizes that `config.cuda_graphs` means.

    has_form, checks: whether the attention of decode steps, and of drafts, can be captured.
    """
    choice, limits = config.cuda_graphs, config.limits
    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    checked: tuple[tuple[int, tuple[int, ...]], ...] = ()
    if choice is not CudaGraphs.NONE and has_form:
        decode = graph_sizes(limits.max_running)
        checked = checked_sizes(limits, config.speculation) if checks else ()
    if choice is CudaGraphs.ALL:
        mixed = piecewise_sizes(limits.max_step_tokens)
    return GraphSizes(decode, mixed, checked)


def checked_sizes(
    limits: LimitsConfig, speculation: SpeculationConfig
) -> tuple[tuple[int, tuple[int, ...]], ...]:
    """Return the sizes of steps that check drafts, (tokens of a row, rows) for each length."""
    lengths = [
        min(length, speculation.most_tokens)
        for shorter, length in pairwise((0, *DRAFT_LENGTHS))
        if shorter < speculation.most_tokens
    ]
    tokens = min(limits.max_step_tokens, MOST_CHECKED)
    running = min(limits.max_running, speculation.max_running)
    rows = [(1 + length, min(running, tokens // (1 + length))) for length in lengths]
    return tuple((queries, graph_sizes(most)) for queries, most in rows if most)


def capture(
    parts: GraphParts,
    sizes: GraphSizes,
    device: torch.device,
    forward: PagedForward,
    checking: Sequence[AttentionBackend] = (),
    guesser: LayerGuesser | None = None,
) -> StepGraphs:
    """Prepare steps of these sizes to be recorded.

    forward: the model, as mixed steps compute it. checking: the attention of steps
    that check drafts. guesser: a layer's; its entries and guesses are captured too.
    """
    decode = mixed = heads = None
    checked: list[DecodeGraphs] = []
    if sizes.decode:
        record = GraphRecorder(device)
        most = max(queries * rows[-1] for queries, rows in ((1, sizes.decode), *sizes.checked))
        outputs = StepOutputs.of(parts, most, device)
        decode = DecodeGraphs(parts, sizes.decode, device, record, outputs)
        for queries, rows in sizes.checked:
            own = replace(parts, backends=checking, queries=queries)
            checked.append(DecodeGraphs(own, rows, device, record, outputs))
        if guesser is not None:
            rooms = ((1, sizes.decode), *sizes.checked)
            heads = guesser.graphs(parts.state, outputs.states, rooms, record)
    if sizes.mixed:
        slots = [tables.dummy_slot(parts.dummy_block) for tables in parts.state.tables]
        given = forward.trunk, parts.backends, slots, parts.adapters, parts.has_experts
        pieces = CapturedParts(*given)
        mixed = PiecewiseGraphs(forward, pieces, sizes.mixed, PieceRecorder(device))
    return StepGraphs(decode, mixed, tuple(checked), heads)
