"""Checkpoints of transformers' ...ForSequenceClassification, and what their heads mean.

A decoder that classifies is the decoder of the causal model, with a linear head `score` over the
labels in place of the one over the vocabulary. It reads the state of the last token that is no
padding token.
"""

from collections.abc import Mapping, Sequence
from typing import Any

SUFFIX = "ForSequenceClassification"

_CAUSAL = {
    "GPT2ForSequenceClassification": "GPT2LMHeadModel",
    "Gemma3TextForSequenceClassification": "Gemma3ForCausalLM",
}
"""Causal classes that have another name than the rest."""

OWN_HEADS = frozenset({"ModernBertDecoderForSequenceClassification"})
"""Decoders with a classification head that is more than one linear map."""

PAD_TOKENS = {
    "apertus": 3, "aria_text": 2, "biogpt": 1, "cohere": 0, "cohere2": 0, "cohere2_moe": 0,
    "ernie4_5": 0, "ernie4_5_moe": 0, "exaone_moe": 0, "flex_olmo": 100277, "gemma": 0, "gemma2": 0,
    "gemma3_text": 0, "glm": 151329, "glm4": 151329, "helium": 3, "hunyuan_v1_dense": 0,
    "hunyuan_v1_moe": 0, "lfm2_moe": 0, "ministral3": 11, "modernbert-decoder": 50283,
    "nanochat": 1, "olmo": 1, "olmo2": 1, "olmo3": 1, "olmoe": 1, "opt": 1, "phi3": 32000,
    "seed_oss": 1, "smollm3": 128004, "vaultgemma": 0,
}  # fmt: skip
"""transformers' default pad_token_id by model_type, where it is not None."""


def is_classifier(name: str) -> bool:
    """Whether an architecture's name is that of a sequence classifier."""
    return name.endswith(SUFFIX)


def causal_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the causal model's config.json of a classifier's; its two ends count as tied.

    Such a checkpoint has no head over the vocabulary.
    """
    causal = _CAUSAL.get(name, name.removesuffix(SUFFIX) + "ForCausalLM")
    return {**config, "architectures": [causal], "tie_word_embeddings": True}


def labels_of(config: Mapping[str, Any]) -> tuple[str, ...]:
    """The labels' names in the order of the logits, as transformers reads them."""
    named = config.get("id2label")
    if named:
        by_id = {int(id): str(name) for id, name in named.items()}
        return tuple(by_id[id] for id in sorted(by_id))
    return default_labels(config.get("num_labels") or 2)


def default_labels(count: int) -> tuple[str, ...]:
    """transformers' names of labels that have none."""
    return tuple(f"LABEL_{id}" for id in range(count))


def pad_token(config: Mapping[str, Any]) -> int | None:
    """The token that a decoder's head takes for padding; None: every token counts."""
    default = PAD_TOKENS.get(str(config.get("model_type")))
    found = config.get("pad_token_id", default)
    return None if found is None else int(found)


def up_to_score(ids: Sequence[int], pad: int | None) -> list[int]:
    """The tokens up to the one that a decoder's head reads: the last that is no padding.

    Later ones change nothing, for a decoder's tokens see those before them only. Where all are
    padding, transformers reads the first.
    """
    last = next((i for i in range(len(ids) - 1, -1, -1) if ids[i] != pad), 0)
    return list(ids[: last + 1])
