"""How the ranks share a model of transformers: by the plan that its config brings along."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from modeling.models.generic.own_products import own_product
from sharding.group import TensorParallel
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, fused_heads, whole


class Style(Enum):
    """How a linear layer is cut over the ranks.

    COLUMN: by its outputs. ROW: by its inputs. WHOLE: not at all, each rank computes all of it.
    PAIR: by its outputs, where gate and up are stored one below the other.
    """

    COLUMN = "column"
    ROW = "row"
    WHOLE = "whole"
    PAIR = "pair"


_STYLES = {"colwise": Style.COLUMN, "rowwise": Style.ROW}
"""transformers' words. What gathers a column-parallel output at once is computed whole here."""

_OWN_PLAN = {
    "layers.*.mlp.gate_proj": Style.COLUMN,
    "layers.*.mlp.up_proj": Style.COLUMN,
    "layers.*.mlp.down_proj": Style.ROW,
    "layers.*.fc1": Style.COLUMN,
    "layers.*.fc2": Style.ROW,
    "h.*.mlp.c_fc": Style.COLUMN,
    "h.*.mlp.c_proj": Style.ROW,
    "h.*.mlp.dense_h_to_4h": Style.COLUMN,
    "h.*.mlp.dense_4h_to_h": Style.ROW,
    "layers.*.mlp.dense_h_to_4h": Style.COLUMN,
    "layers.*.mlp.dense_4h_to_h": Style.ROW,
    "h.*.mlp.fc_in": Style.COLUMN,
    "h.*.mlp.fc_out": Style.ROW,
    "blocks.*.ffn.up_proj": Style.COLUMN,
    "blocks.*.ffn.down_proj": Style.ROW,
}
"""The plan of types without one in their configs: their attention may count its heads itself."""

_OWN_EXPERTS = {
    "layers.*.mlp.experts.gate_up_proj": "packed_colwise",
    "layers.*.mlp.experts.down_proj": "rowwise",
}
"""The same of their experts, in transformers' words."""

_QUERY = "layers.*.self_attn.q_proj"
_LATENT_QUERY = "layers.*.self_attn.q_b_proj"
"""Stands in a plan for both: a model without a rank of its queries' factors has the other."""

_PAIRS = {"layers.*.mlp.gate_up_proj": Style.PAIR, "layers.*.mlp.down_proj": Style.ROW}

_EXPERTS = frozenset({"packed_colwise", "rowwise", "packed_rowwise", "colwise"})
"""Of the experts' matrices; the last two are of matrices that are stored transposed."""

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_KEYS = frozenset({"k_proj", "v_proj"})
_ATTENTION = re.compile("attn|attention")
"""What is in a path of a module that attends."""


@dataclass(frozen=True)
class LinearCut:
    """One rank's part of a linear layer's inputs and outputs."""

    style: Style
    inputs: Segments
    outputs: Segments


class CutPlan:
    """The cuts of one model's linear layers on one rank."""

    def __init__(self, config: Any, prefix: str, group: TensorParallel) -> None:
        """config: of transformers. prefix: the decoder's path in the model, e.g. "model"."""
        self._group = group
        self._config = config
        self._prefix = f"{prefix}."
        self._own = own_product(config)
        self._heads = _heads(config)
        self._kv_heads = _kv_heads(config)
        plan: dict[str, str] = config.base_model_tp_plan or {}
        self._styles = _styles(plan)
        if getattr(config, "activation_sparsity_pattern", None) or config.model_type == "bitnet":
            # Mean and spread of their activations, or the norm of these, are of the whole width.
            self._styles = {path: own for path, own in self._styles.items() if ".mlp." not in path}
        self._experts = {
            name: style
            for name, style in (plan or _OWN_EXPERTS).items()
            if ".experts." in name and style in _EXPERTS
        }

    def of(self, path: str, module: nn.Linear) -> LinearCut:
        """Return the cut of the layer at `path`; ValueError if the ranks cannot share it."""
        inputs, outputs = module.in_features, module.out_features
        pattern = _NUMBER.sub("*", path.removeprefix(self._prefix))
        style = self._styles.get(pattern, Style.WHOLE) if self._group.size > 1 else Style.WHOLE
        own, name = self._own, path.rpartition(".")[2]
        if own is not None and name in (*own.inputs, own.output):
            style = Style.ROW if name == own.output else Style.COLUMN
        if own is not None and (name,) == own.inputs:
            return LinearCut(style, whole(inputs), self._fused(path))
        if style is Style.COLUMN:
            return LinearCut(style, whole(inputs), self._columns(path, outputs))
        if style is Style.ROW:
            return LinearCut(style, self._rows(path, inputs), whole(outputs))
        if style is Style.PAIR:
            return LinearCut(style, whole(inputs), self._pair(outputs, pattern))
        return LinearCut(style, whole(inputs), whole(outputs))

    def heads(self, path: str, head_dim: int) -> HeadCut:
        """Return this rank's heads of the layer that a module is in."""
        heads, kv_heads = self._heads_of(path), self._kv_heads_of(path)
        return cut_heads(heads, kv_heads, head_dim, self._group.rank, self._group.size)

    def covers(self, path: str) -> bool:
        """Whether a layer is the decoder's; those behind it compute some of a step's tokens."""
        return path.startswith(self._prefix)

    def rows(self, path: str, shape: tuple[int, ...]) -> Segments:
        """Return the part of a parameter's first dimension: its heads', where it has one a head."""
        name, size = path.removeprefix(self._prefix), shape[0]
        if len(shape) == 1 and "norm" in name:
            # One for all heads: their width may be their number.
            return whole(size)
        styles = self._styles.get(_NUMBER.sub("*", re.sub(r"attn\..*", "attn.q_proj", name)))
        if self._group.size == 1 or styles is not Style.COLUMN:
            return whole(size)
        for part, heads in (("k_", self._kv_heads_of(path)), ("", self._heads_of(path))):
            if f"attn.{part}" in name and size == heads:
                cut = self.heads(path, 1)
                return cut.keys if part else cut.queries
        return whole(size)

    def experts(self, path: str, shape: tuple[int, ...]) -> tuple[Segments, Segments] | None:
        """Return the rows and columns of each expert's matrix in a tensor of all [experts, ...].

        None where each rank has the experts whole.
        """
        pattern = _NUMBER.sub("*", path.removeprefix(self._prefix))
        style = self._experts.get(pattern)
        if style is None or self._group.size == 1:
            return None
        _, rows, columns = shape
        if style == "rowwise":
            return whole(rows), self._width(columns, pattern)
        if style == "colwise":
            return self._width(rows, pattern), whole(columns)
        if style == "packed_rowwise":
            return whole(rows), self._pair(columns, pattern)
        return self._pair(rows, pattern), whole(columns)

    def _fused(self, path: str) -> Segments:
        """Rows of one product of q, k and v, in that order."""
        own = self._own
        assert own is not None
        head_dim = own.head_dim(self._config)
        cut = self.heads(path, head_dim)
        return fused_heads(cut.queries, cut.keys, head_dim, own.sizes(self._config), own.order)

    def _columns(self, path: str, size: int) -> Segments:
        if not _ATTENTION.search(path):
            return self._width(size, path)
        is_key = path.rsplit(".", 1)[-1] in _KEYS
        heads = self._kv_heads_of(path) if is_key else self._heads_of(path)
        cut = self.heads(path, size // heads)
        return cut.keys if is_key else cut.queries

    def _rows(self, path: str, size: int) -> Segments:
        if not _ATTENTION.search(path):
            return self._width(size, path)
        return self.heads(path, size // self._heads_of(path)).queries

    def _heads_of(self, path: str) -> int:
        """The query heads of the layer that a module is in."""
        return self._heads[_layer(path)]

    def _kv_heads_of(self, path: str) -> int:
        """The KV heads of the layer that a module is in."""
        return self._kv_heads[_layer(path)]

    def _pair(self, size: int, pattern: str) -> Segments:
        """The same part of both halves."""
        half = size // 2
        ((first, last),) = self._width(half, pattern)
        return (first, last), (half + first, half + last)

    def _width(self, size: int, pattern: str) -> Segments:
        return cut_width(size, self._group.rank, self._group.size, pattern)


def _layer(path: str) -> int:
    found = _NUMBER.search(path)
    return int(found[0]) if found else 0


def _heads(config: Any) -> list[int]:
    """The query heads of each layer."""
    listed = getattr(config, "num_attention_heads_per_layer", None)
    return list(listed or [_attention_heads(config)] * config.num_hidden_layers)


def _attention_heads(config: Any) -> int:
    """The query heads; 1 for a model of recurrent layers alone, where nothing is cut by heads."""
    return int(getattr(config, "num_attention_heads", 1))


def _kv_heads(config: Any) -> list[int]:
    """The KV heads of each layer."""
    own = own_product(config)
    if own is not None:
        return [own.kv_heads(config)] * config.num_hidden_layers
    layers = [config.per_layer_config[layer] for layer in range(config.num_hidden_layers)]
    found = (getattr(layer, "num_key_value_heads", None) for layer in layers)
    heads = [each or _attention_heads(config) for each in found]
    if config.model_type != "mimo_v2_flash":
        return heads
    # Its layers with windows have twice as many, which no number in its config says.
    kinds = zip(heads, config.layer_types, strict=True)
    return [2 * each if kind == "sliding_attention" else each for each, kind in kinds]


def _styles(plan: Mapping[str, str] | None) -> dict[str, Style]:
    if not plan:
        return _OWN_PLAN
    styles = {name: _STYLES[style] for name, style in plan.items() if style in _STYLES}
    if _LATENT_QUERY in styles:
        styles.setdefault(_QUERY, styles[_LATENT_QUERY])
    return {**styles, **_PAIRS} if "layers.*.mlp.gate_up_proj" in plan else styles
