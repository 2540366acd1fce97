"""A padded model from its folder: options, pad token, and proof that every weight was there."""

import json
import logging
import re
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available

from configs.architectures.base import ArchitectureError
from configs.architectures.padded import PaddedArchitecture
from configs.architectures.select import load_padded
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from modeling.loading import torch_dtype
from modeling.models.causal_lm import CausalLM
from sharding.checkpoint import CheckpointError
from sharding.loader import idle_biases
from sharding.sources.model import fetch_model

PAD_TOKEN = "[PAD]"

BUFFERS = re.compile(r".*\.(attn|attention|self_attn)\.(bias|masked_bias)|.*\.inv_freq")
"""Masks and frequencies that old checkpoints hold beside the weights."""

PADDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The kinds of `layer_types` whose state is one key and value for each position."""


@dataclass(frozen=True)
class LoadedCausalLM:
    """A padded model, and the bytes and seconds that it took."""

    model: CausalLM
    architecture: PaddedArchitecture
    bytes_read: int
    bytes_resident: int
    seconds: float


def load_causal_lm(config: ModelConfig, device: torch.device, spread: bool) -> LoadedCausalLM:
    """Read the model that `config` names.

    spread: whether it may lie on all visible GPUs. ArchitectureError and ValueError say what is
    not served, CheckpointError which weights are missing.
    """
    started = time.monotonic()
    folder = fetch_model(config)
    architecture = load_padded(folder).with_rope_length(config.dynamic_rope_length)
    if config.quantize is not Quantize.NONE:
        _check_quantize(config)
    model_config = _model_config(config, folder)
    _check_state(model_config)
    if config.load_format is LoadFormat.DUMMY:
        model = _dummy(config, model_config, device)
        bytes_read = 0
    else:
        model = _read(config, folder, device, spread)
        bytes_read = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    model.requires_grad_(False).train(False)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    pad = pad_token_id(model_config, folder, embedding.shape[0])
    causal = CausalLM(model, pad, embedding.device, exact=config.quantize is Quantize.NONE)
    resident = sum(parameter.nbytes for parameter in model.parameters())
    seconds = time.monotonic() - started
    return LoadedCausalLM(causal, architecture, bytes_read, resident, seconds)


def pad_token_id(config: PretrainedConfig, folder: Path, vocab_size: int) -> int:
    """Return the first that the embedding has of: the config's pad and end-of-sequence tokens,
    the tokenizer's, and a new "[PAD]"; 0 when there is none, for padding is never looked at.
    """
    return next((token for token in _candidates(config, folder) if 0 <= token < vocab_size), 0)


def _candidates(config: PretrainedConfig, folder: Path) -> Iterator[int]:
    for name in ("pad_token_id", "eos_token_id"):
        value = getattr(config, name, None)
        if value is not None:
            yield value[0] if isinstance(value, list) else value
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    except (OSError, ValueError, KeyError, TypeError):
        return  # A folder without a tokenizer serves token ids all the same.
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    yield tokenizer.pad_token_id


def _check_quantize(config: ModelConfig) -> None:
    what = f"model.quantize: {config.quantize.value}"
    if config.load_format is LoadFormat.DUMMY:
        raise ValueError(f"{what}: dummy weights are not quantised; set load_format or quantize")
    packages = {
        "bitsandbytes": is_bitsandbytes_available(),
        "accelerate": is_accelerate_available(),
    }
    for package, is_there in packages.items():
        if not is_there:
            raise ValueError(
                f"{what} needs the package {package}, or a newer one: "
                "pip install -U bitsandbytes accelerate"
            )
    # It would tell of its cast to float16 at every product of every step.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _check_state(config: PretrainedConfig) -> None:
    """Refuse models whose layers keep anything but keys and values."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    if kinds - PADDABLE_LAYERS:
        raise ArchitectureError(
            f"layer_types {', '.join(sorted(kinds - PADDABLE_LAYERS))}: recurrent layers are "
            "not served, padding would enter their state"
        )


def _model_config(config: ModelConfig, folder: Path) -> PretrainedConfig:
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code
        )
    except (ValueError, KeyError) as error:
        raise _not_built(config, folder, error) from error
    return found


def _read(config: ModelConfig, folder: Path, device: torch.device, spread: bool) -> PreTrainedModel:
    """Read the checkpoint; transformers would fill in random weights for missing ones."""
    options: dict[str, Any] = {}
    on_many = spread and device.type == "cuda" and torch.cuda.device_count() > 1
    quantization = quantization_config(config.quantize, _dtype(config.dtype, device))
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    if on_many:
        options["device_map"] = "auto"
    auto: Any = AutoModelForCausalLM
    try:
        model, info = auto.from_pretrained(
            folder,
            dtype=_dtype(config.dtype, device),
            trust_remote_code=config.trust_remote_code,
            use_safetensors=None if config.allow_pickle else True,
            output_loading_info=True,
            **options,
        )
    except (ValueError, KeyError) as error:
        raise _not_built(config, folder, error) from error
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(f"{folder}: the checkpoint lacks {', '.join(names[:5])}")
    names = sorted(name for name in info["unexpected_keys"] if not BUFFERS.fullmatch(name))
    biases = idle_biases(names, model.state_dict().keys())
    names = [name for name in names if name not in biases]
    if names:
        raise CheckpointError(
            f"{folder}: the model has no place for {len(names)} tensors of the checkpoint: "
            f"{', '.join(names[:5])}"
        )
    if quantization is not None:
        _check_quantised(model, config.quantize)
    loaded: PreTrainedModel = model if "device_map" in options else model.to(device)
    return loaded


def _check_quantised(model: PreTrainedModel, quantize: Quantize) -> None:
    """Refuse what transformers left as it was with a warning."""
    if not any(type(each).__module__.startswith("bitsandbytes.") for each in model.modules()):
        raise ValueError(
            f"model.quantize: {quantize.value}: transformers finds nothing to quantise in "
            f"{type(model).__name__}, whose linear layers are its own: set it to none"
        )


def quantization_config(quantize: Quantize, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return what transformers is told; None for weights as they are."""
    options: dict[Quantize, dict[str, Any]] = {
        Quantize.BITSANDBYTES: {"load_in_8bit": True},
        Quantize.BITSANDBYTES_NF4: {
            "load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "bnb_4bit_compute_dtype": dtype,
        },
    }
    build: Any = BitsAndBytesConfig
    return build(**options[quantize]) if quantize in options else None


def _dummy(
    config: ModelConfig, model_config: PretrainedConfig, device: torch.device
) -> PreTrainedModel:
    """Seeded random weights of the model's shape."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: PreTrainedModel = auto.from_config(
            model_config,
            dtype=_dtype(config.dtype, device),
            trust_remote_code=config.trust_remote_code,
        ).to(device)
    return model


def _dtype(wanted: DType, device: torch.device) -> torch.dtype:
    """Return what AUTO means here, as in LoRAX: half precision on a GPU, single on a CPU."""
    if wanted is not DType.AUTO:
        return torch_dtype(wanted.value)
    return torch.float16 if device.type == "cuda" else torch.float32


def _not_built(config: ModelConfig, folder: Path, error: Exception) -> ArchitectureError:
    """Say why transformers cannot build a model, and what to do where we know."""
    told = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    if told.get("auto_map") and not config.trust_remote_code:
        return ArchitectureError(
            f"{folder.name} brings its own code ({', '.join(sorted(told['auto_map']))}), which is "
            "not run unless model.trust_remote_code is true: set it if you trust that code"
        )
    return ArchitectureError(f"transformers cannot build {folder.name}: {error}")
