"""A projection: a linear map of every layer that adapters may change, and this rank's cut."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

import torch
from torch import Tensor

from sharding.linear_weight import LinearWeight, WeightRows
from sharding.slicing import Segments, width


class ProjectionKind(Enum):
    """What an adapter changes.

    LINEAR, EMBEDDING, HEAD: adds factors to a linear map, the embedding or the head.
    WHOLE_EMBEDDING, WHOLE_HEAD: replaces the base weight by a whole matrix.
    SCORE: brings a classification head, a matrix with a row for each label.
    EMBEDDING_TOKENS, HEAD_TOKENS: replaces some tokens' rows of the base weight.
    NORMS: replaces weights and biases of norms.
    EXPERTS: adds factors to a matrix of each expert in layers that route tokens to experts.
    ROUTER: adds factors to the linear map that does, inside of a module of another kind.
    WHOLE_LINEAR: replaces the weight of a linear map.
    DRAFT_HEADS: brings Medusa heads, which guess tokens.
    """

    LINEAR = "linear"
    EMBEDDING = "embedding"
    HEAD = "head"
    WHOLE_EMBEDDING = "whole embedding"
    WHOLE_HEAD = "whole head"
    SCORE = "score"
    EMBEDDING_TOKENS = "tokens of the embedding"
    HEAD_TOKENS = "tokens of the head"
    NORMS = "norms"
    EXPERTS = "experts"
    ROUTER = "router"
    WHOLE_LINEAR = "whole linear map"
    DRAFT_HEADS = "draft heads"

    @property
    def whole(self) -> bool:
        """Return whether it is a whole matrix instead of factors."""
        return self in (ProjectionKind.WHOLE_EMBEDDING, ProjectionKind.WHOLE_HEAD)

    @property
    def is_matrix(self) -> bool:
        """Return whether an adapter has it as one matrix, all of it in one page."""
        return self.whole or self is ProjectionKind.NORMS

    @property
    def has_factors(self) -> bool:
        """Return whether it adds factors, A and B, to a module of its own."""
        return self in (ProjectionKind.LINEAR, ProjectionKind.ROUTER, *WHOLE_KINDS)

    @property
    def of_vocabulary(self) -> bool:
        """Return whether it changes the embedding or the head of the vocabulary."""
        others = (ProjectionKind.LINEAR, ProjectionKind.SCORE, ProjectionKind.NORMS)
        return self not in (*others, *ROUTED_KINDS, *COPIED_KINDS)


ROUTED_KINDS = (ProjectionKind.EXPERTS, ProjectionKind.ROUTER)
"""What adapters change of layers that route tokens to experts."""

COPIED_KINDS = (ProjectionKind.WHOLE_LINEAR, ProjectionKind.DRAFT_HEADS)
"""Kinds with pools of `copies` pages, as settings say."""

WHOLE_KINDS = {
    ProjectionKind.EMBEDDING: ProjectionKind.WHOLE_EMBEDDING,
    ProjectionKind.HEAD: ProjectionKind.WHOLE_HEAD,
}
"""The kind of whole matrix for each kind of embedding or head factors."""

TOKEN_KINDS = {
    ProjectionKind.EMBEDDING: ProjectionKind.EMBEDDING_TOKENS,
    ProjectionKind.HEAD: ProjectionKind.HEAD_TOKENS,
}
"""The kind of single tokens' rows for each kind of embedding or head factors."""


@dataclass(frozen=True)
class NormVector:
    """A parameter of a norm, [size], of which adapters may bring their own.

    names: its names in PEFT's files, without their prefix, e.g. "model.norm.weight".
    start: where it begins among the numbers of all norms, one after the other.
    size: its own numbers.
    """

    names: tuple[str, ...]
    start: int
    size: int

    @property
    def stop(self) -> int:
        """Return where the next one begins."""
        return self.start + self.size

    @property
    def modules(self) -> tuple[str, ...]:
        """Return the paths of its norm."""
        return tuple(name.rpartition(".")[0] for name in self.names)


@dataclass(frozen=True)
class ModulePosition:
    """A module of the model: index of its projection, and its layer."""

    projection: int
    layer: int


@dataclass(frozen=True)
class BaseRows:
    """A base tensor of which adapters' files may hold a copy.

    rows: this rank's rows.
    first: the first row's index in the whole tensor.
    shape: the whole tensor's.
    """

    rows: Tensor
    first: int
    shape: tuple[int, ...]


@dataclass(frozen=True)
class BaseLinear:
    """This rank's part of one linear map that adapters may change.

    weight: [local out, local in]; rows of quantised weights are made as they are read.
    bias: [local out]; None without one, and where another rank adds it.
    """

    weight: Tensor | LinearWeight | WeightRows
    bias: Tensor | None = None


@dataclass(frozen=True)
class ExpertMatrices:
    """A model's experts, for a projection that is one of their matrices.

    count: experts of a layer. own: those that this rank has; all, but where ranks have whole ones.
    active: how many of a layer compute a token.
    parameter: the tensor of a layer's matrices [count, ...], e.g. "gate_up_proj".
    parameters: all parameters of the experts' module, in its order.
    start, total: the map's first output among those of `parameter`, and how many those are.
    older: path templates of the map as a module of each expert, as transformers 4 had it, with the
    layer and the expert left open.
    shares: where ranks have whole experts, those of each rank.
    identities: experts without matrices behind these, which PEFT gives factors of `parameter` too.
    """

    count: int
    own: range
    active: int
    parameter: str
    parameters: tuple[str, ...]
    start: int
    total: int
    older: tuple[str, ...] = ()
    shares: tuple[range, ...] = ()
    identities: int = 0

    @property
    def ranges(self) -> tuple[range, ...]:
        """Return the experts of each rank that has others."""
        return self.shares or (self.own,)

    @property
    def most(self) -> int:
        """Return the largest number of experts that a rank has."""
        return max(map(len, self.ranges))


@dataclass(frozen=True)
class Projection:
    """One adaptable linear map, named as PEFT names it.

    name: the end of its module path, just long enough to be unique, e.g. "q_proj", "mlp.c_proj".
    module: path template, e.g. "model.layers.{layer}.self_attn.q_proj".
    in_features, out_features: whole sizes, as in the checkpoint ([out, in], nn.Linear's view).
    inputs: columns of A that this rank keeps (all for column-parallel, its cut for row-parallel).
    outputs: rows of B that this rank keeps (its cut for column-parallel, all for row-parallel).
    num_layers: how many layers have it.
    kind: what an adapter changes.
    base: for embeddings and heads, this rank's rows of the base weight, one for each of its token
    ids. PEFT saves a copy, which must be equal. A tied embedding and head have the same tensor.
    aliases: other path templates by which adapters may name the module.
    can_adapt_ends: whether a server can adapt embedding and head of its model at all.
    is_lost: whether PEFT does not find the map's factors in a file that it wrote.
    of_latents: whether it is multiplied where cached tokens are read, not where they are stored.
    has_bias: whether the base model's map has a bias.
    stored_transposed: whether transformers' module keeps its weight as [in, out] (Conv1D).
    vectors: for norms, their parameters; `base` has the numbers of all of them.
    numbers: the numbers in paths of the layers that have it; () for all from 0 on.
    experts: of a map that each expert has. The e-th of this rank's experts of the i-th of those
    layers counts as layer i * len(own) + e, and `module` is the path of the experts' module. A page
    has one expert's rows in all of those layers.
    replaces: for whole linear maps, the index of the map's own projection. copies: the pages of
    their pool, and of that of draft heads. blocks: how many 8 rows are one layer's.
    outer_parts, idle_layers: the model's: parts of a larger one that embed some tokens themselves,
    and numbers of layers that no text goes through. idle_modules: its linear maps of which PEFT's
    factors change nothing, by the ends of their paths.

    A whole matrix [token ids, hidden] is one page of its pool: each 8 of its rows count as a layer,
    and `inputs` is the hidden size. A classification head [labels, hidden] takes a page for each 8
    labels; its rank is the number of labels. Tokens' rows [tokens, hidden] take a page for each 8
    tokens; A has them, Bt the digits of the tokens' ids, and out_features is the vocabulary's size.
    Draft heads are one page, one head's rows after the other's; out_features is their number.
    The parameters of all norms are one page, in A alone, filled row by row.
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
    aliases: tuple[str, ...] = ()
    can_adapt_ends: bool = True
    is_lost: bool = False
    of_latents: bool = False
    has_bias: bool = False
    stored_transposed: bool = False
    vectors: tuple[NormVector, ...] = ()
    numbers: tuple[int, ...] = ()
    experts: ExpertMatrices | None = None
    replaces: int = -1
    copies: int = 0
    blocks: int = 1
    outer_parts: tuple[str, ...] = ()
    idle_layers: tuple[int, ...] = ()
    idle_modules: tuple[str, ...] = ()

    @property
    def base_rows(self) -> BaseRows:
        """Return the base weight of an embedding or a head, to compare copies with."""
        assert self.base is not None
        is_embedding = self.kind is ProjectionKind.EMBEDDING
        sizes = (self.in_features, self.out_features)
        ((first, _),) = self.inputs if is_embedding else self.outputs
        return BaseRows(self.base, first, sizes if is_embedding else sizes[::-1])

    def modules(self, layer: int) -> tuple[str, ...]:
        """Return the paths by which adapters may name the module of a layer."""
        index = layer if self.experts is None else layer // len(self.experts.own)
        layer = self.numbers[index] if self.numbers else index
        return tuple(path.format(layer=layer) for path in (self.module, *self.aliases))

    @property
    def num_ranked(self) -> int:
        """Return how many layers have a rank."""
        return 1 if self.kind.is_matrix else self.num_layers // self.blocks

    @property
    def page_layers(self) -> int:
        """Return how many layers' rows a page has."""
        return self.num_layers // (1 if self.experts is None else len(self.experts.own))

    @property
    def cuts_inputs(self) -> bool:
        """Return whether this rank keeps some columns of A alone (row-parallel)."""
        return self.local_inputs < self.in_features

    @property
    def local_inputs(self) -> int:
        """Return the width of this rank's slice of A."""
        return width(self.inputs)

    @property
    def local_outputs(self) -> int:
        """Return the width of this rank's slice of B."""
        return width(self.outputs)


def in_foreign_code(projections: Sequence[Projection]) -> bool:
    """Return whether the model runs in transformers' own code, so that few changes are served."""
    return not all(projection.can_adapt_ends for projection in projections)


def select_columns(rows: Tensor, segments: Segments) -> Tensor:
    """Return the columns of `segments`, in their order: [..., whole] to [..., local]."""
    if len(segments) == 1:
        ((start, stop),) = segments
        return rows[..., start:stop]
    return torch.cat([rows[..., start:stop] for start, stop in segments], dim=-1)
