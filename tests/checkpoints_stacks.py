"""Tiny random models that read images too, whose decoders are served for text."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import CONFIG_MAPPING, AutoModel, PreTrainedModel
from transformers.models.auto import modeling_auto
from transformers.models.gemma3n.configuration_gemma3n import Gemma3nVisionConfig

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import (
    COLUMNS,
    DELTA_NET,
    LINEAR,
    MIXED,
    ROWS,
    SHAPE,
    WINDOW,
    randomise,
)

IMAGE = 90
"""The token that an image takes the place of."""

_TEXT = {**SHAPE, "num_hidden_layers": 2}
_VISION = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "image_size": 28, "patch_size": 14,
}  # fmt: skip
_QWEN_VISION = {
    "depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "out_hidden_size": 32,
    "intermediate_size": 16,
}  # fmt: skip


def _rope(sections: list[int]) -> dict[str, Any]:
    """Rotary settings with pairs for time, height and width, of which text knows the first."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": sections}
    return {"rope_parameters": rope}


_AUDIO = {
    "num_mel_bins": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16,
    "hidden_size": 16, "max_source_positions": 8, "encoder_layers": 1, "encoder_ffn_dim": 16,
    "encoder_attention_heads": 2, "d_model": 16,
}  # fmt: skip
_SIGLIP = {**_VISION, "model_type": "siglip_vision_model"}
_SAM = {**_VISION, "output_channels": 8, "global_attn_indexes": [0], "mlp_dim": 16}
_COHERE = {
    **_TEXT, "model_type": "cohere2", "layer_types": MIXED[:2], "sliding_window": WINDOW,
    "logit_scale": 0.5,
}  # fmt: skip
_GEMMA3N = {
    **SHAPE, "layer_types": MIXED, "sliding_window": WINDOW, "num_kv_shared_layers": 2,
    "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0], "laurel_rank": 8,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64,
    "final_logit_softcapping": 5.0,
}  # fmt: skip
_CONFORMER = {
    "hidden_size": 16, "input_feat_size": 8, "conf_num_attention_heads": 2,
    "conf_num_hidden_layers": 1, "sscp_conv_channel_size": [4, 4],
}  # fmt: skip
_QWEN_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_GPT_OSS = {
    "num_local_experts": 4, "num_experts_per_tok": 2, "layer_types": MIXED[:2],
    "sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
}  # fmt: skip
_GLM_ROPE = {
    "rope_parameters": {**_rope([1, 1, 2])["rope_parameters"], "partial_rotary_factor": 0.5}
}

_OMNI = {
    "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
    "vision_config": _QWEN_VISION,
    "audio_config": {**_AUDIO, "output_dim": 32, "downsample_hidden_size": 8},
    "vision_start_token_id": 91,
    "audio_start_token_id": 92,
}
_OMNI_MOE = {
    **_OMNI,
    "text_config": {**_TEXT, **_rope([2, 3, 3]), **_QWEN_EXPERTS},
    "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
}

STACKS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "text_config": {**_TEXT, "layer_types": MIXED[:2], "sliding_window": WINDOW},
        "vision_config": _VISION,
    },
    "gemma3n": {
        "text_config": _GEMMA3N,
        "vision_config": {"hidden_size": 24, "vocab_size": 16, "vocab_offset": 64},
        "audio_config": {**_CONFORMER, "vocab_size": 16, "vocab_offset": 80},
    },
    "gemma3n_images": {
        "model_type": "gemma3n",
        "text_config": _GEMMA3N,
        "vision_config": {"hidden_size": 24, "vocab_size": 40, "vocab_offset": 64},
        "audio_config": {**_CONFORMER, "vocab_size": 16, "vocab_offset": 200},
    },
    "gemma3n_sound": {
        "model_type": "gemma3n",
        "text_config": _GEMMA3N,
        "vision_config": {"hidden_size": 24, "vocab_size": 8, "vocab_offset": 88},
        "audio_config": {**_CONFORMER, "vocab_size": 40, "vocab_offset": 60},
    },
    "gemma3n_published": {
        "model_type": "gemma3n",
        "text_config": {
            **_GEMMA3N, "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
            "final_logit_softcapping": 30.0,
        },
        "vision_config": {"hidden_size": 24},
        "audio_config": _CONFORMER,
    },
    "gemma4": {
        "text_config": {
            **_TEXT,
            "layer_types": MIXED[:2],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "hidden_size_per_layer_input": 8,
            "vocab_size_per_layer_input": 96,
            "final_logit_softcapping": 5.0,
        },
        "vision_config": _VISION,
        "audio_config": None,
    },
    "llama4": {
        "text_config": {
            **_TEXT,
            "layer_types": ["chunked_attention", "full_attention"],
            "attention_chunk_size": 16,
            "no_rope_layers": [1, 0],
            "moe_layers": [1],
            "num_local_experts": 4,
            "intermediate_size_mlp": 64,
            "floor_scale": 4,
        },
        "vision_config": _VISION,
    },
    "mistral3": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    # Towers of other kinds, which need no package more.
    "fast_vlm": {"text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
                 "vision_config": _SIGLIP},
    "perception_lm": {"text_config": {**_TEXT, "model_type": "llama"},
                      "vision_config": {**_SIGLIP, "model_args": {"embed_dim": 16}}},
    "qwen2_5_vl": {
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "qwen2_5_vl_flat": {
        "model_type": "qwen2_5_vl",
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "internvl": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "vipllava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "llava_next": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "llava_onevision": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "vision_config": {**_VISION, "model_type": "siglip_vision_model"},
    },
    "qwen2_vl": {
        "text_config": {**_TEXT, **_rope([1, 1, 2]), "head_dim": 8},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_5": {
        "text_config": {**_TEXT, **DELTA_NET, **_rope([1, 0, 1]), "layer_types": LINEAR[:2]},
        "vision_config": _QWEN_VISION,
    },
    "qwen3_5_moe": {
        "text_config": {
            **_TEXT,
            **DELTA_NET,
            **_rope([1, 0, 1]),
            "layer_types": LINEAR[:2],
            **_QWEN_EXPERTS,
            "shared_expert_intermediate_size": 24,
        },
        "vision_config": _QWEN_VISION,
    },
    "lfm2_vl": {
        "text_config": {
            **_TEXT,
            "model_type": "lfm2",
            "head_dim": 8,
            "layer_types": ["conv", "full_attention"],
            "block_multiple_of": 8,
        },
        "vision_config": {**_VISION, "model_type": "siglip2_vision_model", "num_patches": 4},
    },
    "qwen3_vl": {"text_config": {**_TEXT, **_rope([2, 3, 3])}, "vision_config": _QWEN_VISION},
    "ministral3": {
        "model_type": "mistral3",
        "text_config": {**_TEXT, "model_type": "ministral3"},
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "idefics3": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
    },
    "smolvlm": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "smolvlm_vision"},
    },
    "gemma4_unified": {
        "text_config": {
            **_TEXT,
            "layer_types": MIXED[:2],
            "sliding_window": WINDOW,
            "global_head_dim": 32,
            "final_logit_softcapping": 5.0,
        },
    },
    "internvl_qwen3_moe": {
        "model_type": "internvl",
        "text_config": {**_TEXT, "model_type": "qwen3_moe", **_QWEN_EXPERTS},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "internvl_gpt_oss": {
        "model_type": "internvl",
        "text_config": {**_TEXT, "model_type": "gpt_oss", **_GPT_OSS},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "aria": {
        "text_config": {
            **_TEXT, "moe_num_experts": 4, "moe_topk": 2, "moe_num_shared_experts": 1,
            "intermediate_size": 24,
        },
        "vision_config": {**_VISION, "model_type": "idefics3_vision"},
        "projector_patch_to_query_dict": {4: 2},
    },
    "audioflamingo3": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "audio_config": _AUDIO,
    },
    "aya_vision": {"text_config": _COHERE, "vision_config": _SIGLIP},
    "cohere2_vision": {
        "text_config": _COHERE, "vision_config": _SIGLIP, "alignment_intermediate_size": 16
    },
    "deepseek_vl": {
        "text_config": {**_TEXT, "model_type": "llama"}, "vision_config": _SIGLIP
    },
    "deepseek_vl_hybrid": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _SIGLIP,
        "high_res_vision_config": {**_SAM, "model_type": "sam_vision_model"},
    },
    "exaone4_5": {
        "text_config": {
            **_TEXT, "model_type": "exaone4", "layer_types": MIXED[:2], "sliding_window": WINDOW
        },
        "vision_config": {**_QWEN_VISION, "num_key_value_heads": 2},
    },
    "glm4v": {
        "text_config": {**_TEXT, **_GLM_ROPE, "num_attention_heads": 2},
        "vision_config": _QWEN_VISION,
    },
    "glm46v": {
        "text_config": {**_TEXT, **_GLM_ROPE, "num_attention_heads": 2, "model_type": "glm4v_text"},
        "vision_config": _QWEN_VISION,
    },
    "glm4v_moe": {
        "text_config": {
            **_TEXT, **_GLM_ROPE, "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "routed_scaling_factor": 1.5,
        },
        "vision_config": _QWEN_VISION,
    },
    "got_ocr2": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8}, "vision_config": _SAM
    },
    "granite4_vision": {
        "text_config": {**_TEXT, "head_dim": 8, "logits_scaling": 2.0},
        "vision_config": {**_VISION, "model_type": "clip_vision_model", "hidden_size": 64},
        "deepstack_layer_map": [[0, 0]], "downsample_rate": "1/2", "spatial_target_layers": [0],
    },
    "granite_docling": {
        "text_config": {**_TEXT, "head_dim": 8, "logits_scaling": 2.0},
        "vision_config": {**_VISION, "out_hidden_size": 32, "deepstack_visual_indexes": [0]},
    },
    "granite_vision": {
        "model_type": "llava_next",
        "text_config": {
            **_TEXT, "model_type": "granite", "head_dim": 8, "logits_scaling": 2.0,
            "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
        },
        "vision_config": _SIGLIP,
    },
    "hyperclovax_vision_v2": {
        "text_config": {**_TEXT, "model_type": "hyperclovax"}, "vision_config": _QWEN_VISION
    },
    "idefics2": {
        "text_config": {**_TEXT, "model_type": "mistral"},
        "vision_config": {**_VISION, "model_type": "idefics2_vision"},
        "perceiver_config": {
            "hidden_size": 32, "resampler_n_latents": 2, "resampler_depth": 1,
            "resampler_n_heads": 2, "resampler_head_dim": 8, "num_key_value_heads": 2,
        },
    },
    "janus": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": _VISION,
        "vq_config": {
            "num_embeddings": 16, "base_channels": 32, "channel_multiplier": [1],
            "num_res_blocks": 1, "projection_dim": 16, "image_token_embed_dim": 16,
        },
    },
    "kimi_k25": {
        "text_config": {
            **_TEXT, "model_type": "deepseek_v3", "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1,
            "q_lora_rank": 16, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8,
            "v_head_dim": 8, "num_key_value_heads": 4, "head_dim": 8,
        },
        "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        "projection_hidden_size": 16,
    },
    "lighton_ocr": {
        "text_config": {**_TEXT, "model_type": "qwen3"},
        "vision_config": {**_VISION, "model_type": "pixtral", "head_dim": 8},
    },
    "llava_next_video": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "ovis2": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8},
        "vision_config": {**_VISION, "vocab_size": 16},
        "vocab_size": 96, "hidden_size": 32, "visual_indicator_token_ids": [91, 92, 93, 94, 95],
    },
    "qwen2_audio": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8}, "audio_config": _AUDIO
    },
    "qwen2_5_omni_thinker": _OMNI,
    "qwen2_5_omni_whole": {**_OMNI, "model_type": "qwen2_5_omni_thinker"},
    "qwen3_omni_moe_thinker": _OMNI_MOE,
    "qwen3_omni_moe_whole": {**_OMNI_MOE, "model_type": "qwen3_omni_moe_thinker"},
    "qwen3_vl_moe": {
        "text_config": {**_TEXT, **_rope([2, 3, 3]), **_QWEN_EXPERTS},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
    },
    "qwen3_vl_moe_turned": {
        "model_type": "qwen3_vl_moe",
        "text_config": {**_TEXT, **_rope([2, 3, 3]), **_QWEN_EXPERTS},
        "vision_config": {**_QWEN_VISION, "deepstack_visual_indexes": []},
    },
    "video_llama_3": {
        "text_config": {**_TEXT, "model_type": "qwen2", "head_dim": 8}, "vision_config": _VISION
    },
    "video_llava": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "vision_config": {**_VISION, "model_type": "clip_vision_model"},
    },
    "voxtral": {
        "text_config": {**_TEXT, "model_type": "llama"},
        "audio_config": {**_AUDIO, "intermediate_size": 64},
    },
    "apertus1p5": {
        "text_config": _TEXT,
        "vision_config": {
            "codebook_size": 16, "embed_dim": 8, "latent_channels": 8, "base_channels": 32,
            "channel_multiplier": [1], "num_res_blocks": 1, "attn_resolutions": [],
            "resolution": 16,
        },
        "audio_config": {
            "num_filters": 4, "upsampling_ratios": [2], "num_lstm_layers": 1, "hidden_size": 16,
            "codebook_size": 16, "codebook_dim": 16, "decoder_hidden_size": 32,
            "decoder_intermediate_size": 16, "decoder_num_layers": 1,
        },
        "image_token_offset": 64, "audio_token_offset": 80,
    },
    "lfm3_vl": {
        "text_config": {
            **_TEXT, "model_type": "lfm3", "num_hidden_layers": 3, "head_dim": 8,
            "layer_types": ["conv", "full_attention", "sliding_attention"],
            "sliding_window": WINDOW, "conv_L_cache": 4,
        },
        "vision_config": {
            **_VISION, "num_key_value_heads": 2, "layer_types": ["full_attention"],
        },
        "projector_hidden_size": 16,
    },
    **{
        kind: {
            "text_config": {
                **_TEXT, **DELTA_NET, "model_type": "qwen3_5_text", "layer_types": LINEAR[:2],
                "rope_parameters": {
                    "rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25
                },
            },
            "vision_config": {**_VISION, "insert_layer_id": 0},
            "insert_layer_id": 0,
        }
        for kind in ("minicpm_ocr", "minicpmv4_6", "minicpmv4_7")
    },
    "cosmos3_omni": {
        "text_config": {**_TEXT, **_rope([2, 3, 3])}, "vision_config": _QWEN_VISION
    },
    "qianfan_ocr": {
        "text_config": {**_TEXT, "model_type": "qwen3"},
        "vision_config": {**_VISION, "image_size": [28, 28], "patch_size": [14, 14]},
    },
    "mistral4": {
        "model_type": "mistral3",
        "text_config": {
            **_TEXT, "model_type": "mistral4", "n_routed_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24, "first_k_dense_replace": 1, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 8,
            "num_key_value_heads": 4,
            "rope_parameters": {
                "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "beta_fast": 32.0,
                "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
                "original_max_position_embeddings": 16, "llama_4_scaling_beta": 0.5,
            },
        },
        "vision_config": {**_VISION, "model_type": "pixtral"},
    },
    "glm_ocr": {
        "text_config": {**_TEXT, **_rope([2, 3, 3]), "head_dim": 16},
        "vision_config": _QWEN_VISION,
    },
    "hunyuan_vl": {
        "text_config": {
            **_TEXT, "head_dim": 16,
            "rope_parameters": {
                "type": "xdrope", "rope_theta": 1e4, "factor": 1.0, "alpha": 8.0,
                "xdrope_section": [2, 2, 2, 2],
            },
        },
        "vision_config": {**_VISION, "out_hidden_size": 32, "text_hidden_size": 32},
    },
    "paddleocr_vl": {
        "text_config": {**_TEXT, **_rope([2, 3, 3]), "head_dim": 16}, "vision_config": _VISION
    },
    "mllama": {
        "text_config": {
            **_TEXT, "num_hidden_layers": 4, "cross_attention_layers": [1, 3], "head_dim": 8,
            "rope_parameters": {
                "rope_type": "llama3", "rope_theta": 1e4, "factor": 2.0,
                "original_max_position_embeddings": 16, "low_freq_factor": 1.0,
                "high_freq_factor": 32.0,
            },
        },
        "vision_config": {
            "hidden_size": 16, "attention_heads": 2, "intermediate_size": 16,
            "num_hidden_layers": 1, "num_global_layers": 1, "vision_output_dim": 32,
            "image_size": 28, "patch_size": 14, "max_num_tiles": 1,
            "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1]],
        },
    },
    "muse_glimmer": {
        "text_config": {
            **_TEXT, "head_dim": 16, "layer_types": MIXED[:2], "sliding_window": WINDOW,
            "layer_rope_theta": [1e4, 0], "final_logit_softcapping": 5.0,
        },
        "vision_config": {**_VISION, "pos_emb_height": 4, "pos_emb_width": 4},
        "projector_hidden_size": 16, "out_hidden_size": 64,
    },
    "cosmos3_edge": {
        "text_config": {
            **_TEXT, "head_dim": 16,
            "rope_parameters": {
                "rope_type": "default", "rope_theta": 1e4, "mrope_section": [2, 3, 3]
            },
        },
        "vision_config": {**_VISION, "num_patches": 4}, "projector_hidden_size": 16,
    },
    "emu3": {
        "text_config": {**_TEXT, "head_dim": 8},
        "vq_config": {
            "codebook_size": 16, "base_channels": 32, "channel_multiplier": [1],
            "num_res_blocks": 1, "attn_resolutions": [], "hidden_size": 32,
        },
        "vocabulary_map": {"<image>": 90},
    },
}  # fmt: skip
"""Fields of each kind's config."""


class Gemma3nTower(PreTrainedModel):  # type: ignore[no-untyped-call]
    """Stands where Gemma 3n has a tower of timm's, which no text goes through."""

    config_class = Gemma3nVisionConfig

    def __init__(self, config: Gemma3nVisionConfig) -> None:
        super().__init__(config)
        self.q_proj = nn.Linear(8, 8)
        self.post_init()  # type: ignore[no-untyped-call]


AutoModel.register(Gemma3nVisionConfig, Gemma3nTower, exist_ok=True)


def _need_tower(config: Any) -> None:
    """Skip a test where transformers takes no class of ours for a config of its own."""
    try:
        with torch.random.fork_rng(devices=[]):
            AutoModel.from_config(config)  # type: ignore[no-untyped-call]
    except ImportError:
        pytest.skip(f"transformers {transformers.__version__} has timm's tower alone")


_PLACEHOLDERS = tuple(
    f"{what}_token_{suffix}" for what in ("image", "audio", "video") for suffix in ("id", "index")
)
"""How their configs name what stands for images and sound."""


def class_of(kind: str) -> str:
    """The larger model's class of a `model_type`."""
    names: dict[str, str] = {
        **modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES,
        **modeling_auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }
    return names[kind]


def larger_model(stack: str) -> Any:
    """A tiny model of STACKS as transformers makes it."""
    config = larger_config(stack)
    made: Any = getattr(transformers, class_of(config.model_type))
    if config.model_type == "gemma3n":
        _need_tower(config.vision_config)
    return made(config)


def larger_config(stack: str, **changes: Any) -> Any:
    """The config of a tiny model of STACKS; changes: of its decoder's fields."""
    fields = dict(STACKS[stack])
    if changes:
        fields["text_config"] = {**fields["text_config"], **changes}
    kind = fields.pop("model_type", stack)
    return CONFIG_MAPPING[kind](**{**fields, **dict.fromkeys(_PLACEHOLDERS, IMAGE)})


def write_stack(folder: Path, variant: str) -> Path:
    """Write a tiny random model of a kind into `folder` and return it.

    A variant of STACKS with `_causal` behind it: config.json names the decoder's class.
    """
    stack = variant.removesuffix("_causal")
    kind = STACKS[stack].get("model_type", stack)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = larger_model(stack).float()
        for name, parameter in model.named_parameters():
            randomise(name, parameter)
        model.tie_weights()
    model.save_pretrained(folder, save_original_format=kind != "kimi_k25")
    if variant != stack:
        _name_decoder(folder / "config.json")
    if variant.endswith("_flat"):
        _flatten(folder / "config.json")
    if variant.endswith("_whole"):
        _enclose(folder)
    if variant.endswith("_turned"):
        _turn(folder / "model.safetensors")
    return folder


def _name_decoder(path: Path) -> None:
    """Name the decoder's class, as tools do that save it with the larger model's config."""
    text = path.read_text(encoding="utf-8")
    path.write_text(text.replace("ForConditionalGeneration", "ForCausalLM"), encoding="utf-8")


def _enclose(folder: Path) -> None:
    """Make a thinker the part of a whole model, as Qwen's Omni are published."""
    path = folder / "config.json"
    inner = json.loads(path.read_text(encoding="utf-8"))
    whole = {
        "architectures": [name.replace("Thinker", "") for name in inner["architectures"]],
        "model_type": inner["model_type"].removesuffix("_thinker"),
        "thinker_config": inner,
    }
    path.write_text(json.dumps(whole), encoding="utf-8")
    path = folder / "model.safetensors"
    named = {f"thinker.{name}": tensor for name, tensor in load_file(path).items()}
    save_file({**named, "talker.norm.weight": torch.ones(1)}, path, metadata={"format": "pt"})


def _turn(path: Path) -> None:
    """Transpose the experts' matrices, as Qwen published Qwen3-VL's."""
    tensors = load_file(path)
    turned = {
        name: tensor.transpose(1, 2).contiguous() if ".experts." in name else tensor
        for name, tensor in tensors.items()
    }
    assert any(".experts." in name for name in turned)
    save_file(turned, path, metadata={"format": "pt"})


def _flatten(path: Path) -> None:
    """Put the decoder's fields beside the others, and rope's as transformers 4 had them."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    text = fields.pop("text_config")
    rope = text.pop("rope_parameters")
    text["rope_theta"] = rope["rope_theta"]
    text["rope_scaling"] = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    path.write_text(json.dumps({**text, **fields}), encoding="utf-8")


LANGUAGE = rf".*(?:language|text)_model.*\.({'|'.join((*COLUMNS, *ROWS))})"

STACK_ADAPTERS = {
    "r8": AdapterRecipe(r=8, alpha=16.0, target_modules=LANGUAGE, seed=12, std=0.05),
    "everywhere": AdapterRecipe(
        r=8,
        alpha=16.0,
        target_modules=LANGUAGE.replace("(?:language|text)_model", ""),
        seed=12,
        std=0.05,
    ),
    "experts": EXPERT_ADAPTERS["parameters"],
    "tower": AdapterRecipe(target_modules=r".*vision_tower.*\.(q_proj|fc1)"),
    "images": AdapterRecipe(target_modules=r".*(cross_attn\.q_proj|layers\.3\.mlp\.up_proj)"),
}

_EVERY_LINEAR = (
    r".*language_model\.(?:.*\.)?(?:\w+_proj|\w+_coefs|modality_router|linear_\w+"
    r"|per_layer_input_gate|per_layer_(?:model_)?projection|altup_\w+\.\d)"
)

OUTER_ADAPTERS = {
    "all": AdapterRecipe(r=8, alpha=16.0, target_modules=_EVERY_LINEAR, seed=12, std=0.05),
    "ends": AdapterRecipe(
        r=4,
        target_modules=rf"{_EVERY_LINEAR}|.*language_model\.embed_tokens|lm_head",
        seed=23,
        std=0.05,
        save_embeddings=True,
    ),
    "tokens": AdapterRecipe(
        target_modules=r".*language_model.*q_proj",
        seed=24,
        extra={"trainable_token_indices": [5, 9, 66, 70, 82, 90, 95]},
    ),
    "whole": AdapterRecipe(
        target_modules=r".*language_model.*q_proj",
        seed=26,
        extra={"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "outer": AdapterRecipe(
        target_modules=r".*(?:embed_(?:vision|audio).*projection|language_model.*q_proj)", seed=27
    ),
}
"""For Gemma 3n. outer: changes the vectors of images' and sound's tokens, too."""
