"""Tiny random GPT-2, OPT and GPT-NeoX models, written by transformers itself."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.checkpoints import ROPE_BORDER, AdapterRecipe, DTypeName

SIZES: dict[str, Any] = {"vocab_size": 96, "bos_token_id": 1, "eos_token_id": 2}

GPT2: dict[str, Any] = {
    **SIZES,
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_inner": 48,
    "n_positions": 256,
}

GPT2_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "inner": {"n_inner": None},
    "odd_vocab": {"vocab_size": 97},
    "by_layer": {"n_layer": 3, "scale_attn_by_inverse_layer_idx": True},
    "upcast": {
        "n_layer": 3,
        "scale_attn_by_inverse_layer_idx": True,
        "reorder_and_upcast_attn": True,
        "activation_function": "gelu",
    },
    "unscaled": {"scale_attn_weights": False, "activation_function": "quick_gelu"},
    "untied": {"tie_word_embeddings": False, "activation_function": "relu"},
    "bare_names": {"vocab_size": 99},
    "head_64": {"n_embd": 256, "n_layer": 3, "scale_attn_by_inverse_layer_idx": True},
}
"""GPT-2 variants by name: what each changes of GPT2. bare_names: h.0... for transformer.h.0..."""

OPT: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "ffn_dim": 48,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "word_embed_proj_dim": 32,
    "pad_token_id": 1,
}

OPT_VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "post_norm": {"do_layer_norm_before": False, "word_embed_proj_dim": 24},
    "projected": {"word_embed_proj_dim": 24, "vocab_size": 97},
    "no_bias": {"enable_bias": False, "activation_function": "gelu"},
    "plain_norms": {"layer_norm_elementwise_affine": False},
    "no_last_norm": {"_remove_final_layer_norm": True},
    "untied": {"tie_word_embeddings": False},
    "bare_names": {"vocab_size": 99},
    "head_64": {"hidden_size": 256, "word_embed_proj_dim": 256},
}
"""OPT variants by name: what each changes of OPT. bare_names: decoder... for model.decoder..."""

GPT_NEOX: dict[str, Any] = {
    **SIZES,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 48,
    "max_position_embeddings": 256,
    "rotary_pct": 0.25,
}

GPT_NEOX_VARIANTS: dict[str, dict[str, Any]] = {
    "parallel": {},
    "sequential": {"use_parallel_residual": False, "hidden_act": "gelu_new"},
    "whole_rotary": {"rotary_pct": 1.0, "rotary_emb_base": 5000.0, "hidden_size": 32},
    "half_rotary": {"rotary_pct": 0.5, "hidden_act": "gelu_fast"},
    "linear_rope": {
        "rope_scaling": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
    },
    "longrope": {
        "max_position_embeddings": 128,
        "rotary_pct": 0.5,
        "rope_scaling": {
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0, 1.1, 1.3, 1.4],
            "long_factor": [1.2, 2.5, 4.0, 6.0],
            "original_max_position_embeddings": ROPE_BORDER,
        },
    },
    "dynamic": {
        "max_position_embeddings": 64,
        "rope_scaling": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    },
    "tied": {"tie_word_embeddings": True, "vocab_size": 97},
    "no_bias": {"attention_bias": False, "vocab_size": 99},
    "head_64": {"hidden_size": 256},
    "head_80": {"hidden_size": 320},
}
"""GPT-NeoX variants by name: what each changes of GPT_NEOX."""


def adapters(columns: list[str], rows: list[str], **extra: Any) -> dict[str, AdapterRecipe]:
    """Adapters for a family, given its column- and row-parallel modules by PEFT's names.

    extra: further keywords for LoraConfig.
    """
    every = [*columns, *rows]

    def recipe(seed: int, r: int, modules: list[str], **fields: Any) -> AdapterRecipe:
        # The wider the rank, the smaller its entries: the logits move about as much.
        std = 0.2 * r**-0.5
        return AdapterRecipe(
            **{"r": r, "alpha": 2.0 * r, "target_modules": modules, "seed": seed, "std": std}
            | {"extra": extra}
            | fields
        )

    return {
        "r1": recipe(21, 1, every),
        "r4": recipe(22, 4, every),
        "r8": recipe(23, 8, every, use_rslora=True, alpha=6.0),
        "r16": recipe(24, 16, every),
        "r64": recipe(25, 64, every),
        "last_layer": recipe(26, 4, every, layers_to_transform=[1], std=0.2),
        "columns": recipe(27, 5, columns, std=0.2),
        "rows": recipe(28, 6, rows, std=0.2),
    }


GPT2_ADAPTERS = adapters(["c_attn", "c_fc"], ["attn.c_proj", "mlp.c_proj"], fan_in_fan_out=True)
OPT_ADAPTERS = adapters(["q_proj", "k_proj", "v_proj", "fc1"], ["out_proj", "fc2"])
GPT_NEOX_ADAPTERS = adapters(["query_key_value", "dense_h_to_4h"], ["dense", "dense_4h_to_h"])


def ends(layers: list[str], embedding: str, head: str, **extra: Any) -> dict[str, AdapterRecipe]:
    """Adapters that change a vocabulary's ends: factors there, or whole matrices in their stead.

    layers: some modules of the layers. extra: further keywords for LoraConfig.
    """
    both = [embedding, head]

    def recipe(seed: int, modules: list[str], **fields: Any) -> AdapterRecipe:
        more = {**extra, **fields}
        return AdapterRecipe(
            r=6, target_modules=modules, seed=seed, extra=more, save_embeddings=False
        )

    whole_both = recipe(47, layers[:1], modules_to_save=both)
    return {
        "layers": recipe(41, layers),
        "head": recipe(42, [head]),
        "embedding": recipe(43, [embedding]),
        "everything": recipe(44, [*layers, *both]),
        "whole_head": recipe(45, layers, modules_to_save=[head]),
        "whole_embedding": recipe(46, layers, modules_to_save=[embedding]),
        "whole_both": replace(whole_both, save_embeddings=True),
        "whole_and_factors": recipe(48, [*layers, embedding], modules_to_save=[head]),
        "whole_as_one": recipe(49, layers, modules_to_save=both, ensure_weight_tying=True),
        "factors_as_one": recipe(50, both, ensure_weight_tying=True),
    }


LLAMA_ENDS = ends(["q_proj", "down_proj"], "embed_tokens", "lm_head")
GPT2_ENDS = ends(["c_attn", "mlp.c_proj"], "wte", "lm_head", fan_in_fan_out=True)
OPT_ENDS = ends(["q_proj", "fc2"], "embed_tokens", "lm_head") | {
    "between": AdapterRecipe(target_modules=["project_in", "project_out", "fc1"], seed=51)
}
GPT_NEOX_ENDS = ends(["query_key_value", "dense_4h_to_h"], "embed_in", "lm_head")


def write_gpt2(
    folder: Path, variant: str = "plain", *, dtype: DTypeName = "float32", **changes: Any
) -> Path:
    """Write a tiny random GPT-2 into `folder` and return it."""
    config = transformers.GPT2Config(**{**GPT2, **GPT2_VARIANTS[variant], **changes})
    _write(folder, transformers.GPT2LMHeadModel(config), dtype)
    if variant == "bare_names":
        _rename(folder, "transformer.")
    return folder


def write_opt(
    folder: Path, variant: str = "plain", *, dtype: DTypeName = "float32", **changes: Any
) -> Path:
    """Write a tiny random OPT into `folder` and return it."""
    config = transformers.OPTConfig(**{**OPT, **OPT_VARIANTS[variant], **changes})
    _write(folder, transformers.OPTForCausalLM(config), dtype)
    if variant == "bare_names":
        _rename(folder, "model.")
    return folder


def write_gpt_neox(
    folder: Path, variant: str = "parallel", *, dtype: DTypeName = "float32", **changes: Any
) -> Path:
    """Write a tiny random GPT-NeoX into `folder` and return it."""
    config = transformers.GPTNeoXConfig(**{**GPT_NEOX, **GPT_NEOX_VARIANTS[variant], **changes})
    _write(folder, transformers.GPTNeoXForCausalLM(config), dtype)
    return folder


def _write(folder: Path, model: Any, dtype: DTypeName) -> None:
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            _randomise(name, parameter, generator)
    model.tie_weights()
    model.to(getattr(torch, dtype)).save_pretrained(folder)


def _randomise(name: str, parameter: torch.nn.Parameter, generator: torch.Generator) -> None:
    """Norms near one, all else (biases too) of std 0.2: tokens are won by comfortable margins.

    Where the inputs are many, less: float32 sums must stay exact to 1e-4.
    """
    if name.endswith("weight") and ("norm" in name or ".ln_" in name):
        parameter.uniform_(0.7, 1.3, generator=generator)
    else:
        std = 0.2 * min(1.0, (64 / parameter.shape[-1]) ** 0.5)
        parameter.normal_(std=std, generator=generator)


def _rename(folder: Path, prefix: str) -> None:
    """Take a prefix from all names, as in a checkpoint of the decoder alone."""
    tensors = load_file(folder / "model.safetensors")
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
