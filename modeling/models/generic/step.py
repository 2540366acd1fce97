"""The step that transformers' modules compute: what their attention and our linear layers read.

transformers hands no argument of ours down to its layers, at least not in all families. So the
modules of one model share one `CurrentStep`, which is set around each forward.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from modeling.adapters.product import AdapterData
from modeling.models.base import AttentionLayer
from modeling.models.context import PagedContext

ATTENTION = "loray"
"""The name under which transformers' modules find `attend`."""


class LayerAttention(Protocol):
    """Attention of one layer over the heads' tensors, [tokens, heads, head_dim] each."""

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionLayer,
        sinks: Tensor | None,
    ) -> Tensor:
        """Return [tokens, heads, head_dim]; q and k are rotated already."""
        ...


class LayerForms:
    """Learns what each layer's attention is, from one forward over any tokens."""

    def __init__(self) -> None:
        self._forms: dict[int, AttentionLayer] = {}

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionLayer,
        sinks: Tensor | None,
    ) -> Tensor:
        """Keep the form; the result is of the right shape and means nothing."""
        assert layer not in self._forms, f"layer {layer} attends twice"
        self._forms[layer] = form
        return torch.zeros_like(q)

    def layers(self, num_layers: int) -> tuple[AttentionLayer, ...]:
        """Return the forms in order; ValueError if some layer attended in another way."""
        if sorted(self._forms) != list(range(num_layers)):
            raise ValueError(f"of {num_layers} layers these attend: {sorted(self._forms)}")
        return tuple(self._forms[layer] for layer in range(num_layers))


class PagedLayers:
    """Attention of the engine's step over the paged cache."""

    def __init__(self, context: PagedContext, forms: tuple[AttentionLayer, ...]) -> None:
        self._context = context
        self._forms = forms

    def attend(
        self,
        layer: int,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        form: AttentionLayer,
        sinks: Tensor | None,
    ) -> Tensor:
        """Store k and v, then attend over the row's whole cache."""
        assert form == self._forms[layer], (layer, form, self._forms[layer])
        self._context.store_heads(layer, k, v)
        return self._context.query(layer, q, form.window, sinks)


class CurrentStep:
    """What is computed now; attention: of the layers. adapter_data: None for the base model."""

    attention: LayerAttention
    adapter_data: AdapterData | None = None

    @contextmanager
    def using(self, attention: LayerAttention, adapter_data: AdapterData | None) -> Iterator[None]:
        """Compute with these meanwhile."""
        self.attention, self.adapter_data = attention, adapter_data
        try:
            yield
        finally:
            self.adapter_data = None
            del self.attention


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """transformers' interface: query, key, value [1, heads, tokens, head_dim], rotated.

    Returns [1, tokens, heads, value head_dim]. The mask is not read: rows, causality and windows
    are the backend's.
    """
    owner: Any = module
    step: CurrentStep = owner.loray_step
    q, k, v = (part[0].transpose(0, 1) for part in (query, key, value))
    width, value_width = q.shape[-1], v.shape[-1]
    if value_width < width:
        v = F.pad(v, (0, width - value_width))
    form = AttentionLayer(
        num_heads=q.shape[1],
        num_kv_heads=k.shape[1],
        head_dim=width,
        scale=width**-0.5 if scaling is None else scaling,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux is not None,
    )
    out = step.attention.attend(owner.layer_idx, q.contiguous(), k, v, form, s_aux)
    return out[None, ..., :value_width], None


AttentionInterface.register(ATTENTION, attend)
