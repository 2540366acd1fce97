"""Scales of an fp8 cache that a checkpoint brings along, under the names that its tools give them.

Which tool writes which, behind an attention's own name (`model.layers.0.self_attn`):

    .k_scale, .v_scale                                  compressed-tensors (llm-compressor)
    .k_proj.k_scale, .v_proj.v_scale                    ModelOpt
    .k_proj.output_scale, .v_proj.output_scale          older ones of both, AutoFP8
    .attn.k_scale, .qkv_proj.k_scale (and v)            vLLM's names for either
    .kv_scale                                           AutoFP8, one for both

True value = scale * stored value, and scale = the largest of a calibration / 448. Scales of
queries and of probabilities, which stay in the model's type here, are ignored.
"""

import math
import re

from modeling.attention.kv_cache import CacheScales
from sharding.checkpoint import Checkpoint, CheckpointError
from sharding.slicing import whole

STORED_SCALE = (
    r"(?:.+\.)?(?:layers|h)\.(?P<layer>\d+)\.(?:self_attn|attn|attention)\."
    r"(?:(?:\w+\.)?(?P<own>q|k|v|kv|prob)_scale|(?P<projection>q|k|v)_proj\.output_scale)"
)
"""A regular expression of whole names."""


def stored_scales(source: Checkpoint, num_layers: int) -> tuple[CacheScales, ...] | None:
    """Return every layer's scales, None where the checkpoint has none.

    CheckpointError when some layer has none, or when one is no positive number.
    """
    found: dict[tuple[int, str], float] = {}
    for name in sorted(source.names()):
        match = re.fullmatch(STORED_SCALE, name)
        if match is None:
            continue
        of = match["own"] or match["projection"]
        for part in {"k", "v"} & set(of if of != "prob" else ""):
            if (int(match["layer"]), part) in found:
                raise CheckpointError(f"the checkpoint has {name!r}, and another scale for it")
            found[int(match["layer"]), part] = _number(source, name)
    if not found:
        return None
    for layer in range(num_layers):
        if (layer, "k") not in found or (layer, "v") not in found:
            raise CheckpointError(
                f"the checkpoint has scales of an fp8 cache, but not both of layer {layer}: "
                "take one that is whole, or set cache.dtype to auto"
            )
    return tuple(CacheScales(found[i, "k"], found[i, "v"]) for i in range(num_layers))


def _number(source: Checkpoint, name: str) -> float:
    shape = source.shape(name)
    if math.prod(shape) != 1:
        raise CheckpointError(
            f"tensor {name!r} has shape {shape}: an fp8 cache has one scale for a layer's keys and "
            "one for its values; set cache.dtype to auto to do without"
        )
    value = float(source.read(name, shape, tuple(whole(size) for size in shape)))
    if not 0 < value < math.inf:
        raise CheckpointError(f"tensor {name!r} is {value}: a scale is a positive number")
    return value
