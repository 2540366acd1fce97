"""What a model's cache blocks hold and which backend reads them: type, scales, attention."""

from dataclasses import replace

from configs.engine import CacheDType, EngineConfig
from modeling.attention.kv_cache import FP8, CacheSpec
from modeling.attention.select import AttentionChoice, select_attention
from modeling.models.base import attention_spec, cache_spec
from modeling.runner.calibration import measured_scales
from modeling.runner.loading import LoadedModel, torch_dtype, total_tokens
from sharding.group import TensorParallel


def choose_cache(
    config: EngineConfig, loaded: LoadedModel, group: TensorParallel
) -> tuple[CacheSpec, AttentionChoice]:
    """Return the cache's spec and the backend that reads it; its reason names the scales' source.

    All ranks call it together. ValueError when no backend serves the two, or the
    configured one does not.
    """
    model, block_size = loaded.model, config.cache.block_size
    wanted = config.cache.dtype
    dtype = None if wanted is CacheDType.AUTO else torch_dtype(wanted.value)
    spec = cache_spec(model, block_size, dtype)
    needed = replace(attention_spec(model, block_size), cache_dtype=spec.dtype)
    attention = select_attention(config.attention, needed)
    if spec.dtype != FP8:
        return spec, attention
    scales, origin = loaded.cache_scales, "from the checkpoint"
    if scales is None:
        longest = total_tokens(config, loaded.architecture)
        scales = measured_scales(model, loaded.architecture, longest, group)
        origin = "measured at start"
    reason = f"{attention.reason}; fp8 cache, scales {origin}"
    return replace(spec, scales=scales), replace(attention, reason=reason)
