"""Tiny quantised checkpoints, written by the formats' own packages."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams
from torch import nn

from tests.checkpoints import load_oracle


def write_compressed(
    folder: Path,
    dense: Path,
    preset: str,
    ignore: tuple[str, ...] = ("lm_head",),
    **weights: Any,
) -> Path:
    """Write a model as compressed-tensors stores it; returns `folder`.

    preset: a scheme's name in the package, e.g. "FP8_DYNAMIC". weights: what changes of its
    arguments for weights.
    """
    scheme = preset_name_to_scheme(preset, ["Linear"])
    assert scheme.weights is not None
    scheme = scheme.model_copy(update={"weights": scheme.weights.model_copy(update=weights)})
    model = load_oracle(dense)
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module, own in _quantised(model):
        _calibrate(module, own)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def _quantised(model: nn.Module) -> Iterator[tuple[nn.Module, QuantizationScheme]]:
    for module in model.modules():
        scheme = getattr(module, "quantization_scheme", None)
        if scheme is not None:
            yield module, scheme


@torch.no_grad()
def _calibrate(module: nn.Module, scheme: QuantizationScheme) -> None:
    """Set a module's scales as an observer of minima and maxima does."""
    made: Any = module
    args = scheme.weights
    assert args is not None
    weight, shape = made.weight, made.weight_scale.shape
    if args.strategy == "block":
        height, wide = args.block_structure
        parts = weight.view(shape[0], height, shape[1], wide)
        low, high = parts.amin((1, 3)), parts.amax((1, 3))
    elif args.strategy == "tensor":
        low, high = weight.min().view(1), weight.max().view(1)
    else:
        parts = weight.view(*shape, -1)
        low, high = parts.amin(-1), parts.amax(-1)
    scale, zero = calculate_qparams(low, high, args)
    made.weight_scale.copy_(scale)
    if hasattr(made, "weight_zero_point"):
        made.weight_zero_point.copy_(zero)
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        made.input_scale.fill_(0.01 + 0.001 * (weight.shape[0] % 7))
