"""Which steps a runner captures at start, and the memory that they will take."""

import gc
from dataclasses import dataclass
from typing import NamedTuple

import torch

from configs.engine import CudaGraphs, LimitsConfig
from modeling.runner.cuda_graphs import (
    DecodeGraphs,
    Forward,
    GraphParts,
    GraphRecorder,
    graph_sizes,
)
from modeling.runner.memory import GRAPH_BYTES, PIECE_BYTES
from modeling.runner.piecewise import (
    PieceRecorder,
    PiecewiseGraphs,
    PiecewiseParts,
    piecewise_sizes,
)
from sharding.progress import counted


@dataclass(frozen=True)
class GraphSizes:
    """The sizes of captured steps, ascending.

    decode: rows of decode steps.
    mixed: tokens of mixed steps.
    """

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is captured."""
        return bool(self.decode or self.mixed)

    @property
    def largest(self) -> "GraphSizes":
        """The largest of each alone."""
        return GraphSizes(self.decode[-1:], self.mixed[-1:])

    def others_bytes(self, num_layers: int) -> int:
        """Device bytes of all but the largest, for base rows alone or for rows with adapters."""
        pieces = (num_layers + 1) * max(0, len(self.mixed) - 1)
        return max(0, len(self.decode) - 1) * GRAPH_BYTES + pieces * PIECE_BYTES


class StepGraphs(NamedTuple):
    """A runner's captured steps; None where there are none."""

    decode: DecodeGraphs | None
    mixed: PiecewiseGraphs | None

    @property
    def num_unrecorded(self) -> int:
        """How many sizes are not recorded yet: their steps are launched kernel by kernel."""
        return sum(len(graphs.unrecorded) for graphs in (self.decode, self.mixed) if graphs)

    def record_next(self) -> None:
        """Record one more size; all ranks call it between the same steps."""
        for graphs in (self.decode, self.mixed):
            if graphs is not None and graphs.unrecorded:
                graphs.record_next()
                return

    def record_all(self) -> None:
        """Record every size; garbage may hold device memory, so it is collected once before."""
        gc.collect()
        for _ in counted("sizes of steps recorded", range(self.num_unrecorded)):
            self.record_next()

    def forget_unrecorded(self) -> None:
        """Leave what is not recorded as it is."""
        for graphs in (self.decode, self.mixed):
            if graphs is not None:
                graphs.unrecorded.clear()


def graph_sizes_of(choice: CudaGraphs, limits: LimitsConfig, has_form: bool) -> GraphSizes:
    """Return the sizes that `choice` means; has_form: whether the attention can be captured."""
    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    if choice is not CudaGraphs.NONE and has_form:
        decode = graph_sizes(limits.max_running)
    if choice is CudaGraphs.ALL:
        mixed = piecewise_sizes(limits.max_step_tokens)
    return GraphSizes(decode, mixed)


def capture(
    parts: GraphParts, sizes: GraphSizes, device: torch.device, hidden: Forward
) -> StepGraphs:
    """Prepare steps of these sizes to be recorded.

    hidden: as `parts.forward`, to hidden states of all tokens.
    """
    decode = mixed = None
    if sizes.decode:
        decode = DecodeGraphs(parts, sizes.decode, device, GraphRecorder(device))
    if sizes.mixed:
        slots = [tables.dummy_slot(parts.dummy_block) for tables in parts.state.tables]
        piecewise = PiecewiseParts(hidden, parts.backends, slots, parts.adapters)
        mixed = PiecewiseGraphs(piecewise, sizes.mixed, device, PieceRecorder(device))
    return StepGraphs(decode, mixed)
