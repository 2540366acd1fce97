"""How layers that serve two doors reach their keys and values, and the engine's door of the two."""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from modeling.attention.base import AttentionStep
from modeling.attention.kv_cache import LayerCache


class AttentionCall(Protocol):
    """One forward's attention: a door's own cache and its own idea of who sees whom."""

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Keep this forward's k and v, and answer q: all [tokens, local heads, head_dim]."""
        ...


@dataclass(frozen=True)
class PagedAttention:
    """The engine's door: packed rows over a paged cache; fields as `PagedModel.paged` has them.

    stored: the tokens whose k and v are stored (None: all), the others' being there already.
    """

    caches: list[LayerCache]
    cu_seqlens: Tensor
    block_tables: Tensor
    slots: Tensor
    step: AttentionStep
    stored: Tensor | None = None

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Put k and v into the layer's pages and let the step's backend answer."""
        cache, stored = self.caches[layer], self.stored
        if stored is None:
            cache.store(k, v, self.slots)
        else:
            cache.store(k[stored], v[stored], self.slots[stored])
        return self.step.backend.forward(q, cache, self.cu_seqlens, self.block_tables, self.step)
