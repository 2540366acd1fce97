"""The Llama family's adaptable linear maps and their cuts, separate or fused as the checkpoint is.

Layers are built from the same projections that adapters are judged by: a fused map's rows of W
and of B are the same segments.
"""

from configs.architectures.llama import Architecture
from modeling.adapters.projection import Projection
from sharding.group import TensorParallel
from sharding.linear import ColumnPart
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, whole


def llama_heads(config: Architecture, group: TensorParallel) -> HeadCut:
    """This rank's attention heads."""
    return cut_heads(config.num_heads, config.num_kv_heads, config.head_dim, group.rank, group.size)


def llama_projections(
    prefix: str, config: Architecture, group: TensorParallel
) -> tuple[Projection, ...]:
    """All adaptable maps, attention's first; prefix: the decoder's, e.g. "model"."""
    layer = f"{prefix}.layers.{{layer}}"
    return (
        *attention_projections(f"{layer}.self_attn", config, group),
        *mlp_projections(f"{layer}.mlp", config, group),
    )


def attention_projections(
    prefix: str, config: Architecture, group: TensorParallel
) -> tuple[Projection, ...]:
    """q, k and v (or the one that fuses them), then the output; prefix: the attention's."""
    heads = llama_heads(config, group)
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    out = _row(f"{prefix}.o_proj", config, queries, heads.queries)
    if config.fused:
        fused = _stacked((heads.queries, heads.keys, heads.keys), (queries, keys, keys))
        return (_column(f"{prefix}.qkv_proj", config, queries + 2 * keys, fused), out)
    return (
        _column(f"{prefix}.q_proj", config, queries, heads.queries),
        _column(f"{prefix}.k_proj", config, keys, heads.keys),
        _column(f"{prefix}.v_proj", config, keys, heads.keys),
        out,
    )


def mlp_projections(
    prefix: str, config: Architecture, group: TensorParallel
) -> tuple[Projection, ...]:
    """gate and up (or the one that fuses them), then down; prefix: the feed-forward's."""
    size = config.intermediate_size
    cut = cut_width(size, group.rank, group.size, "intermediate_size")
    down = _row(f"{prefix}.down_proj", config, size, cut)
    if config.fused:
        fused = _stacked((cut, cut), (size, size))
        return (_column(f"{prefix}.gate_up_proj", config, 2 * size, fused), down)
    return (
        _column(f"{prefix}.gate_proj", config, size, cut),
        _column(f"{prefix}.up_proj", config, size, cut),
        down,
    )


def column_parts(projections: tuple[Projection, ...]) -> tuple[ColumnPart, ...]:
    """The same maps as parts of one product."""
    return tuple(ColumnPart(p.module, p.out_features, p.outputs) for p in projections)


def _stacked(parts: tuple[Segments, ...], sizes: tuple[int, ...]) -> Segments:
    """Each part's own segments, where the parts lie below each other in one matrix."""
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    return tuple(
        (first + start, first + stop)
        for first, segments in zip(starts, parts, strict=True)
        for start, stop in segments
    )


def _column(module: str, config: Architecture, out: int, cut: Segments) -> Projection:
    name, hidden = module.rsplit(".", 1)[-1], config.hidden_size
    return Projection(name, module, hidden, out, whole(hidden), cut, config.num_layers)


def _row(module: str, config: Architecture, size: int, cut: Segments) -> Projection:
    name, hidden = module.rsplit(".", 1)[-1], config.hidden_size
    return Projection(name, module, size, hidden, cut, whole(hidden), config.num_layers)
