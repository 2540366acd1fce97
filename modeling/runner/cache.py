"""What cache blocks hold and which backends read them: groups, type, scales, attention."""

from dataclasses import replace

from configs.engine import CacheDType, EngineConfig
from modeling.attention.kv_cache import FP8, CacheScales
from modeling.attention.kv_layout import KvLayout
from modeling.attention.select import AttentionChoice, select_attention
from modeling.models.kv_groups import attention_specs, kv_layout
from modeling.runner.calibration import measured_scales
from modeling.runner.loading import LoadedModel, torch_dtype, total_tokens
from sharding.group import TensorParallel

Choices = tuple[AttentionChoice, ...]
"""The backend of each KV group."""


def choose_cache(
    config: EngineConfig, loaded: LoadedModel, group: TensorParallel
) -> tuple[KvLayout, Choices]:
    """Return the cache's layout and the backends that read it; reasons name the scales' source.

    All ranks call it together. ValueError when no backend serves the two, or the
    configured one does not.
    """
    model, wanted = loaded.model, config.cache.dtype
    dtype = None if wanted is CacheDType.AUTO else torch_dtype(wanted.value)
    longest = total_tokens(config, loaded.architecture)
    layout = kv_layout(model, config.cache.block_size, longest, dtype)
    specs = attention_specs(model, layout)
    attention = tuple(select_attention(config.attention, spec) for spec in specs)
    if layout.groups[0].spec.dtype != FP8 or not layout.sources:
        return layout, attention
    scales, origin = loaded.cache_scales, "from the checkpoint"
    is_each = scales is not None and len(scales) == len(model.attention_layers)
    if scales is None or not is_each or layout.groups[0].spec.keys_only:
        # Of a checkpoint are scales of each head's keys and values, not of latents, and of a layer
        # that attends several times one pair alone.
        scales = measured_scales(model, loaded.architecture, longest, group)
        origin = "measured at start"
    reasons = (f"{choice.reason}; fp8 cache, scales {origin}" for choice in attention)
    pairs = zip(attention, reasons, strict=True)
    return _scaled(layout, scales), tuple(replace(own, reason=reason) for own, reason in pairs)


def _scaled(layout: KvLayout, scales: tuple[CacheScales, ...]) -> KvLayout:
    """The layout with each layer's scales."""
    groups = (
        replace(
            group, spec=replace(group.spec, scales=tuple(scales[layer] for layer in group.layers))
        )
        for group in layout.groups
    )
    return replace(layout, groups=tuple(groups))
