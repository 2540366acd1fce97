"""An encoder from its folder, and proof that every weight was there."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModel,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    PreTrainedModel,
)

from configs.architectures.encoders import EncoderArchitecture
from configs.architectures.select import load_architecture
from configs.model import LoadFormat, ModelConfig, Quantize
from configs.reading import has_tokenizer
from modeling.models.encoder import Encoder
from modeling.runner.loading import LoadedWeights
from modeling.runner.padded_loading import read_model_config, read_with, weights_dtype
from sharding.checkpoint import CheckpointError
from sharding.loader import UNUSED
from sources.model import fetch_model

_POOLER = re.compile(r"(\w+\.)?pooler\..*")
"""What is computed of the first token behind all layers; embeddings are made before it."""

_OTHER_HEADS = re.compile(
    r"(cls|lm_head|lm_predictions|predictions|head|decoder|classifier|sop_classifier|vocab_\w+"
    r"|generator_\w+|discriminator_predictions)\..*|(\w+\.)?pooler\..*|.*\.position_ids"
)
"""Heads of training that an encoder without one has no use for, and old versions' buffers."""


@dataclass(frozen=True)
class LoadedEncoderWeights(LoadedWeights):
    """An encoder, whole."""

    model: Encoder
    architecture: EncoderArchitecture


def load_encoder_weights(config: ModelConfig, device: torch.device) -> LoadedEncoderWeights:
    """Read the encoder that `config` names.

    ArchitectureError and ValueError say what is not served, CheckpointError which weights are
    missing.
    """
    folder = fetch_model(config)
    architecture = load_architecture(folder).with_rope_length(config.dynamic_rope_length)
    assert isinstance(architecture, EncoderArchitecture), architecture.architecture
    if config.quantize is not Quantize.NONE:
        raise ValueError(
            f"model.quantize: {config.quantize.value}: encoders are not quantised: set it to none"
        )
    if config.load_format is LoadFormat.DUMMY:
        raise ValueError("model.load_format: dummy: an encoder is read from its checkpoint")
    model = _read(config, folder, architecture)
    model.requires_grad_(False).train(False)
    # torch types it for plain modules only.
    move: Any = model.to
    encoder = Encoder(move(device), _takes_types(folder, config.trust_remote_code), device)
    return LoadedEncoderWeights(
        dtype=encoder.dtype,
        bytes_read=sum(path.stat().st_size for path in folder.glob("*.safetensors")),
        bytes_resident=sum(parameter.nbytes for parameter in model.parameters()),
        model=encoder,
        architecture=architecture,
    )


def _read(config: ModelConfig, folder: Path, architecture: EncoderArchitecture) -> PreTrainedModel:
    """Read the checkpoint; transformers would fill in random weights for missing ones."""
    classifies = architecture.num_labels > 0
    auto: Any = AutoModelForSequenceClassification if classifies else AutoModel
    dtype = weights_dtype(config, read_model_config(config, folder), folder)
    model, info = read_with(auto, config, folder, {"dtype": dtype})
    missing = sorted(
        name for name in info["missing_keys"] if classifies or not _POOLER.fullmatch(name)
    )
    if missing:
        raise CheckpointError(f"{folder}: the checkpoint lacks {', '.join(missing[:5])}")
    unused = sorted(name for name in info["unexpected_keys"] if not _OTHER_HEADS.fullmatch(name))
    if unused:
        raise CheckpointError(
            f"{folder}: the model does not use {len(unused)} tensors of the checkpoint: "
            f"{', '.join(unused[:5])}; {UNUSED}"
        )
    return model


def _takes_types(folder: Path, trusts: bool) -> bool:
    """Whether the folder's tokenizer gives the model token types.

    trusts: whether the folder's Python files may be run. A folder without a tokenizer serves ids
    alone. ValueError says why one cannot be read.
    """
    if not has_tokenizer(folder):
        return False
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder, trust_remote_code=trusts)
    # The library that reads it raises Exception itself.
    except Exception as error:
        reason = " ".join(f"{error}".strip().splitlines()[:1])
        raise ValueError(
            f"the tokenizer in {folder} cannot be read ({reason}), and it says whether the model "
            "takes token types: correct its files, or remove them all to serve ids alone"
        ) from error
    return "token_type_ids" in tokenizer.model_input_names
