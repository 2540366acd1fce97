"""Decoders inside checkpoints of larger models, which read images or sound too: served for text.

Beside text alone such a model computes what its decoder computes, so the decoder is served as
the model that it is by itself, from the tensors that are its own.
"""

from collections.abc import Collection, Mapping
from typing import Any

from configs.architectures.base import ArchitectureError, refuse_unserved
from configs.architectures.text_decoders import DECODERS

SUFFIX = "ForConditionalGeneration"

_KINDS = {
    f"{name}{SUFFIX}": kind
    for kind, names in (
        ("apertus1p5_text", ("Apertus1p5",)),
        ("aria_text", ("Aria",)),
        ("cohere2", ("AyaVision", "Cohere2Vision")),
        ("cosmos3_edge_text", ("Cosmos3Edge",)),
        ("deepseek_v3", ("Kimi_K25",)),
        ("emu3_text_model", ("Emu3",)),
        ("exaone4", ("Exaone4_5_",)),
        ("gemma3_text", ("Gemma3",)),
        ("gemma3n_text", ("Gemma3n",)),
        ("gemma4_text", ("Gemma4",)),
        ("gemma4_unified_text", ("Gemma4Unified",)),
        ("glm4v_moe_text", ("Glm4vMoe",)),
        ("glm4v_text", ("Glm46V", "Glm4v")),
        ("glm_ocr_text", ("GlmOcr",)),
        ("granite4_vision_text", ("Granite4Vision",)),
        ("granite_docling_text", ("GraniteDocling",)),
        ("hunyuan_vl_text", ("HunYuanVL",)),
        ("hyperclovax", ("HyperCLOVAXVisionV2",)),
        ("lfm2", ("Lfm2Vl",)),
        ("lfm3", ("Lfm3Vl",)),
        (
            "llama",
            (
                "DeepseekVL", "DeepseekVLHybrid", "Idefics3", "Janus", "Llava", "LlavaNext",
                "LlavaNextVideo", "PerceptionLM", "SmolVLM", "VideoLlava", "VipLlava", "Voxtral",
            ),
        ),
        ("llama4_text", ("Llama4",)),
        ("mistral", ("Idefics2", "Mistral3")),
        ("mllama_text_model", ("Mllama",)),
        ("muse_glimmer_text", ("MuseGlimmer",)),
        ("paddleocr_vl_text", ("PaddleOCRVL",)),
        (
            "qwen2",
            (
                "AudioFlamingo3", "FastVlm", "GotOcr2", "InternVL", "LlavaOnevision", "Ovis2",
                "Qwen2Audio", "VideoLlama3",
            ),
        ),
        ("qwen2_5_omni_text", ("Qwen2_5OmniThinker",)),
        ("qwen2_5_vl_text", ("Qwen2_5_VL",)),
        ("qwen2_vl_text", ("Qwen2VL",)),
        ("qwen3", ("LightOnOcr", "QianfanOCR")),
        ("qwen3_5_moe_text", ("Qwen3_5Moe",)),
        ("qwen3_5_text", ("MiniCPMOcr", "MiniCPMV4_6", "MiniCPMV4_7", "Qwen3_5")),
        ("qwen3_omni_moe_text", ("Qwen3OmniMoeThinker",)),
        ("qwen3_vl_moe_text", ("Qwen3VLMoe",)),
        ("qwen3_vl_text", ("Cosmos3Omni", "Qwen3VL")),
    )
    for name in names
}  # fmt: skip
"""Classes that were compared with their decoders on text, and the decoder's `model_type` where
config.json does not name one."""

WRAPPERS = frozenset(_KINDS)

_DECODER_CLASSES = {
    f"{name}ForCausalLM": f"{name}{SUFFIX}" for name in ("Llama4", "Qwen3_5", "Qwen3_5Moe")
}
"""Decoders' classes that transformers also makes of a larger model's config.json; its class."""

_OTHER_NAMES = {
    **_DECODER_CLASSES,
    "KimiK25ForConditionalGeneration": "Kimi_K25ForConditionalGeneration",
    "Qwen2_5OmniModel": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen2_5OmniForConditionalGeneration": "Qwen2_5OmniThinkerForConditionalGeneration",
    "Qwen3OmniMoeForConditionalGeneration": "Qwen3OmniMoeThinkerForConditionalGeneration",
}
"""How files name a class otherwise, or a model that speaks too, of which it is a part."""

_OTHER_KINDS = {"kimi_k2": "deepseek_v3"}
"""How files name a decoder's type otherwise, as transformers reads them."""

_GEMMA4 = ("Gemma4ForConditionalGeneration", "Gemma4UnifiedForConditionalGeneration")

_PLACEHOLDERS: dict[str, dict[str, int]] = {
    **{
        name: {"image_token_id": 258880, "audio_token_id": 258881, "video_token_id": 258884}
        for name in _GEMMA4
    },
    "Kimi_K25ForConditionalGeneration": {"image_token_id": 163605, "video_token_id": 163840},
    "MuseGlimmerForConditionalGeneration": {"image_token_id": 200092, "video_token_id": 200091},
}
"""What a class embeds as padding where no image or sound comes with it; defaults."""

_FLAT = {
    "Qwen2VLForConditionalGeneration": "qwen2_vl_text",
    "Qwen2_5_VLForConditionalGeneration": "qwen2_5_vl_text",
}
"""Classes of which published files have the decoder's fields beside those of images; its type."""

_TIED = frozenset(
    f"{name}{SUFFIX}"
    for name in (
        "AyaVision", "Cohere2Vision", "DeepseekVL", "DeepseekVLHybrid", "Gemma3", "Gemma3n",
        "Gemma4", "Gemma4Unified", "GotOcr2", "GraniteDocling", "HunYuanVL", "HyperCLOVAXVisionV2",
        "InternVL", "Janus", "Kimi_K25", "Lfm2Vl", "Lfm3Vl", "LightOnOcr", "MiniCPMOcr", "Mistral3",
        "Ovis2", "PaddleOCRVL",
    )
)  # fmt: skip
"""Classes that tie embedding and head unless config.json says otherwise."""

_SHARED = ("bos_token_id", "eos_token_id", "pad_token_id")


def is_text_stack(name: str, config: Mapping[str, Any]) -> bool:
    """Whether a config.json is of a larger model that has a decoder of text."""
    has_decoder = "text_config" in config
    if name in _DECODER_CLASSES:
        return has_decoder
    return name in _OTHER_NAMES or name in _FLAT or (name.endswith(SUFFIX) and has_decoder)


def writing_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the part that writes text, in models that speak too; else the same."""
    inner = config.get("thinker_config")
    return inner if isinstance(inner, Mapping) else config


def text_config(name: str, config: Mapping[str, Any]) -> dict[str, Any]:
    """Make the decoder's config.json of a larger model's; ArchitectureError says what is wrong."""
    dtype = config.get("dtype") or config.get("torch_dtype")
    name, config = _OTHER_NAMES.get(name, name), writing_part(config)
    text = config.get("text_config")
    if text is None and name in _FLAT:
        text = {**config, "model_type": _FLAT[name]}
    if name not in WRAPPERS or not isinstance(text, Mapping):
        known = ", ".join(sorted(each.removesuffix(SUFFIX) for each in WRAPPERS))
        raise ArchitectureError(
            f"architecture {name} is not served; of models that read more than text these are, for "
            f"text alone (all ...{SUFFIX}): {known}"
        )
    kind = text.get("model_type", _KINDS[name])
    kind = _OTHER_KINDS.get(kind, kind)
    if kind not in DECODERS:
        raise ArchitectureError(
            f"{name}: its decoder's model_type {kind} is not served inside of a larger model; "
            f"known: {', '.join(sorted(DECODERS))}"
        )
    decoder = DECODERS[kind]
    shared = {key: config[key] for key in _SHARED if config.get(key) is not None}
    fields = {**decoder.unsaid, **text, **decoder.fixed}
    if fields.get("final_logit_softcapping") is not None and decoder.capped_in != name:
        # Most larger models' classes have a head of their own, which does not know it.
        raise ArchitectureError(f"{name}: final_logit_softcapping is not served inside of it")
    if "use_sliding_window" in decoder.fixed:
        # Its attention has no window, but the cache of transformers forgets by one.
        refuse_unserved(name, text, fields["max_position_embeddings"])
    if decoder.derives_width or decoder.splits_width:
        width = fields["hidden_size"] // fields["num_attention_heads"]
        if fields.setdefault("head_dim", width) != width and decoder.splits_width:
            raise ArchitectureError(
                f"{name}: head_dim ({fields['head_dim']}) must be hidden_size / "
                f"num_attention_heads ({width}) in {kind}: transformers rotates by the one and "
                "attends by the other"
            )
    return {
        **fields,
        **shared,
        **({"dtype": dtype} if dtype else {}),
        "tie_word_embeddings": _is_tied(name, config, text),
        "model_type": decoder.model_type or kind,
        "architectures": [decoder.architecture],
        **({} if decoder.has_sections else _plain_rope(text)),
    }


def padding_of(name: str, config: Mapping[str, Any]) -> tuple[tuple[int, ...], int]:
    """Return the tokens that a larger model's class embeds as another one, and that one."""
    placeholders = _PLACEHOLDERS.get(_OTHER_NAMES.get(name, name), {})
    found = (config.get(key, default) for key, default in placeholders.items())
    # Kimi's and Muse's padding is token 0, whatever their config says.
    pad = config["text_config"].get("pad_token_id") if name in _GEMMA4 else 0
    return tuple(token for token in found if token is not None), pad or 0


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
    "model.language_model.model.": "model.",
    "model.language_model.": "model.",
    "model.text_model.model.": "model.",
    "model.text_model.": "model.",
    "thinker.lm_head.": "lm_head.",
    "thinker.model.language_model.": "model.",
    "thinker.model.layers.": "model.layers.",
    "thinker.model.embed_tokens.": "model.embed_tokens.",
    "thinker.model.norm.": "model.norm.",
    "lm_head.": "lm_head.",
    "model.layers.": "model.layers.",
    "model.embed_tokens.": "model.embed_tokens.",
    "model.norm.": "model.norm.",
}
"""How tensors of a larger checkpoint begin that are its decoder's, and as what: as transformers
4 and 5 and the models' own repositories write them. All others are left unread."""


def decoder_name(name: str, parts: Collection[str] = ()) -> str | None:
    """Return the decoder's own name of a larger checkpoint's tensor; None for another part's.

    parts: others that are read, under the names that they have, but for the norm of what towers
    make of images and sound.
    """
    if not parts_of(name).isdisjoint(parts):
        return None if ".soft_embedding_norm." in name else name
    for prefix, own in DECODER_PREFIXES.items():
        if name.startswith(prefix):
            return own + name.removeprefix(prefix)
    return None


_OTHER_PARTS = frozenset(
    {
        "aligner", "audio_tokenizer", "audio_tower", "connector", "embed_audio", "embed_vision",
        "generation_aligner", "generation_embeddings", "generation_head", "high_res_vision_model",
        "high_res_vision_neck", "high_res_vision_proj", "image_tower", "layerwise_projectors",
        "merger", "mm_projector", "multi_modal_projector", "perception_emb_norm", "projector",
        "resampler_model", "spatial_projectors", "video_tower", "vision_adapter", "vision_encoder",
        "vision_model", "vision_projection", "vision_tokenizer", "vision_tower", "visual",
        "visual_embeddings_table", "vqmodel",
    }
)  # fmt: skip
"""How larger models call what makes tokens of images and sound: no text goes through it."""


def is_other_part(path: str) -> bool:
    """Whether a path in a larger model is of what text does not go through."""
    return not _OTHER_PARTS.isdisjoint(parts_of(path))


def parts_of(path: str) -> frozenset[str]:
    """Return what a path in a larger model may begin with: the names of parts."""
    return frozenset(path.split(".")[:2])


def outer_paths(path: str) -> tuple[str, ...]:
    """Return how adapters that were trained on the larger model may name a decoder's module."""
    if path.startswith("model."):
        inner = path.removeprefix("model.")
        outer = ("model.language_model", "language_model.model", "model.text_model")
        thinkers = ("thinker.model", "thinker.model.language_model")
        return tuple(f"{prefix}.{inner}" for prefix in (*outer, *thinkers))
    return (f"language_model.{path}", f"thinker.{path}")
