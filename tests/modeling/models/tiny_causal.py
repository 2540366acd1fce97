"""A tiny random model of any causal class that the installed transformers can build.

Windows and chunks are eight tokens and the frequencies of longrope change after ORIGINAL, so that
prompts of a few tokens lie on both sides of everything that looks at a length.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, PreTrainedConfig
from transformers.integrations.heterogeneity.configuration_utils import (
    AmbiguousGlobalPerLayerAttributeError,
)
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from tests.checkpoints_padded import randomise, randomise_scales

ORIGINAL = 16
"""Tokens up to which the short frequencies of longrope hold."""

VARIANTS = ("plain", "longrope", "dynamic", "wide")

MAX_PARAMETERS = 10_000_000
"""Models whose parts do not shrink (towers for images and sound) are left out."""

_WIDE = dict.fromkeys(
    ("hidden_size", "d_model", "n_embd", "embedding_size", "emb_dim", "dim_model"), 32
)
_INNER = dict.fromkeys(
    ("intermediate_size", "ffn_dim", "d_ff", "n_inner", "dff", "dim_ff", "decoder_ffn_dim",
     "encoder_ffn_dim"), 48
)  # fmt: skip
_DEEP = dict.fromkeys(
    ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers",
     "num_decoder_layers"), 2
)  # fmt: skip
_HEADS = dict.fromkeys(
    ("num_attention_heads", "n_head", "n_heads", "decoder_attention_heads",
     "encoder_attention_heads"), 4
)  # fmt: skip
_LENGTHS = dict.fromkeys(("max_position_embeddings", "n_positions", "max_seq_len", "n_ctx"), 256)
_EIGHT = dict.fromkeys(
    ("head_dim", "dim_head", "qk_rope_head_dim", "qk_nope_head_dim", "v_head_dim", "index_topk",
     "index_head_dim", "sliding_window", "attention_chunk_size", "keep_window_size", "floor_scale",
     "window_size"), 8
)  # fmt: skip
_EXPERTS = dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
_EXPERT = dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 24)

SMALL: dict[str, Any] = {
    **_WIDE, **_INNER, **_DEEP, **_HEADS, **_LENGTHS, **_EIGHT, **_EXPERTS, **_EXPERT,
    "vocab_size": 96, "encoder_layers": 1, "num_key_value_heads": 2, "num_experts_per_tok": 2,
    "kv_lora_rank": 16, "q_lora_rank": 16, "qk_head_dim": 16, "n_group": 1, "topk_group": 1,
    "first_k_dense_replace": 1, "rotary_dim": 4, "index_n_heads": 32, "residual_multiplier": 0.5,
}  # fmt: skip
"""Numbers by the names under which configs have them."""

WIDE: dict[str, int] = {
    **dict.fromkeys(_WIDE, 256), **dict.fromkeys(_INNER, 512), **dict.fromkeys(_EXPERT, 256),
    "head_dim": 64, "dim_head": 64, "global_head_dim": 128, "v_head_dim": 64, "rotary_dim": 32,
    "qk_rope_head_dim": 32, "qk_nope_head_dim": 64, "qk_head_dim": 96, "kv_lora_rank": 128,
    "q_lora_rank": 256, "index_head_dim": 64, "shared_intermediate_size": 512,
    "intermediate_size_mlp": 512, "moe_shared_expert_intermediate_size": 256, "mamba_d_head": 128,
    "mamba_d_ssm": 512,
}  # fmt: skip
"""What numbers become in the variant "wide": some kernels of GPUs take only such."""

ENDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}

DECODERS = ("bert", "big_bird", "electra", "megatron-bert", "rembert", "roberta", "roformer")
"""Families of encoders, some of which are swept as the decoders that they can be."""

LINEAR = ["linear_attention", "full_attention"]

_DELTA_NET = {
    "layer_types": LINEAR, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_key_head_dim": 8, "linear_value_head_dim": 12, "head_dim": 16,
}  # fmt: skip

_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8, "mamba_chunk_size": 8}

OWN: dict[str, dict[str, Any]] = {
    **{kind: {"is_decoder": True} for kind in DECODERS},
    "xmod": {"is_decoder": True, "languages": ["en"], "default_language": "en"},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {"num_experts_per_tok": 2, "topk_group": 1, "n_group": 1},
    **dict.fromkeys(("qwen3_5_text", "qwen3_next"), _DELTA_NET),
    # Every expert computes every token: in bfloat16 rounding would choose others.
    "qwen3_5_moe_text": {**_DELTA_NET, "num_experts_per_tok": 4},
    "lara_mini": {
        **_DELTA_NET, "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "sliding_attention", "full_attention"],
    },
    "olmo_hybrid": {**_DELTA_NET, "linear_num_key_heads": 4},
    "kimi_linear": {
        "layer_types": LINEAR, "mlp_layer_types": ["dense", "sparse"], "linear_head_dim": 8,
        "linear_num_heads": 4, "num_experts_per_token": 2,
    },
    **{kind: {"indexer_types": ["full", "shared"]} for kind in ("glm_moe_dsa", "hy_v4")},
    "bamba": {**_MAMBA, "attn_layer_indices": [1]},
    "falcon_h1": {
        **_MAMBA, "mamba_d_ssm": 64, "ssm_multipliers": [0.5, 1.5, 0.8, 1.2, 2.0],
        "key_multiplier": 0.7, "attention_out_multiplier": 1.3, "ssm_out_multiplier": 0.6,
    },
    "nemotron_h": {
        "layer_types": ["linear_attention", "moe", "full_attention", "mlp"], "head_dim": 8,
        "ssm_state_size": 8, "mamba_num_heads": 4, "mamba_head_dim": 16, "n_groups": 2,
        "moe_shared_expert_intermediate_size": 24, "num_hidden_layers": 4,
    },
    "lfm2": {"layer_types": ["conv", "full_attention"], "block_multiple_of": 8},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"], "num_dense_layers": 1},
    "gemma3n_text": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "laurel_rank": 8, "intermediate_size": 48, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
    },
    "gemma4_text": {
        "layer_types": ["sliding_attention", "full_attention"], "head_dim": 8,
        "global_head_dim": 16, "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96, "num_key_value_heads": 2,
    },
    "dbrx": {"attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8}},
    "ministral": {"head_dim": 8, "num_key_value_heads": 2},
    "hunyuan_v1_dense": {"head_dim": 8},
    "hunyuan_v1_moe": {"head_dim": 8},
    "nemotron": {"head_dim": 8, "num_key_value_heads": 2},
    "moshi": {"sliding_window": 24},
    "aria_text": {"intermediate_size": 44},
    "phimoe": {"sliding_window": 8},
    "qwen2_moe": {
        "use_sliding_window": True, "layer_types": ["sliding_attention", "full_attention"],
    },
    "granitemoehybrid": {
        **_MAMBA, "layer_types": ["mamba", "attention"], "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
    },
    "cohere_compass_text": {
        "layer_types": ["sliding_attention", "full_attention"], "logit_scale": 0.5,
        "rope_parameters": {
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
            "full_attention": None,
        },
    },
    "jamba": {
        "attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8,
    },
    "minimax": {"layer_types": LINEAR, "block_size": 4, "linear_attn_beta_factor": 0.7},
    "mamba2": {
        "num_heads": 4, "head_dim": 16, "state_size": 8, "n_groups": 2, "chunk_size": 8,
    },
    "laguna": {
        "num_attention_heads_per_layer": [4, 8],
        "layer_types": ["full_attention", "sliding_attention"],
    },
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid", "hybrid", "hybrid"],
        "num_hidden_layers": 4, "num_mem_blocks": 2, "adapter_rank": 4, "n_mamba_heads": 4,
        "mamba_d_state": 8, "mamba_ngroups": 2, "chunk_size": 8, "use_mem_rope": True,
        "use_shared_attention_adapter": True, "num_key_value_heads": 4, "head_dim": 16,
    },
    "dory": {
        "layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4,
        "n_input_layers": 1, "n_output_layers": 1, "n_recurrent_loops": 3,
    },
    "longcat_flash": {"zero_expert_num": 2},
    "zaya": {"num_experts_per_tok": 1},
    "llama4_text": {
        "attn_temperature_tuning": True, "no_rope_layers": [1, 0], "intermediate_size_mlp": 48,
        "layer_types": ["chunked_attention", "full_attention"],
    },
    "ministral3": {
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0,
            "mscale_all_dim": 1.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "original_max_position_embeddings": 8, "llama_4_scaling_beta": 0.1,
        },
    },
}  # fmt: skip
"""What single kinds want besides."""


def kinds() -> list[str]:
    """Every model type of the installed transformers that has a causal class."""
    return list(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def tiny_config(kind: str, variant: str = "plain", **changes: Any) -> PreTrainedConfig:
    """A small config of a kind; whatever its class raises when it cannot be small.

    variant: "longrope" and "dynamic" give it rotary frequencies of that type, "wide" has the
    numbers of WIDE. changes: of what kinds have.
    """
    config_class: Any = CONFIG_MAPPING[kind]
    usual = config_class()
    fields = {name: value for name, value in SMALL.items() if _is_number(usual, name)}
    if "kv_lora_rank" in fields and "num_key_value_heads" in fields:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    types = getattr(usual, "layer_types", None)
    named = (getattr(config_class, key, None) for key in ("layer_types", "layers_block_type"))
    has_own = "layers_block_type" in OWN.get(kind, {})
    if types and not has_own and not any(isinstance(each, property) for each in named):
        fields["layer_types"] = (list(dict.fromkeys(types)) * 2)[:2]
    fields = {**fields, **ENDS, **OWN.get(kind, {})}
    if variant == "wide":
        fields = {name: WIDE.get(name, value) for name, value in fields.items()}
    config: PreTrainedConfig = config_class(**{**fields, **changes})
    if variant not in ("plain", "wide"):
        config = _with_rope(config, variant)
    return config


def _is_number(config: PreTrainedConfig, name: str) -> bool:
    if isinstance(getattr(type(config), name, None), property):
        return False
    try:
        value = getattr(config, name, None)
    except AmbiguousGlobalPerLayerAttributeError:
        return False
    return isinstance(value, int | float) and not isinstance(value, bool)


def _with_rope(config: PreTrainedConfig, variant: str) -> PreTrainedConfig:
    """The same with other rotary frequencies; ValueError for a model that has none."""
    widths = set(_rotary_widths(build(config)))
    rope = getattr(config, "rope_parameters", None)
    if len(widths) != 1 or not rope or "rope_theta" not in rope:
        raise ValueError("it has no rotary frequencies, or several")
    (width,) = widths
    fields = {**rope, "rope_type": variant, "factor": 4.0}
    if variant == "dynamic":
        changes = {"rope_parameters": fields, "max_position_embeddings": 2 * ORIGINAL}
        return type(config)(**{**config.to_dict(), **changes})
    fields |= {
        "short_factor": [1.0 + 0.1 * i for i in range(width)],
        "long_factor": [1.5 + 1.5 * i for i in range(width)],
        "original_max_position_embeddings": ORIGINAL,
        "short_mscale": 1.1, "long_mscale": 1.4,
    }  # fmt: skip
    changes = {"rope_parameters": fields, "original_max_position_embeddings": ORIGINAL}
    return type(config)(**{**config.to_dict(), **changes})


def _rotary_widths(model: nn.Module) -> Iterator[int]:
    for module in model.modules():
        frequencies = getattr(module, "inv_freq", None)
        if isinstance(frequencies, torch.Tensor):
            yield len(frequencies)


def build(config: PreTrainedConfig) -> Any:
    """A model of a config with transformers' own random weights; ValueError for a large one."""
    auto: Any = transformers.AutoModelForCausalLM
    with torch.device("meta"):
        size = sum(parameter.numel() for parameter in auto.from_config(config).parameters())
    if size > MAX_PARAMETERS:
        raise ValueError(f"{size} parameters: it does not shrink")
    return auto.from_config(config, dtype=torch.float32)


def write_tiny(folder: Path, kind: str, variant: str = "plain") -> Path:
    """Write a tiny random model into `folder` and return it; raises what `tiny_config` does."""
    model = build(tiny_config(kind, variant))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            randomise(name, parameter, generator)
            if variant == "wide" and parameter.ndim > 1:
                parameter.mul_((SMALL["hidden_size"] / WIDE["hidden_size"]) ** 0.5)
        randomise_scales(model, generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder
