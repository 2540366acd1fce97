"""A projection: a linear map of every layer that adapters may change, and this rank's cut."""

from dataclasses import dataclass, field
from enum import Enum

from torch import Tensor

from sharding.slicing import Segments, width

__all__ = [
    "WHOLE_KINDS",
    "BaseRows",
    "ModulePosition",
    "Projection",
    "ProjectionKind",
    "Segments",
    "width",
]


class ProjectionKind(Enum):
    """What an adapter changes: a linear map, one of the vocabulary's ends, or all of an end.

    WHOLE_EMBEDDING, WHOLE_HEAD: no factors but a matrix in the base weight's stead.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    WHOLE_EMBEDDING = "whole embedding"
    WHOLE_HEAD = "whole head"

    @property
    def whole(self) -> bool:
        """Whether it is a matrix and no factors."""
        return self in (ProjectionKind.WHOLE_EMBEDDING, ProjectionKind.WHOLE_HEAD)


WHOLE_KINDS = {
    ProjectionKind.EMBEDDING: ProjectionKind.WHOLE_EMBEDDING,
    ProjectionKind.HEAD: ProjectionKind.WHOLE_HEAD,
}
"""Kinds of factors, and the kind of the matrices at the same end."""


@dataclass(frozen=True)
class ModulePosition:
    """Where a module's delta belongs: index of the projection, and the layer."""

    projection: int
    layer: int


@dataclass(frozen=True)
class BaseRows:
    """A base tensor of which adapters' files may hold a copy: this rank's rows of it.

    first: the first row's index in the whole tensor. shape: the whole tensor's.
    """

    rows: Tensor
    first: int
    shape: tuple[int, ...]


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
    token ids: PEFT saves a copy of it, which must say the same. Tied ends have one and the same.
    alias: another path that adapters may know the module by.
    opens_ends: whether a server can adapt embedding and head of its model at all.

    A whole matrix [token ids, hidden] lies in its pool as pages of 8 rows a layer would: its
    rows by eights are its "layers", so that one page is all of it; `inputs` is the hidden size.
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
    alias: str | None = None
    opens_ends: bool = True

    @property
    def base_rows(self) -> BaseRows:
        """The base weight of an embedding or a head, as a copy of it is compared."""
        assert self.base is not None
        is_embedding = self.kind is ProjectionKind.EMBEDDING
        sizes = (self.in_features, self.out_features)
        ((first, _),) = self.inputs if is_embedding else self.outputs
        return BaseRows(self.base, first, sizes if is_embedding else sizes[::-1])

    def modules(self, layer: int) -> tuple[str, ...]:
        """The paths by which adapters may name the module of a layer."""
        own = self.module.format(layer=layer)
        return (own,) if self.alias is None else (own, self.alias)

    @property
    def num_ranked(self) -> int:
        """Layers that have a rank of their own."""
        return 1 if self.kind.whole else self.num_layers

    @property
    def local_inputs(self) -> int:
        """Width of this rank's slice of A."""
        return width(self.inputs)

    @property
    def local_outputs(self) -> int:
        """Width of this rank's slice of B."""
        return width(self.outputs)
