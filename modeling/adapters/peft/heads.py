"""Medusa heads that an adapter brings beside its PEFT file: they guess for its requests alone.

As LoRAX has it, version 2 alone: a head is one residual block over the model's own head. The
folder's config.json says how many there are, and medusa_lm_head.safetensors has them.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from configs.architectures.base import ArchitectureError
from configs.architectures.medusa import load_medusa
from modeling.adapters.faults import refuse
from modeling.adapters.peft.ends import Matrix
from modeling.adapters.peft.tensors import check_finite, check_type
from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind
from sharding.slicing import whole
from sharding.tensor_file import TensorFile
from sources.base import HEADS_NAME

PAGE_ROWS = 8


@dataclass(frozen=True)
class HeadTensors:
    """An adapter's heads in their file. width: of what they read."""

    file: TensorFile
    position: ModulePosition
    count: int
    width: int

    def read(self) -> Iterator[Matrix]:
        """Yield all heads as one matrix; refuses values that are not finite."""
        parts = []
        for head in range(self.count):
            weight, bias = (self.file.get_tensor(key) for key in _keys(head))
            check_finite(_keys(head)[0], weight)
            check_finite(_keys(head)[1], bias)
            parts += [weight, bias.unsqueeze(0)]
        yield Matrix(self.position, torch.cat(parts))


def heads_projection(width: int, count: int, copies: int) -> Projection:
    """Return `count` heads as a projection; copies: adapters on the device that may have them.

    A head has `width` rows of its map, then one of its bias.
    """
    blocks = -(-count * (width + 1) // PAGE_ROWS)
    return Projection(
        name="draft_heads",
        module="medusa",
        in_features=width,
        out_features=count,
        inputs=whole(width),
        outputs=(),
        num_layers=blocks,
        kind=ProjectionKind.DRAFT_HEADS,
        copies=copies,
        blocks=blocks,
    )


def find_heads(
    folder: Path, projections: Sequence[Projection], within: Path | None
) -> HeadTensors | None:
    """Return the heads in an adapter's folder, checked; None where it, or the server, has none."""
    path, kinds = folder / HEADS_NAME, [projection.kind for projection in projections]
    if ProjectionKind.DRAFT_HEADS not in kinds or not path.is_file():
        return None
    index = kinds.index(ProjectionKind.DRAFT_HEADS)
    width, count = projections[index].in_features, projections[index].out_features
    try:
        config = load_medusa(folder, within)
    except ArchitectureError as error:
        refuse(f"{HEADS_NAME} is beside a config that says nothing of it: {error}")
    file = TensorFile(path, within)
    if config.num_layers > 1 or "0.1.weight" in file.keys():  # noqa: SIM118
        refuse(
            f"{HEADS_NAME} is of version 1, with blocks or linear maps of its own: adapters bring "
            "version 2 alone; name it in engine.speculation.model, or remove it"
        )
    if config.num_heads != count:
        refuse(
            f"{HEADS_NAME} has {config.num_heads} heads, the server's own are {count}: train as "
            "many, or remove it"
        )
    wanted: dict[str, tuple[int, ...]] = {}
    for head in range(count):
        weight, bias = _keys(head)
        wanted |= {weight: (width, width), bias: (width,)}
    for key, shape in wanted.items():
        found = tuple(file.shape(key)) if key in file.keys() else None  # noqa: SIM118
        if found != shape:
            has = "lacks it" if found is None else f"has {list(found)}"
            refuse(f"{key} of {HEADS_NAME} must have shape {list(shape)}, the file {has}")
        check_type(key, file.dtype(key))
    if others := sorted(file.keys() - wanted.keys()):
        refuse(f"{HEADS_NAME} holds {others[0]}, which is no part of {count} heads of version 2")
    return HeadTensors(file, ModulePosition(index, 0), count, width)


def _keys(head: int) -> tuple[str, str]:
    return f"{head}.0.linear.weight", f"{head}.0.linear.bias"
