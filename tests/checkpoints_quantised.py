"""Tiny quantised checkpoints, written by the formats' own packages."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, cast

import torch
from bitsandbytes.functional import int8_vectorwise_quant
from bitsandbytes.nn import Linear8bitLt
from compressed_tensors.compressors import (
    ModelCompressor,
    MXFP4PackedCompressor,
    NaiveQuantizationCompressor,
    NVFP4PackedCompressor,
    PackedQuantizationCompressor,
)
from compressed_tensors.quantization import (
    QuantizationArgs,
    QuantizationConfig,
    QuantizationScheme,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, BitsAndBytesConfig
from transformers.integrations.finegrained_fp8 import Fp8Dequantize, Fp8Quantize

from tests.checkpoints import load_oracle
from tests.checkpoints_integers import write_quantised


def write_compressed(
    folder: Path,
    dense: Path,
    preset: str,
    ignore: tuple[str, ...] = ("lm_head",),
    inputs: Mapping[str, Any] = MappingProxyType({}),
    **weights: Any,
) -> Path:
    """Write a model as compressed-tensors stores it; returns `folder`.

    preset: a scheme's name in the package, e.g. "FP8_DYNAMIC". inputs, weights: what changes of
    its arguments for both.
    """
    return _write_schemes(folder, dense, [scheme_of(preset, inputs, **weights)], ignore)


def scheme_of(
    preset: str, inputs: Mapping[str, Any] | None = MappingProxyType({}), **weights: Any
) -> QuantizationScheme:
    """A scheme of the package, with other arguments; inputs: None leaves them as they are."""
    scheme = preset_name_to_scheme(preset, ["Linear"])
    assert scheme.weights is not None
    changes: dict[str, Any] = {"weights": scheme.weights.model_copy(update=weights)}
    rounding = scheme.input_activations
    if rounding is not None:
        changes["input_activations"] = (
            None if inputs is None else rounding.model_copy(update=dict(inputs))
        )
    return scheme.model_copy(update=changes)


def write_several(folder: Path, dense: Path, presets: Mapping[str, Sequence[str]]) -> Path:
    """Write a model of which compressed-tensors stores maps in several schemes; returns `folder`.

    presets: a scheme's name in the package, and its targets. Integers have groups of 16 inputs.
    """
    schemes = [preset_name_to_scheme(name, list(targets)) for name, targets in presets.items()]
    for scheme in schemes:
        if scheme.weights is not None and scheme.weights.strategy == "group":
            scheme.weights = scheme.weights.model_copy(update={"group_size": 16})
    return _write_schemes(folder, dense, schemes, ("lm_head",))


def _write_schemes(
    folder: Path, dense: Path, schemes: Sequence[QuantizationScheme], ignore: Sequence[str]
) -> Path:
    model = load_oracle(dense)
    groups = {f"group_{index}": scheme for index, scheme in enumerate(schemes)}
    config = QuantizationConfig(config_groups=groups, ignore=list(ignore))
    apply_quantization_config(model, config)
    for module, own in _quantised(model):
        _calibrate(module, own)
    compressor = ModelCompressor.from_pretrained_model(model)
    assert compressor is not None
    compressor.compress_model(model)
    model.save_pretrained(folder)
    compressor.update_config(str(folder))
    return folder


def write_packed(
    folder: Path, dense: Path, group: int, symmetric: bool = True, bits: int = 4, **more: Any
) -> Path:
    """Write packed integers of compressed-tensors, those of single experts too.

    group: inputs that share a scale; -1: all. Returns the checkpoint of the numbers that the
    package makes of them. more: see `write_quantised`.
    """
    args = QuantizationArgs(
        num_bits=bits,
        symmetric=symmetric,
        strategy="channel" if group < 0 else "group",
        group_size=None if group < 0 else group,
    )
    scheme = QuantizationScheme(targets=["Linear"], weights=args)

    def tensors_of(_: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = matrix.view(len(matrix), -1, matrix.shape[1] if group < 0 else group)
        scale, zero = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        own = {"weight": matrix, "weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        made = PackedQuantizationCompressor.compress(own, scheme)
        return made, PackedQuantizationCompressor.decompress(dict(made), scheme)["weight"]

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="compressed",
        format="pack-quantized",
    )  # fmt: skip
    return write_quantised(folder, dense, tensors_of, config.model_dump(mode="json"), **more)


def write_fp4(folder: Path, dense: Path, preset: str, apart: bool = False, **more: Any) -> Path:
    """Write nvfp4 or mxfp4 of compressed-tensors, that of single experts too.

    preset: the scheme's name in the package. apart: whether an expert's gate and up have different
    global scales of their inputs. Returns the checkpoint of the numbers that the package makes.
    more: see `write_quantised`.
    """
    scheme = preset_name_to_scheme(preset, ["Linear"])
    args, is_nvfp4 = scheme.weights, preset.startswith("NV")
    assert args is not None
    package = NVFP4PackedCompressor if is_nvfp4 else MXFP4PackedCompressor

    def tensors_of(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        own = {"weight": matrix}
        if is_nvfp4:
            own["weight_global_scale"] = generate_gparam(matrix.min(), matrix.max())
        parts = matrix.view(len(matrix), -1, args.group_size)
        whole = own.get("weight_global_scale")
        own["weight_scale"], _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args, whole)
        made = package.compress(own, scheme)
        numbers = package.decompress(dict(made), scheme)["weight"].float()
        if preset == "NVFP4":
            shared = path if apart else path.replace("gate_proj", "up_proj")
            made["input_global_scale"] = torch.tensor([200.0 + 37 * (sum(map(ord, shared)) % 11)])
        return made, numbers

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="compressed",
    )  # fmt: skip
    return write_quantised(folder, dense, tensors_of, config.model_dump(mode="json"), **more)


def write_8_bits(
    folder: Path,
    dense: Path,
    scheme: QuantizationScheme,
    apart: bool = False,
    settings: Mapping[str, Any] | None = None,
) -> Path:
    """Write fp8 or integers of compressed-tensors, those of single experts too.

    scheme: of the package, with a scale for each output or matrix. apart: whether an expert's gate
    and up have different static scales of their inputs. settings: what config.json says instead of
    the package's words. Returns the checkpoint of the numbers that the package makes.
    """
    args, inputs = scheme.weights, scheme.input_activations
    assert args is not None

    def tensors_of(path: str, matrix: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        parts = matrix if args.strategy == "channel" else matrix.view(1, -1)
        scale, _ = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        own = {"weight": matrix, "weight_scale": scale[:, None] if len(scale) > 1 else scale}
        made = NaiveQuantizationCompressor.compress(own, scheme)
        numbers = NaiveQuantizationCompressor.decompress(dict(made), scheme)["weight"].float()
        if inputs is not None and not inputs.dynamic:
            shared = path if apart else re.sub("gate_proj|w1$", "up_proj", path)
            step = 1 + sum(map(ord, shared.replace("w3", "up_proj"))) % 11
            made["input_scale"] = torch.tensor([step * (0.005 if args.type == "int" else 0.001)])
        return made, numbers

    config = QuantizationConfig(
        config_groups={"group_0": scheme}, ignore=["lm_head"], quantization_status="compressed",
    )  # fmt: skip
    own = config.model_dump(mode="json") if settings is None else settings
    return write_quantised(folder, dense, tensors_of, own)


def unpacked(folder: Path) -> dict[str, Tensor]:
    """The weights that the package itself makes of a checkpoint of packed integers, by name."""
    settings = json.loads((folder / "config.json").read_text())["quantization_config"]
    scheme = QuantizationScheme.model_validate(settings["config_groups"]["group_0"])
    tensors = load_file(folder / "model.safetensors")
    found = {}
    for name in [name for name in tensors if name.endswith(".weight_packed")]:
        path = name.removesuffix("weight_packed")
        own = {key.removeprefix(path): each for key, each in tensors.items() if path in key}
        found[f"{path}weight"] = PackedQuantizationCompressor.decompress(own, scheme)["weight"]
    return found


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
    whole = getattr(made, "weight_global_scale", None)
    if whole is not None:
        whole.copy_(generate_gparam(weight.min(), weight.max()))
    scale, zero = calculate_qparams(low, high, args, global_scale=whole)
    made.weight_scale.copy_(scale)
    if hasattr(made, "weight_zero_point"):
        made.weight_zero_point.copy_(zero)
    if scheme.input_activations is not None and not scheme.input_activations.dynamic:
        made.input_scale.fill_(0.01 + 0.001 * (weight.shape[0] % 7))
    if hasattr(made, "input_global_scale"):
        made.input_global_scale.fill_(400.0 + weight.shape[1])


def write_fp8_blocks(
    folder: Path,
    dense: Path,
    block: tuple[int, int],
    scale_format: str = "float",
    scale_dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """Write a model as transformers stores fp8 in blocks; returns the weights as it reads them.

    Names are those of the dense checkpoint. scale_format: "ue8m0" makes powers of two. scale_dtype:
    in which they are stored; None: as transformers does.
    """
    settings = {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(block),
        "modules_to_not_convert": ["lm_head"],
        "scale_fmt": scale_format,
    }
    quantise, dequantise = (cast(Any, each) for each in (Fp8Quantize, Fp8Dequantize))
    how = SimpleNamespace(
        quantization_config=SimpleNamespace(weight_block_size=block, scale_fmt=scale_format)
    )
    stored = load_file(dense / "model.safetensors")
    numbers: dict[str, Tensor] = {}
    for name in [name for name in stored if name.endswith("_proj.weight")]:
        made = quantise(how).convert({name: stored.pop(name)})
        stored |= made
        parts: dict[str, list[Tensor] | Tensor] = {
            "weight": made[name],
            "weight_scale_inv": made[f"{name}_scale_inv"],
        }
        (numbers[name],) = dequantise(how).convert(parts, full_layer_name=name).values()
        scales = made[f"{name}_scale_inv"]
        stored[f"{name}_scale_inv"] = scales.to(scale_dtype or scales.dtype)
    folder.mkdir(parents=True)
    save_file({name: tensor.contiguous() for name, tensor in stored.items()},
              folder / "model.safetensors")  # fmt: skip
    config = json.loads((dense / "config.json").read_text(encoding="utf-8"))
    made_config = json.dumps({**config, "quantization_config": settings})
    (folder / "config.json").write_text(made_config, encoding="utf-8")
    return numbers


def load_bitsandbytes(folder: Path, **settings: Any) -> Any:
    """transformers' model, rounded by bitsandbytes where the checkpoint was not."""
    config: Any = BitsAndBytesConfig
    how = {"quantization_config": config(**settings)} if settings else {}
    auto: Any = AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, dtype=torch.float32, device_map={"": "cpu"}, **how)
    model.generation_config.eos_token_id = None
    for module in model.modules():
        if hasattr(module, "support_avx512bf16_for_cpu"):
            # There the package would multiply in bfloat16, whatever is asked for.
            module.support_avx512bf16_for_cpu = False
    return model.eval()


def weights_in_8_bits(folder: Path) -> dict[str, Tensor]:
    """The numbers that bitsandbytes makes of a model's linear maps in 8 bits, by name."""
    modules = load_bitsandbytes(folder, load_in_8bit=True).named_modules()
    return {
        f"{name}.weight": module.weight.CB.float() * module.weight.SCB[:, None] / 127
        for name, module in modules
        if isinstance(module, Linear8bitLt)
    }


def rounded_to_8_bits(_module: nn.Module, x: Tensor) -> Tensor:
    """Round inputs [..., in] as bitsandbytes does, with a scale for each token."""
    codes, scales, _ = int8_vectorwise_quant(x.flatten(0, -2).half())
    rounded: Tensor = codes.float() * scales[:, None] / 127
    return rounded.view(x.shape)
