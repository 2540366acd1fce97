"""How far layers of transformers' modules see, where their masks alone say it.

A module hands its window to the attention function, or puts it into the mask only (Qwen2-MoE,
Phi-MoE). Eager attention heeds the mask alone, and so does this.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionMaskInterface, DynamicCache

from configs.architectures.base import ArchitectureError, refuse_window_of_one
from modeling.models.base import AttentionLayer

MARKED = "loray_marked"
"""The attention implementation under which masks are marks."""


def mark(local_size: int | None = None, device: Any = None, **_options: Any) -> Tensor:
    """Return what stands for a mask: int64 [1, 1, 1, 1], its window in tokens, 0 without one."""
    return torch.full((1, 1, 1, 1), local_size or 0, device=device)


AttentionMaskInterface.register(MARKED, mark)


def attend_by(config: Any, name: str) -> None:
    """Let a model that was built attend by another implementation; config: of transformers."""
    config._attn_implementation = name


@contextmanager
def marked_masks(config: Any) -> Iterator[None]:
    """Let a decoder make marks in place of masks meanwhile; config: its own, of transformers."""
    kept = config._attn_implementation
    attend_by(config, MARKED)
    try:
        yield
    finally:
        attend_by(config, kept)


def marked_window(mask: Tensor | None, window: int | None) -> int | None:
    """Return the window in tokens; mask: a mark, or None where the module's argument counts."""
    return window if mask is None else int(mask.max()) or None


def check_windows(config: Any, layers: Mapping[tuple[int, int], Any], longest: int) -> None:
    """Refuse a model where the cache of transformers keeps less than its attention sees.

    layers: those that attend, see `LayerForms.layers`. longest: sequence in tokens.
    ArchitectureError names the setting.
    """
    try:
        cache = DynamicCache(config=config)
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ArchitectureError(
            f"transformers makes no cache for this {type(config).__name__}, as layer_types and "
            f"sliding_window in config.json do not fit each other: {error!r}"
        ) from error
    kept = dict(enumerate(cache.layers))
    for (number, _), call in layers.items():
        layer: AttentionLayer = call.form
        window = getattr(kept.get(number), "sliding_window", None)
        if window is None or window >= longest or layer.chunk is not None:
            continue
        refuse_window_of_one([window])
        if layer.window is None or layer.window > window:
            raise ArchitectureError(
                f"sliding_window ({window}): attention of {type(config).__name__} does not read "
                "it, but the cache of transformers forgets by it: remove it from config.json"
            )


def chunks(config: Any) -> dict[int, int]:
    """The layers that attend in chunks of so many tokens."""
    kinds = getattr(config, "layer_types", None) or ()
    chunked = [layer for layer, kind in enumerate(kinds) if kind == "chunked_attention"]
    return {layer: config.attention_chunk_size for layer in chunked}
