"""Decoders inside checkpoints of larger models, which read images or sound too: served for text.

Beside text alone such a model computes what its decoder computes, so the decoder is served as
the model that it is by itself, from the tensors that are its own.
"""

from collections.abc import Mapping
from typing import Any

from configs.architectures.base import ArchitectureError

SUFFIX = "ForConditionalGeneration"

WRAPPERS = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "Idefics3ForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Llama4ForConditionalGeneration",
        "LlavaForConditionalGeneration",
        "LlavaNextForConditionalGeneration",
        "LlavaOnevisionForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
        "Qwen2VLForConditionalGeneration",
        "Qwen2_5_VLForConditionalGeneration",
        "Qwen3VLForConditionalGeneration",
        "SmolVLMForConditionalGeneration",
        "VipLlavaForConditionalGeneration",
    }
)
"""Classes that were compared with their decoders on text."""

_DECODERS = {
    "gemma3_text": "Gemma3ForCausalLM",
    "gemma4_text": "Gemma4ForCausalLM",
    "gemma4_unified_text": "Gemma4UnifiedForCausalLM",
    "llama": "LlamaForCausalLM",
    "llama4_text": "Llama4ForCausalLM",
    "ministral3": "Ministral3ForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
"""The class of each decoder by itself, by its `model_type`."""

_TYPES = {"qwen2_5_vl_text": "qwen2", "qwen2_vl_text": "qwen2", "qwen3_vl_text": "qwen3"}
"""Decoders that differ in their positions of images alone: what they are for text."""

_CAPPED = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Decoders that are capped by their larger models too."""

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "dtype")


def text_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the decoder's config.json of a larger model's; ArchitectureError says what is wrong."""
    text = config.get("text_config")
    if name not in WRAPPERS or not isinstance(text, Mapping):
        raise ArchitectureError(
            f"architecture {name} is not served; of models that read more than text these are, for "
            f"text alone: {', '.join(sorted(WRAPPERS))}"
        )
    kind = text.get("model_type", "llama")
    if kind not in _DECODERS:
        raise ArchitectureError(
            f"{name}: its decoder's model_type {kind} is not served inside of a larger model; "
            f"known: {', '.join(sorted(_DECODERS))}"
        )
    if text.get("final_logit_softcapping") is not None and kind not in _CAPPED:
        # Most larger models' classes have a head of their own, which does not know it.
        raise ArchitectureError(f"{name}: final_logit_softcapping is not served inside of it")
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    return {
        **text,
        **shared,
        "model_type": _TYPES.get(kind, kind),
        "architectures": [_DECODERS[kind]],
        **_plain_rope(text),
    }


def _plain_rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """The rotary settings without sections for images: for text all sections turn alike."""
    plain = {}
    for key in ("rope_parameters", "rope_scaling"):
        rope = text.get(key)
        if isinstance(rope, Mapping) and "mrope_section" in rope:
            kept = {k: v for k, v in rope.items() if not k.startswith("mrope_")}
            for kind in ("type", "rope_type"):
                if kept.get(kind) in ("mrope", "default"):
                    kept[kind] = "default"
            plain[key] = kept
    return plain


DECODER_PREFIXES = {
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "model.text_model.": "model.",
    "lm_head.": "lm_head.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
}
"""How tensors of a larger checkpoint begin that are its decoder's, and as what: as transformers
4 and 5 and the models' own repositories write them. All others are left unread."""


def decoder_name(name: str) -> str | None:
    """Return the decoder's own name of a larger checkpoint's tensor; None for another part's."""
    for prefix, own in DECODER_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None


_OTHER_PARTS = frozenset(
    {
        "audio_tower", "connector", "embed_audio", "embed_vision", "multi_modal_projector",
        "vision_model", "vision_tower", "visual",
    }
)  # fmt: skip
"""How larger models call what makes tokens of images and sound: no text goes through it."""


def is_other_part(path: str) -> bool:
    """Whether a path in a larger model is of what text does not go through."""
    return not _OTHER_PARTS.isdisjoint(path.split(".")[:2])


def outer_paths(path: str) -> tuple[str, ...]:
    """Return how adapters that were trained on the larger model may name a decoder's module."""
    if path.startswith("model."):
        inner = path.removeprefix("model.")
        outer = ("model.language_model", "language_model.model", "model.text_model")
        return tuple(f"{prefix}.{inner}" for prefix in outer)
    return (f"language_model.{path}",)
