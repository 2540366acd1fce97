"""Tiny random decoders of any transformers type, every parameter random, and their adapters."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_padded import randomise_factors, randomise_scales
from tests.modeling.models.tiny_causal import write_tiny

VOCAB_SIZE = 96
LAYERS = 4
MIXED = ["sliding_attention", "full_attention"] * 2
LINEAR = ["linear_attention", "full_attention"] * 2
WINDOW = 9

SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 12,
    "linear_conv_kernel_dim": 4,
}

GENERIC: dict[str, dict[str, Any]] = {
    "apertus": {"head_dim": 4},
    "cohere": {"use_qk_norm": True, "logit_scale": 0.5},
    "cohere2": {"layer_types": MIXED, "sliding_window": WINDOW, "logit_scale": 0.5},
    "diffllama": {"head_dim": 8, "num_key_value_heads": 2},
    "dory": {
        "layer_types": MIXED,
        "sliding_window": WINDOW,
        "n_input_layers": 1,
        "n_output_layers": 1,
        "n_recurrent_loops": 3,
    },
    "exaone4": {"layer_types": MIXED, "sliding_window": WINDOW},
    "gemma": {},
    "gemma2": {"layer_types": MIXED, "sliding_window": WINDOW, "attn_logit_softcapping": 5.0},
    "gemma3_text": {"layer_types": MIXED, "sliding_window": WINDOW},
    "gemma4_text": {
        "layer_types": MIXED,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "num_kv_shared_layers": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "final_logit_softcapping": 5.0,
        "use_double_wide_mlp": True,
    },
    "gemma4_equal": {
        "model_type": "gemma4_text",
        "layer_types": MIXED,
        "sliding_window": WINDOW,
        "global_head_dim": 64,
        "num_global_key_value_heads": 1,
        "attention_k_eq_v": True,
        "hidden_size_per_layer_input": 0,
    },
    "gemma4_mixture": {
        "model_type": "gemma4_text",
        "layer_types": MIXED,
        "sliding_window": WINDOW,
        "global_head_dim": 32,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": VOCAB_SIZE,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "glm": {},
    "glm4": {},
    "granite_dense": {
        "model_type": "granitemoehybrid",
        "layer_types": ["attention"] * LAYERS,
        "num_local_experts": 0,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
        "tie_word_embeddings": True,
    },
    "granite_hybrid": {
        "model_type": "granitemoehybrid",
        "layer_types": ["mamba", "attention"] * 2,
        "num_local_experts": 4,
        "shared_intermediate_size": 48,
        "position_embedding_type": "rope",
        "mamba_n_heads": 4,
        "mamba_d_head": 16,
        "mamba_d_state": 8,
        "mamba_n_groups": 2,
        "mamba_chunk_size": 4,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.3,
    },
    "helium": {"head_dim": 8},
    "hrm_text": {"num_hidden_layers": 2, "L_cycles": 2, "num_key_value_heads": 4, "head_dim": 8},
    "hunyuan_stretched": {
        "model_type": "hunyuan_v1_dense",
        "rope_parameters": {
            "rope_type": "dynamic",
            "rope_theta": 1e4,
            "alpha": 1000.0,
            "factor": 1.0,
        },
    },
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2, "block_multiple_of": 8, "head_dim": 8},
    "jamba": {
        # Each kind of layer with experts, and with none.
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 3,
        "expert_layer_offset": 0,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "head_dim": 8,
    },
    "jamba_dense": {
        "model_type": "jamba",
        "attn_layer_period": 4,
        "attn_layer_offset": 2,
        "num_experts": 1,
        "mamba_d_state": 4,
        "mamba_d_conv": 3,
        "mamba_dt_rank": 5,
        "mamba_proj_bias": True,
        "mamba_conv_bias": False,
        "head_dim": 8,
    },
    "llama4_text": {
        "layer_types": ["chunked_attention", "full_attention"] * 2,
        "attention_chunk_size": 16,
        "no_rope_layers": [1, 0] * 2,
        "attn_temperature_tuning": True,
        "floor_scale": 4,
        "moe_layers": [1, 2],
        "num_local_experts": 4,
        "intermediate_size_mlp": 64,
    },
    "minimax": {
        "layer_types": LINEAR,
        "block_size": 4,
        "num_local_experts": 4,
        "full_attn_alpha_factor": 1.3,
        "full_attn_beta_factor": 0.8,
        "linear_attn_alpha_factor": 1.2,
        "linear_attn_beta_factor": 0.7,
        "mlp_alpha_factor": 0.9,
        "mlp_beta_factor": 1.1,
    },
    "ministral": {"layer_types": MIXED, "sliding_window": WINDOW},
    "ministral3": {},
    "nemotron": {"head_dim": 8},
    "olmo": {"clip_qkv": 2.0, "head_dim": 8},
    "olmo2": {"head_dim": 8},
    # A norm over all heads is a head's own where there is one, and what is clipped comes behind it.
    "olmoe_clipped": {
        "model_type": "olmoe",
        "clip_qkv": 0.5,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "olmo3": {"head_dim": 8, "layer_types": MIXED, "sliding_window": WINDOW},
    "phi": {"head_dim": 8},
    "qwen3_5_text": {**DELTA_NET, "layer_types": LINEAR},
    "qwen3_next": {
        **DELTA_NET,
        "layer_types": LINEAR,
        "num_experts": 4,
        # All of them: in bfloat16 rounding would choose others.
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 24,
        "shared_expert_intermediate_size": 24,
    },
    "seed_oss": {"attention_bias": True},
    "smollm3": {"no_rope_layers": [1, 0, 1, 0], "head_dim": 8},
    "six_experts": {
        "model_type": "qwen3_moe",
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "head_dim": 8,
        "num_hidden_layers": 2,
    },
    "zaya": {
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
        "sliding_window": WINDOW,
        "cca_time0": 3,
        "attention_bias": True,
        "num_experts": 4,
        "moe_intermediate_size": 24,
        "router_hidden_size": 16,
        "head_dim": 8,
    },
    "stablelm": {"use_parallel_residual": True, "qk_layernorm": True, "head_dim": 8},
    "gemma2_untied": {"model_type": "gemma2", "tie_word_embeddings": False},
    "cohere_untied": {"model_type": "cohere", "tie_word_embeddings": False},
    "starcoder2": {"sliding_window": WINDOW, "head_dim": 8},
}
"""What differs from SHAPE, by model_type: what makes a family's own code run."""

MAMBAS: dict[str, dict[str, Any]] = {
    "mamba": {"state_size": 8},
    "mamba_biased": {
        "model_type": "mamba",
        "state_size": 4,
        "conv_kernel": 3,
        "time_step_rank": 5,
        "expand": 3,
        "use_bias": True,
        "use_conv_bias": False,
        "residual_in_fp32": False,
        "tie_word_embeddings": False,
    },
    "falcon_mamba": {"state_size": 8, "tie_word_embeddings": False},
    "mamba2": {
        "num_heads": 4,
        "head_dim": 16,
        "state_size": 8,
        "n_groups": 2,
        "chunk_size": 4,
        "use_bias": True,
    },
}
"""The same of models without attention, on whose out_proj PEFT takes no LoRA."""

SEEDS = {"dory": 1, "qwen3_next": 4}
"""Of types whose answers for seed 0 rounding could change."""


def write_generic(folder: Path, variant: str, **changes: Any) -> Path:
    """Write a tiny random model of a variant, or of any model_type, into `folder`.

    changes: of SHAPE, beside the variant's.
    """
    known = {**GENERIC, **MAMBAS}
    if variant not in known and not changes:
        return write_tiny(folder, variant)
    own = known.get(variant, {}) | changes
    model_type = own.get("model_type", variant)
    config = CONFIG_MAPPING[model_type](**{**SHAPE, **own})
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(SEEDS.get(variant, 0))
        model = auto.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            randomise(name, parameter)
        with torch.no_grad():
            randomise_scales(model)
        if config.tie_word_embeddings:
            model.tie_weights()
    model.save_pretrained(folder)
    return folder


def write_headless(folder: Path, variant: str) -> Path:
    """The same with tensors named as in a model without its head, but for the second layer's."""
    path = write_generic(folder, variant) / "model.safetensors"
    bare = {
        name if ".layers.1." in name else name.removeprefix("model."): tensor
        for name, tensor in load_file(path).items()
    }
    save_file(bare, path, metadata={"format": "pt"})
    return folder


@torch.no_grad()
def randomise(name: str, parameter: torch.nn.Parameter) -> None:
    """Norms vary around what they were made with, everything else (biases too) is of std 0.2."""
    if "norm" in name and name.endswith("weight"):
        parameter.add_(torch.empty_like(parameter).uniform_(-0.3, 0.3))
    elif not randomise_factors(name, parameter):
        parameter.normal_(std=0.2)


COLUMNS = (
    "q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "c_fc",
    "per_layer_input_gate", "per_layer_projection", "per_layer_model_projection", "input_linear",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "in_proj",
    "w1", "w3", "x_proj", "dt_proj", "qkv_proj", "output_gate", "v_proj_current", "v_proj_delayed",
)  # fmt: skip
ROWS = ("o_proj", "dense", "down_proj", "fc2", "c_proj", "output_linear", "out_proj", "w2")
"""Linear layers by all of the families' names; a family has some of them."""

GENERIC_ADAPTERS = {
    "r8": AdapterRecipe(r=8, alpha=16.0, target_modules=(*COLUMNS, *ROWS), seed=12, std=0.05),
    "columns": AdapterRecipe(r=5, target_modules=COLUMNS, std=0.1, seed=16),
    "rows": AdapterRecipe(r=6, target_modules=ROWS, std=0.1, seed=17),
    "patterns": AdapterRecipe(
        r=4, target_modules=(*COLUMNS, *ROWS), use_rslora=True, seed=18, std=0.05,
        layers_to_transform=[1, 3],
        extra={"rank_pattern": {"v_proj": 12}, "alpha_pattern": {"o_proj": 3}},
    ),
}  # fmt: skip

MIXER_ADAPTERS = {
    "r8": AdapterRecipe(
        r=8, alpha=16.0, seed=19, std=0.05,
        target_modules=(
            "q_proj", "k_proj", "v_proj", "o_proj", "in_proj", "in_proj_qkv", "in_proj_z",
            "in_proj_b", "in_proj_a", "in_proj_qkvz", "in_proj_ba", "a_proj", "b_proj", "f_proj",
            "g_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "x_proj", "dt_proj",
            "qkv_proj", "output_gate", "v_proj_current", "v_proj_delayed",
        ),
    ),
}  # fmt: skip
"""On what is before a feed-forward, so on no experts."""

MIXER_ENDS = {
    "r8": MIXER_ADAPTERS["r8"],
    "embedding": AdapterRecipe(
        r=4, target_modules=("in_proj", "x_proj", "embeddings"), seed=26, std=0.05,
        save_embeddings=False,
    ),
}  # fmt: skip
"""The same for servers whose adapters may change the embedding."""

INDEX = ("wq_b", "wk", "weights_proj")
"""Linear layers of an index of positions."""

INDEX_ADAPTERS = {
    "r8": AdapterRecipe(
        r=8, alpha=16.0, seed=20, std=0.1,
        target_modules=(
            *INDEX, "q_a_proj", "q_b_proj", "q_gate_proj", "kv_a_proj_with_mqa", "kv_b_proj",
            "o_proj",
        ),
    ),
    # It moves all logits a little, and many choices.
    "index": AdapterRecipe(r=6, target_modules=(*INDEX, "o_proj"), std=0.3, seed=21),
}  # fmt: skip

MIXTURES = ("mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "glm4_moe", "granitemoe")
"""Types whose feed-forward is a mixture of experts."""

GENERIC_ENDS = {
    "everything": AdapterRecipe(
        r=4, target_modules=(*COLUMNS, *ROWS, "embed_tokens", "lm_head"), seed=23, std=0.05,
        save_embeddings=True,
    ),
    "whole": AdapterRecipe(
        r=4, target_modules=("q_proj", "o_proj"), seed=24,
        extra={"modules_to_save": ["embed_tokens", "lm_head"]},
    ),
    "whole_head": AdapterRecipe(
        r=4, target_modules=("down_proj",), seed=25, extra={"modules_to_save": ["lm_head"]}
    ),
}  # fmt: skip
"""For servers whose adapters may change embedding and head."""
