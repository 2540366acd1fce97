"""Adapters of a fused linear map over a base model that has its parts.

Some checkpoints keep q, k and v, or gate and up, as the rows of one matrix. Factors of that matrix
are those of its parts: all have its A, and each its own rows of B. This changes no number.
"""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

from modeling.adapters.projection import ModulePosition, Projection, ProjectionKind

FUSED: Mapping[str, tuple[str, ...]] = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
}
"""Fused linear maps and their parts, of which they have the rows, one part after the other.
Others (query_key_value, c_attn, W_pack, linear_qkv) differ in order from model to model."""


@dataclass(frozen=True)
class FusedPart:
    """The rows, from start to stop of total, that a module is of a fused one, named by its path."""

    path: str
    start: int
    stop: int
    total: int


def find_parts(
    names: Set[str], known: Mapping[str, ModulePosition], projections: Sequence[Projection]
) -> dict[str, FusedPart]:
    """Return the modules that a file adapts as parts of fused ones, which the model lacks.

    names: paths of modules for which the file has factors. known: the model's modules.
    """
    found: dict[str, FusedPart] = {}
    for path in names - known.keys():
        parent, _, name = path.rpartition(".")
        parts = [f"{parent}.{part}" for part in FUSED.get(name, ())]
        if not parts or not all(part in known for part in parts):
            continue
        maps = [projections[known[part].projection] for part in parts]
        if any(each.kind is not ProjectionKind.LINEAR for each in maps):
            continue
        total, start = sum(each.out_features for each in maps), 0
        for part, each in zip(parts, maps, strict=True):
            found[part] = FusedPart(path, start, start + each.out_features, total)
            start += each.out_features
    return found
