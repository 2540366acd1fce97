"""A padded model from its folder: options, pad token, and proof that every weight was there."""

import logging
import re
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    DynamicCache,
    PretrainedConfig,
    PreTrainedModel,
)
from transformers.utils.import_utils import is_accelerate_available, is_bitsandbytes_available

from configs.architectures.base import ArchitectureError, refuse_window_of_one
from configs.architectures.files import read_config
from configs.architectures.generic import PAGED_TYPES
from configs.architectures.padded import PaddedArchitecture
from configs.architectures.select import load_architecture, load_padded, padded_reason
from configs.model import DType, LoadFormat, ModelConfig, Quantize
from modeling.models.causal_lm import CausalLM
from modeling.models.padded.sharing import rope_kinds
from modeling.runner.loading import LoadedWeights, stored_dtype, torch_dtype
from modeling.runner.padded_progress import RandomNumbers, logged_bars
from sharding.checkpoint import CheckpointError, open_checkpoint
from sharding.loader import UNUSED, idle_biases
from sources.model import fetch_model

logger = logging.getLogger("loray.modeling.causal_lm")

PAD_TOKEN = "[PAD]"

BUFFERS = re.compile(r".*\.(attn|attention|self_attn)\.(bias|masked_bias)|.*\.inv_freq")
"""Masks and frequencies that old checkpoints hold beside the weights."""

NOT_BUILT = (
    *(ValueError, TypeError, KeyError, AttributeError, ArithmeticError, ImportError),
    StrictDataclassError,
)
"""What transformers raises for a config.json or a checkpoint that it does not take."""

PADDABLE_LAYERS = frozenset({"full_attention", "sliding_attention", "chunked_attention"})
"""The kinds of `layer_types` that keep one key and value for each position."""

UNPADDABLE_LAYERS = {
    "indexed_attention": "keep an index of the positions beside their keys and values",
    "compressed_sparse_attention": "keep one key for several positions",
    "heavily_compressed_attention": "keep one key for several positions",
}
"""What other kinds keep; those without an entry keep a recurrent state."""


@dataclass(frozen=True)
class LoadedCausalLM(LoadedWeights):
    """A padded model, whole."""

    model: CausalLM
    architecture: PaddedArchitecture


def load_causal_lm(config: ModelConfig, device: torch.device, spread: bool) -> LoadedCausalLM:
    """Read the model that `config` names.

    spread: whether it may lie on all visible GPUs. ArchitectureError and ValueError say what is
    not served, CheckpointError which weights are missing.
    """
    folder = fetch_model(config)
    architecture = load_padded(folder).with_rope_length(config.dynamic_rope_length)
    if config.quantize is not Quantize.NONE:
        _check_quantize(config)
    model_config = read_model_config(config, folder)
    _check_state(model_config, folder)
    dtype = weights_dtype(config, model_config, folder)
    if config.load_format is LoadFormat.DUMMY:
        model = _dummy(config, model_config, device, dtype)
        bytes_read = 0
    else:
        model = _read(config, folder, device, spread, dtype)
        bytes_read = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    _check_decoder(model)
    model.requires_grad_(False).train(False)
    architecture = _limited(model_config, architecture, model)
    embedding = model.get_input_embeddings().weight
    assert isinstance(embedding, Tensor)
    pad = pad_token_id(model_config, folder, embedding.shape[0])
    causal = CausalLM(model, pad, embedding.device, exact=config.quantize is Quantize.NONE)
    resident = sum(parameter.nbytes for parameter in model.parameters())
    return LoadedCausalLM(causal.dtype, bytes_read, resident, causal, architecture)


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
    except (OSError, ValueError, KeyError, TypeError, ImportError):
        # A folder without a tokenizer, or without the package that its tokenizer needs, serves ids.
        return
    if tokenizer.eos_token_id is not None:
        yield tokenizer.eos_token_id
    tokenizer.add_special_tokens({"pad_token": PAD_TOKEN})
    yield tokenizer.pad_token_id


def _check_quantize(config: ModelConfig) -> None:
    what = f"model.quantize: {config.quantize.value}"
    if config.load_format is LoadFormat.DUMMY:
        raise ValueError(f"{what}: dummy weights are not quantised; set load_format or quantize")
    if config.quantize is Quantize.FP8:
        raise ValueError(f"{what} is for paged models: set it to bitsandbytes for this one")
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
    # It would log its cast to float16 at every product of every step.
    logging.getLogger("bitsandbytes.autograd._functions").setLevel(logging.ERROR)


def _check_state(config: PretrainedConfig, folder: Path) -> None:
    """Refuse models with layers that keep anything but keys and values."""
    kinds = set(getattr(config.get_text_config(decoder=True), "layer_types", None) or ())
    for kind in sorted(kinds - PADDABLE_LAYERS):
        is_paged = config.model_type in PAGED_TYPES
        reason = padded_reason(load_architecture(folder)) if is_paged else None
        unpaged = f"; else it would be paged, but {reason}" if reason else ""
        what = UNPADDABLE_LAYERS.get(kind, "keep a recurrent state, which padding would enter")
        raise ArchitectureError(
            f"layer_types {kind}: such layers {what}; only layers that keep one key and one value "
            f"for each position are served ({', '.join(sorted(PADDABLE_LAYERS))}){unpaged}"
        )


def _check_decoder(model: PreTrainedModel) -> None:
    """Refuse a model that lets tokens see later ones: a probe may be too short to show it."""
    for module in model.modules():
        if getattr(module, "is_decoder", None) is False:
            raise ArchitectureError(
                f"is_decoder is false: {type(model).__name__} reads its tokens both ways, as an "
                "encoder does; set it to true in config.json if the model was trained to generate"
            )


def _limited(
    model_config: PretrainedConfig, architecture: PaddedArchitecture, model: PreTrainedModel
) -> PaddedArchitecture:
    """Keep a model to the lengths at which its answers depend on nothing but their requests."""
    text = model_config.get_text_config(decoder=True)
    limit, why = architecture.max_position_embeddings, ""
    if any("dynamic" in (rope.get("rope_type") or "") for rope in rope_kinds(text)):
        limit = text.max_position_embeddings
        why = "beyond it dynamic rotary frequencies depend on what was computed before, for any row"
    window = _forgotten_window(text, model)
    if window is not None and window < limit:
        limit = window
        why = "beyond it transformers' cache forgets what the model's own attention still looks for"
    if not why:
        return architecture
    logger.info("no sequence is longer than %d tokens: %s", limit, why)
    return architecture.model_copy(update={"max_position_embeddings": limit, "limited": True})


def _forgotten_window(config: PretrainedConfig, model: PreTrainedModel) -> int | None:
    """The window of `generate`'s cache, where the model's code makes no masks of windows."""
    layers: list[Any] = DynamicCache(config=config).layers
    windows = [layer.sliding_window for layer in layers if hasattr(layer, "sliding_window")]
    refuse_window_of_one(windows)
    code = vars(sys.modules[type(model).__module__])
    makes_masks = any("sliding_window" in name or "chunked" in name for name in code)
    return min(windows) if windows and not makes_masks else None


def read_model_config(config: ModelConfig, folder: Path) -> PretrainedConfig:
    """Read a folder's config.json; ArchitectureError says why transformers cannot."""
    try:
        found: PretrainedConfig = AutoConfig.from_pretrained(
            folder, trust_remote_code=config.trust_remote_code
        )
    except NOT_BUILT as error:
        raise _not_built(config, folder, error) from error
    return found


def _read(
    config: ModelConfig, folder: Path, device: torch.device, spread: bool, dtype: torch.dtype
) -> PreTrainedModel:
    """Read the checkpoint; transformers would fill in random weights for missing ones."""
    options: dict[str, Any] = {}
    on_many = spread and device.type == "cuda" and torch.cuda.device_count() > 1
    quantization = quantization_config(config.quantize, dtype)
    if quantization is not None:
        options |= {"quantization_config": quantization, "device_map": {"": device}}
    if on_many:
        options["device_map"] = "auto"
    options |= {"dtype": dtype, "trust_remote_code": config.trust_remote_code}
    model, info = read_with(AutoModelForCausalLM, config, folder, options)
    if info["missing_keys"]:
        names = sorted(info["missing_keys"])
        raise CheckpointError(f"{folder}: the checkpoint lacks {', '.join(names[:5])}")
    names = sorted(name for name in info["unexpected_keys"] if not BUFFERS.fullmatch(name))
    biases = idle_biases(names, model.state_dict().keys())
    names = [name for name in names if name not in biases]
    if names:
        raise CheckpointError(
            f"{folder}: the model does not use {len(names)} tensors of the checkpoint: "
            f"{', '.join(names[:5])}; {UNUSED}"
        )
    if quantization is not None:
        _check_quantised(model, config.quantize)
    # torch types it for plain modules only.
    move: Any = model.to
    loaded: PreTrainedModel = model if "device_map" in options else move(device)
    return loaded


def read_with(
    auto: Any, config: ModelConfig, folder: Path, options: Mapping[str, Any]
) -> tuple[PreTrainedModel, dict[str, Any]]:
    """Let a class of transformers read a checkpoint; returns the model and its loading info.

    CheckpointError names files that are missing or damaged, and tensors of other shapes.
    """
    # transformers would follow an index out of the folder, and says less of what is wrong.
    open_checkpoint(folder, config.allow_pickle)
    try:
        with logged_bars():
            model, info = auto.from_pretrained(
                folder,
                use_safetensors=None if config.allow_pickle else True,
                output_loading_info=True,
                ignore_mismatched_sizes=True,
                **options,
            )
    except NOT_BUILT as error:
        raise _not_built(config, folder, error) from error
    for name, found, wanted in sorted(info["mismatched_keys"]):
        raise CheckpointError(
            f"{folder}: tensor {name!r} has shape {tuple(found)}, the model needs {tuple(wanted)}"
        )
    return model, info


def _check_quantised(model: PreTrainedModel, quantize: Quantize) -> None:
    """Refuse what transformers left as it was with a warning."""
    if not any(type(each).__module__.startswith("bitsandbytes.") for each in model.modules()):
        raise ValueError(
            f"model.quantize: {quantize.value}: transformers finds nothing to quantise in "
            f"{type(model).__name__}, which has linear layers of its own: set it to none"
        )


def quantization_config(quantize: Quantize, dtype: torch.dtype) -> BitsAndBytesConfig | None:
    """Return transformers' settings; None for weights as they are."""
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
    config: ModelConfig, model_config: PretrainedConfig, device: torch.device, dtype: torch.dtype
) -> PreTrainedModel:
    """Seeded random weights of the model's shape."""
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]), RandomNumbers():
        torch.manual_seed(0)
        try:
            model: PreTrainedModel = auto.from_config(
                model_config, dtype=dtype, trust_remote_code=config.trust_remote_code
            )
        except NOT_BUILT as error:
            raise ArchitectureError(f"transformers cannot build the model: {error}") from error
    # torch types it for plain modules only.
    move: Any = model.to
    moved: PreTrainedModel = move(device)
    return moved


def weights_dtype(config: ModelConfig, model_config: PretrainedConfig, folder: Path) -> torch.dtype:
    """Return what AUTO means: the config's type, else that of the tensors, as for paged models."""
    if config.dtype is not DType.AUTO:
        return torch_dtype(config.dtype.value)
    for each in (model_config, model_config.get_text_config(decoder=True)):
        if each.dtype is not None:
            return each.dtype if isinstance(each.dtype, torch.dtype) else torch_dtype(each.dtype)
    if config.load_format is LoadFormat.DUMMY:
        return torch.float32
    return stored_dtype(open_checkpoint(folder, config.allow_pickle), folder)


def _not_built(config: ModelConfig, folder: Path, error: Exception) -> ArchitectureError:
    """Say why transformers cannot build a model, and what to do where we know."""
    settings = read_config(folder / "config.json")
    if settings.get("auto_map") and not config.trust_remote_code:
        return ArchitectureError(
            f"{folder.name} brings its own code ({', '.join(sorted(settings['auto_map']))}), which "
            "is not run unless model.trust_remote_code is true: set it if you trust that code"
        )
    return ArchitectureError(f"transformers cannot build {folder.name}: {error}")
