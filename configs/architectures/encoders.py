"""Encoders of transformers, which read their tokens both ways, to classify or to embed.

They run in transformers' own code. Only types that were compared with its results are listed.
"""

from collections.abc import Mapping
from typing import Any

from configs.architectures import classifiers, padded
from configs.architectures.base import ArchitectureError

NAMES = {
    "albert": "Albert",
    "bert": "Bert",
    "camembert": "Camembert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
    "distilbert": "DistilBert",
    "electra": "Electra",
    "ernie": "Ernie",
    "eurobert": "EuroBert",
    "megatron-bert": "MegatronBert",
    "modernbert": "ModernBert",
    "mpnet": "MPNet",
    "nomic_bert": "NomicBert",
    "roberta": "Roberta",
    "xlm-roberta": "XLMRoberta",
    "xlm-roberta-xl": "XLMRobertaXL",
}
"""From a model_type to what its classes' names begin with."""

REASON = "it is an encoder"
"""Why one is not paged."""

_HEADS = ("Model", "ForMaskedLM", "ForPreTraining", classifiers.SUFFIX)

_SHIFTED = frozenset({"camembert", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl"})
"""Types with positions that begin behind the padding token's id."""

_DEFAULT_PAD = 1
"""Theirs, where config.json names none."""


class EncoderArchitecture(padded.PaddedArchitecture):
    """An encoder: whole prompts in padded batches, without a cache."""


def is_encoder(name: str, config: Mapping[str, Any]) -> bool:
    """Whether an architecture of this name is an encoder that is served."""
    family = NAMES.get(str(config.get("model_type")))
    return not config.get("is_decoder") and name in {f"{family}{head}" for head in _HEADS}


def parse(name: str, config: Mapping[str, Any]) -> EncoderArchitecture:
    """Normalise the config.json of an encoder; ArchitectureError names what is wrong."""
    if config.get("auto_map"):
        raise ArchitectureError(
            f"auto_map: {name} brings its own code, which is not run for encoders"
        )
    found = padded.parse(name, config)
    if not found.limited:
        raise ArchitectureError("config.json does not give max_position_embeddings")
    length = found.max_position_embeddings
    if config["model_type"] in _SHIFTED:
        pad = config.get("pad_token_id")
        length -= (_DEFAULT_PAD if pad is None else int(pad)) + 1
    labels = classifiers.labels_of(config) if classifiers.is_classifier(name) else ()
    shared = {key: getattr(found, key) for key in padded.PaddedArchitecture.model_fields}
    own = {
        "max_position_embeddings": length,
        "num_labels": len(labels),
        "reason": REASON,
    }
    return EncoderArchitecture(**(shared | own))
