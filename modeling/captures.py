"""Which steps a runner records at start, and what they will take."""

from dataclasses import dataclass
from typing import NamedTuple

import torch

from configs.engine import CudaGraphs, LimitsConfig
from modeling.graphs import CapturedSteps, CaptureParts, Forward, GraphRecorder, captured_sizes
from modeling.memory import GRAPH_BYTES, SEGMENT_BYTES
from modeling.segments import GraphSegments, SegmentedSteps, SegmentParts, segment_sizes


@dataclass(frozen=True)
class CaptureSizes:
    """decode: rows of captured decode steps; mixed: tokens of captured mixed steps; ascending."""

    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()

    def __bool__(self) -> bool:
        """Whether anything is captured."""
        return bool(self.decode or self.mixed)

    @property
    def largest(self) -> "CaptureSizes":
        """The largest of each alone."""
        return CaptureSizes(self.decode[-1:], self.mixed[-1:])

    def others_bytes(self, num_layers: int) -> int:
        """What all but the largest take of the device, for base rows alone or with adapters."""
        segments = (num_layers + 1) * max(0, len(self.mixed) - 1)
        return max(0, len(self.decode) - 1) * GRAPH_BYTES + segments * SEGMENT_BYTES


class Captures(NamedTuple):
    """A runner's captured steps; None where there are none."""

    decode: CapturedSteps | None
    mixed: SegmentedSteps | None


def capture_sizes(choice: CudaGraphs, limits: LimitsConfig, has_form: bool) -> CaptureSizes:
    """What `choice` asks for; has_form: whether the attention has a captured form."""
    decode: tuple[int, ...] = ()
    mixed: tuple[int, ...] = ()
    if choice is not CudaGraphs.NONE and has_form:
        decode = captured_sizes(limits.max_running)
    if choice is CudaGraphs.ALL:
        mixed = segment_sizes(limits.max_step_tokens)
    return CaptureSizes(decode, mixed)


def capture(
    parts: CaptureParts, sizes: CaptureSizes, device: torch.device, hidden: Forward
) -> Captures:
    """Record steps of these sizes; hidden: `parts.forward`, but to hidden states of all tokens."""
    decode = mixed = None
    if sizes.decode:
        decode = CapturedSteps(parts, sizes.decode, device, GraphRecorder(device))
    if sizes.mixed:
        slot = parts.scratch_page * parts.state.size.block_size
        segments = SegmentParts(hidden, parts.backend, slot, parts.adapters)
        mixed = SegmentedSteps(segments, sizes.mixed, device, GraphSegments(device))
    return Captures(decode, mixed)
