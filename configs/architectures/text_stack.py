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

_PLACEHOLDERS = {"image_token_id": 258880, "audio_token_id": 258881, "video_token_id": 258884}
"""What Gemma 4's classes embed as padding where no image or sound comes with it; defaults."""

_CAPPED = frozenset({"gemma4_text", "gemma4_unified_text"})
"""Decoders that are capped by their larger models too."""

_FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
}
"""Classes of which published files have the decoder's fields beside those of images; its type."""

_TIED = frozenset(
    {
        "Gemma3ForConditionalGeneration",
        "Gemma4ForConditionalGeneration",
        "Gemma4UnifiedForConditionalGeneration",
        "InternVLForConditionalGeneration",
        "Mistral3ForConditionalGeneration",
    }
)
"""Classes that tie embedding and head unless config.json says otherwise."""

_LLAMA = {
    "vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
    "num_attention_heads": 32,
}  # fmt: skip
_QWEN2_VL = {
    "vocab_size": 152064, "hidden_size": 8192, "intermediate_size": 29568, "num_hidden_layers": 80,
    "num_attention_heads": 64, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "rope_theta": 1e6,
    "max_window_layers": 80,
}  # fmt: skip
_GEMMA = {"vocab_size": 262144, "num_hidden_layers": 30, "max_position_embeddings": 131072}
_QWEN3 = {**_LLAMA, "vocab_size": 151936, "intermediate_size": 22016}

_DEFAULTS: dict[str, dict[str, Any]] = {
    "gemma3_text": {**_GEMMA, "vocab_size": 262208, "num_hidden_layers": 26},
    "gemma4_text": _GEMMA,
    "gemma4_unified_text": {**_GEMMA, "max_position_embeddings": 262144},
    "llama": _LLAMA,
    "llama4_text": {
        "vocab_size": 202048, "num_hidden_layers": 48, "max_position_embeddings": 131072
    },
    "ministral3": {
        "vocab_size": 131072, "num_hidden_layers": 34, "max_position_embeddings": 262144
    },
    "mistral": {**_LLAMA, "intermediate_size": 14336},
    "qwen2": _QWEN3,
    "qwen2_5_vl_text": _QWEN2_VL,
    "qwen2_vl_text": _QWEN2_VL,
    "qwen3": _QWEN3,
    "qwen3_vl_text": {**_QWEN3, "max_position_embeddings": 128000, "rope_theta": 5e5},
}  # fmt: skip
"""What published files leave unsaid of a decoder: transformers' own numbers."""

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_text_stack(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a larger model that has a decoder of text."""
    return name.endswith(SUFFIX) and ("text_config" in config or name in _FLAT)


def text_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the decoder's config.json of a larger model's; ArchitectureError says what is wrong."""
    text = config.get("text_config")
    if text is None and name in _FLAT:
        text = {**config, "model_type": _FLAT[name]}
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
    dtype = config.get("dtype") or config.get("torch_dtype")
    return {
        **_DEFAULTS[kind],
        **text,
        **shared,
        **({"dtype": dtype} if dtype else {}),
        "tie_word_embeddings": _is_tied(name, config, text),
        "model_type": _TYPES.get(kind, kind),
        "architectures": [_DECODERS[kind]],
        **_plain_rope(text),
    }


def padding_of(kind: str | None, config: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the tokens that a larger model embeds as another one, and that one.

    kind: its decoder's `model_type`.
    """
    if kind not in _CAPPED:
        return (), 0
    found = (config.get(key, default) for key, default in _PLACEHOLDERS.items())
    pad = config["text_config"].get("pad_token_id") or 0
    return tuple(token for token in found if token is not None), pad


def _is_tied(name: str, config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """Whether the head may be the embedding; one that is stored and differs is read all the same.

    Files of transformers 4 say it in text_config, those of 5 outside of it.
    """
    own = config.get("tie_word_embeddings")
    return bool(name in _TIED if own is None else own) or bool(text.get("tie_word_embeddings"))


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
