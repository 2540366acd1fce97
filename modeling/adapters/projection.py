"""A projection: a linear map of every layer that adapters may change, and this rank's cut."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from sharding.slicing import Segments, width

__all__ = ["Projection", "ProjectionKind", "Segments", "width"]


class ProjectionKind(Enum):
    """What a projection maps: vectors, token ids to vectors, or vectors to logits."""

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"


@dataclass(frozen=True)
class Projection:
    """One adaptable linear map, named as PEFT names it.

    name: the end of its module path, as long as it takes to be unique, e.g. "q_proj", "mlp.c_proj".
    module: path template, e.g. "model.layers.{layer}.self_attn.q_proj".
    in_features, out_features: whole sizes, as in the checkpoint ([out, in], nn.Linear's view).
    inputs: columns of A that this rank keeps (all for column-parallel, its cut for row-parallel).
    outputs: rows of B that this rank keeps (its cut for column-parallel, all for row-parallel).
    num_layers: how many layers have it.
    base: for embeddings and heads, this rank's rows of the base weight, one for each of its
    token ids: PEFT saves a copy of it, which must say the same.
    """

    name: str
    module: str
    in_features: int
    out_features: int
    inputs: Segments
    outputs: Segments
    num_layers: int
    kind: ProjectionKind = ProjectionKind.LINEAR
    base: Tensor | None = field(default=None, compare=False, repr=False)

    @property
    def local_inputs(self) -> int:
        """Width of this rank's slice of A."""
        return width(self.inputs)

    @property
    def local_outputs(self) -> int:
        """Width of this rank's slice of B."""
        return width(self.outputs)
