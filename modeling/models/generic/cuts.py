"""How the ranks share a model of transformers: by the plan that its config brings along."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any

from torch import nn

from sharding.group import TensorParallel
from sharding.slicing import HeadCut, Segments, cut_heads, cut_width, whole


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
}
"""The plan of types without one in their configs: their attention may count its heads itself."""

_PAIRS = {"layers.*.mlp.gate_up_proj": Style.PAIR, "layers.*.mlp.down_proj": Style.ROW}

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.|$)")
_KEYS = frozenset({"k_proj", "v_proj"})


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
        self._prefix = f"{prefix}."
        self._heads: int = config.num_attention_heads
        self._kv_heads: int = getattr(config, "num_key_value_heads", None) or self._heads
        plan: dict[str, str] = config.base_model_tp_plan or {}
        self._styles = _styles(plan)
        self._experts = {
            name: style
            for name, style in plan.items()
            if ".experts." in name and style in ("packed_colwise", "rowwise")
        }

    def of(self, path: str, module: nn.Linear) -> LinearCut:
        """Return the cut of the layer at `path`; ValueError if the ranks cannot share it."""
        inputs, outputs = module.in_features, module.out_features
        pattern = _NUMBER.sub("*", path.removeprefix(self._prefix))
        style = self._styles.get(pattern, Style.WHOLE) if self._group.size > 1 else Style.WHOLE
        if style is Style.COLUMN:
            return LinearCut(style, whole(inputs), self._columns(pattern, outputs))
        if style is Style.ROW:
            return LinearCut(style, self._rows(pattern, inputs), whole(outputs))
        if style is Style.PAIR:
            half = outputs // 2
            ((first, last),) = self._width(half, pattern)
            both = ((first, last), (half + first, half + last))
            return LinearCut(style, whole(inputs), both)
        return LinearCut(style, whole(inputs), whole(outputs))

    def covers(self, path: str) -> bool:
        """Whether a layer is the decoder's; those behind it compute some of a step's tokens."""
        return path.startswith(self._prefix)

    def rows(self, path: str, size: int) -> Segments:
        """Return the part of a parameter's first dimension: its heads', where it has one a head."""
        name = path.removeprefix(self._prefix)
        styles = self._styles.get(_NUMBER.sub("*", re.sub(r"attn\..*", "attn.q_proj", name)))
        if self._group.size == 1 or styles is not Style.COLUMN:
            return whole(size)
        for part, heads in (("k_", self._kv_heads), ("", self._heads)):
            if f"attn.{part}" in name and size == heads:
                cut = self._head_cut(1)
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
        half = rows // 2
        ((first, last),) = self._width(half, pattern)
        return ((first, last), (half + first, half + last)), whole(columns)

    def _columns(self, pattern: str, size: int) -> Segments:
        if "attn" not in pattern:
            return self._width(size, pattern)
        is_key = pattern.rsplit(".", 1)[-1] in _KEYS
        heads = self._kv_heads if is_key else self._heads
        cut = self._head_cut(size // heads)
        return cut.keys if is_key else cut.queries

    def _rows(self, pattern: str, size: int) -> Segments:
        if "attn" not in pattern:
            return self._width(size, pattern)
        return self._head_cut(size // self._heads).queries

    def _head_cut(self, head_dim: int) -> HeadCut:
        group = self._group
        return cut_heads(self._heads, self._kv_heads, head_dim, group.rank, group.size)

    def _width(self, size: int, pattern: str) -> Segments:
        return cut_width(size, self._group.rank, self._group.size, pattern)


def _styles(plan: Mapping[str, str] | None) -> dict[str, Style]:
    if not plan:
        return _OWN_PLAN
    styles = {name: _STYLES[style] for name, style in plan.items() if style in _STYLES}
    return {**styles, **_PAIRS} if "layers.*.mlp.gate_up_proj" in plan else styles
