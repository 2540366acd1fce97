"""A projection: a linear map of every layer that adapters may change, and this rank's cut."""

from dataclasses import dataclass

from sharding.slicing import Segments, width

__all__ = ["Projection", "Segments", "width"]


@dataclass(frozen=True)
class Projection:
    """One adaptable linear map, named as PEFT names it.

    name: the end of its module path, as long as it takes to be unique, e.g. "q_proj", "mlp.c_proj".
    module: path template, e.g. "model.layers.{layer}.self_attn.q_proj".
    in_features, out_features: whole sizes, as in the checkpoint ([out, in], nn.Linear's view).
    inputs: columns of A that this rank keeps (all for column-parallel, its cut for row-parallel).
    outputs: rows of B that this rank keeps (its cut for column-parallel, all for row-parallel).
    num_layers: how many layers have it.
    """

    name: str
    module: str
    in_features: int
    out_features: int
    inputs: Segments
    outputs: Segments
    num_layers: int

    @property
    def local_inputs(self) -> int:
        """Width of this rank's slice of A."""
        return width(self.inputs)

    @property
    def local_outputs(self) -> int:
        """Width of this rank's slice of B."""
        return width(self.outputs)
