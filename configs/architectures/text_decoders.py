"""Decoders inside of larger models: as which causal model each computes text."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Decoder:
    """How a decoder is served by itself.

    architecture: the causal class that computes the same. model_type: that class's; None: it is the
    decoder's own. unsaid: transformers' numbers for what files leave out. fixed: what it computes
    whatever its config says. derives_width: whether a head is hidden_size / num_attention_heads
    wide where files leave head_dim out. splits_width: whether it must be. capped_in: the larger
    model's class that heeds final_logit_softcapping. has_sections: whether its own code reads
    mrope_section.
    """

    architecture: str
    model_type: str | None = None
    unsaid: Mapping[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, Any] = field(default_factory=dict)
    derives_width: bool = False
    splits_width: bool = False
    capped_in: str | None = None
    has_sections: bool = False


def _sizes(
    vocab: int, hidden: int, intermediate: int, layers: int, heads: int, **more: Any
) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": intermediate,
        "num_hidden_layers": layers, "num_attention_heads": heads, **more,
    }  # fmt: skip


def _lengths(vocab: int, layers: int, length: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "num_hidden_layers": layers, "max_position_embeddings": length
    }  # fmt: skip


_LLAMA = _sizes(32000, 4096, 11008, 32, 32)
_QWEN2_VL = _sizes(
    *(152064, 8192, 29568, 80, 64),
    num_key_value_heads=8, rms_norm_eps=1e-5, rope_theta=1e6, max_window_layers=80,
)  # fmt: skip
_GEMMA = _lengths(262144, 30, 131072)
_QWEN3 = _sizes(151936, 4096, 22016, 32, 32)
_QWEN3_MOE = _sizes(151936, 2048, 5632, 24, 16, num_key_value_heads=16)
_GLM4 = _sizes(
    *(151552, 4096, 13696, 40, 32),
    num_key_value_heads=2, max_position_embeddings=32768, rms_norm_eps=1e-5,
    partial_rotary_factor=1.0,
)  # fmt: skip
_UNSCALED = {"logits_scaling": 1.0}
"""Heads of larger models do not divide, as Granite's own does."""
_NO_WINDOW = {"use_sliding_window": False}
"""They have none, as the classes that compute the same may have."""

DECODERS: dict[str, Decoder] = {
    "apertus1p5_text": Decoder(
        "Apertus1p5TextForCausalLM",
        unsaid=_lengths(266752, 32, 65536),
    ),
    "aria_text": Decoder(
        "AriaTextForCausalLM",
        unsaid=_sizes(32000, 4096, 4096, 32, 32, max_position_embeddings=2048),
    ),
    # Larger models' heads do not multiply, as Cohere's own does.
    "cohere2": Decoder(
        "Cohere2ForCausalLM",
        unsaid=_lengths(256000, 40, 8192),
        fixed={"logit_scale": 1.0},
    ),
    "cosmos3_edge_text": Decoder(
        "Cosmos3EdgeForCausalLM",
        unsaid=_lengths(131072, 28, 131072),
        has_sections=True,
    ),
    "deepseek_v3": Decoder(
        "DeepseekV3ForCausalLM",
        unsaid=_lengths(129280, 61, 4096),
    ),
    "emu3_text_model": Decoder(
        "Emu3TextForCausalLM",
        unsaid=_lengths(184622, 32, 9216),
    ),
    "exaone4": Decoder(
        "Exaone4ForCausalLM",
        unsaid=_lengths(102400, 32, 2048),
    ),
    "gemma3_text": Decoder(
        "Gemma3ForCausalLM", unsaid={**_GEMMA, "vocab_size": 262208, "num_hidden_layers": 26}
    ),
    "gemma3n_text": Decoder(
        "Gemma3nForCausalLM",
        unsaid={**_lengths(262400, 35, 32768), "final_logit_softcapping": 30.0},
        capped_in="Gemma3nForConditionalGeneration",
    ),
    "gemma4_text": Decoder(
        "Gemma4ForCausalLM", unsaid=_GEMMA, capped_in="Gemma4ForConditionalGeneration"
    ),
    "gemma4_unified_text": Decoder(
        "Gemma4UnifiedForCausalLM",
        unsaid={**_GEMMA, "max_position_embeddings": 262144},
        capped_in="Gemma4UnifiedForConditionalGeneration",
    ),
    "glm4v_moe_text": Decoder(
        "Glm4MoeForCausalLM",
        "glm4_moe",
        unsaid=_sizes(
            *(151424, 4096, 10944, 46, 96), attention_bias=True, max_position_embeddings=65536
        ),
        fixed={"use_qk_norm": False},
    ),
    "glm4v_text": Decoder(
        "Glm4ForCausalLM",
        "glm4",
        unsaid=_GLM4,
        fixed={"attention_bias": True},
        splits_width=True,
    ),
    "glm_ocr_text": Decoder(
        "Glm4ForCausalLM",
        "glm4",
        unsaid=_sizes(
            *(59392, 1024, 4096, 16, 16),
            num_key_value_heads=8, max_position_embeddings=131072, rms_norm_eps=1e-5,
            partial_rotary_factor=1.0,
        ),
        fixed={"attention_bias": False},
        derives_width=True,
    ),
    "gpt_oss": Decoder(
        "GptOssForCausalLM",
        unsaid=_lengths(201088, 36, 131072),
    ),
    "granite": Decoder("GraniteForCausalLM", unsaid=_LLAMA, fixed=_UNSCALED),
    "granite4_vision_text": Decoder("GraniteForCausalLM", "granite", unsaid=_LLAMA),
    "granite_docling_text": Decoder(
        "GraniteForCausalLM",
        "granite",
        unsaid=_sizes(
            *(133800, 1024, 2048, 28, 16),
            num_key_value_heads=4, max_position_embeddings=32768, rms_norm_eps=1e-5,
            attention_multiplier=0.015625, embedding_multiplier=12.0, logits_scaling=4.0,
            residual_multiplier=0.263,
        ),
    ),
    "hunyuan_vl_text": Decoder(
        "HunYuanVLForCausalLM",
        unsaid=_lengths(290943, 32, 2048),
        has_sections=True,
    ),
    "hyperclovax": Decoder(
        "HyperCLOVAXForCausalLM", unsaid={**_LLAMA, "max_position_embeddings": 2048}
    ),
    "lfm2": Decoder(
        "Lfm2ForCausalLM",
        unsaid=_lengths(65536, 32, 128000),
    ),
    "lfm3": Decoder(
        "Lfm3ForCausalLM",
        unsaid=_lengths(128000, 24, 128000),
    ),
    "llama": Decoder("LlamaForCausalLM", unsaid=_LLAMA),
    "llama4_text": Decoder(
        "Llama4ForCausalLM",
        unsaid=_lengths(202048, 48, 131072),
    ),
    "ministral3": Decoder(
        "Ministral3ForCausalLM",
        unsaid=_lengths(131072, 34, 262144),
    ),
    "mistral": Decoder("MistralForCausalLM", unsaid={**_LLAMA, "intermediate_size": 14336}),
    "mistral4": Decoder(
        "Mistral4ForCausalLM",
        unsaid=_lengths(131072, 36, 1048576),
    ),
    "mllama_text_model": Decoder(
        "MllamaTextForCausalLM",
        unsaid=_sizes(
            *(128256, 4096, 14336, 40, 32),
            num_key_value_heads=8, max_position_embeddings=131072,
            cross_attention_layers=[3, 8, 13, 18, 23, 28, 33, 38],
        ),
    ),
    "muse_glimmer_text": Decoder(
        "MuseGlimmerForCausalLM",
        unsaid={**_lengths(202048, 52, 131072), "final_logit_softcapping": 20.0},
        capped_in="MuseGlimmerForConditionalGeneration",
    ),
    "paddleocr_vl_text": Decoder(
        "PaddleOCRForCausalLM",
        unsaid=_lengths(103424, 18, 131072),
        has_sections=True,
    ),
    "qwen2": Decoder("Qwen2ForCausalLM", unsaid=_QWEN3),
    "qwen2_5_omni_text": Decoder(
        "Qwen2ForCausalLM",
        "qwen2",
        unsaid=_sizes(
            *(152064, 3584, 18944, 28, 28),
            num_key_value_heads=4, rope_theta=1e6, max_window_layers=28,
        ),
    ),
    "qwen2_5_vl_text": Decoder("Qwen2ForCausalLM", "qwen2", unsaid=_QWEN2_VL),
    "qwen2_vl_text": Decoder("Qwen2ForCausalLM", "qwen2", unsaid=_QWEN2_VL),
    "qwen3": Decoder("Qwen3ForCausalLM", unsaid=_QWEN3),
    "qwen3_5_moe_text": Decoder(
        "Qwen3_5MoeForCausalLM",
        unsaid=_lengths(248320, 40, 32768),
    ),
    "qwen3_5_text": Decoder(
        "Qwen3_5ForCausalLM",
        unsaid=_lengths(248320, 32, 32768),
    ),
    "qwen3_moe": Decoder(
        "Qwen3MoeForCausalLM",
        unsaid=_lengths(151936, 24, 32768),
    ),
    "qwen3_omni_moe_text": Decoder(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        unsaid=_sizes(
            *(3584, 2048, 18944, 28, 28),
            max_position_embeddings=32768, norm_topk_prob=True, rope_theta=1e6,
        ),
        fixed=_NO_WINDOW,
    ),
    "qwen3_vl_moe_text": Decoder(
        "Qwen3MoeForCausalLM",
        "qwen3_moe",
        unsaid={
            **_QWEN3_MOE, "max_position_embeddings": 128000, "head_dim": 128, "num_experts": 60,
            "num_experts_per_tok": 4, "moe_intermediate_size": 1408, "rope_theta": 5e5,
        },
        fixed={"norm_topk_prob": True, **_NO_WINDOW},
    ),
    "qwen3_vl_text": Decoder(
        "Qwen3ForCausalLM",
        "qwen3",
        unsaid={**_QWEN3, "max_position_embeddings": 128000, "rope_theta": 5e5},
        fixed=_NO_WINDOW,
    ),
}  # fmt: skip
"""By the decoder's `model_type`. Those of another type than their class's differ from it in their
positions of images alone."""
