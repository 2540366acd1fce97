"""Tiny random decoders of types whose attention is code of their own in transformers."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_padded import randomise

SHAPE: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

OWN: dict[str, dict[str, Any]] = {
    "bloom": {},
    "bloom_uneven": {
        "model_type": "bloom",
        "hidden_size": 48,
        "num_attention_heads": 12,
        "apply_residual_connection_post_layernorm": True,
        "tie_word_embeddings": False,
    },
    "codegen": {"num_attention_heads": 8, "rotary_dim": 4, "n_positions": 512},
    "falcon": {},
    "falcon_eleven": {
        "model_type": "falcon",
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
        "num_ln_in_parallel_attn": 1,
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500042.0},
    },
    "falcon_groups": {
        "model_type": "falcon",
        "hidden_size": 64,
        "num_attention_heads": 8,
        "new_decoder_architecture": True,
        "num_kv_heads": 2,
    },
    "falcon_serial": {
        "model_type": "falcon",
        "multi_query": False,
        "parallel_attn": False,
        "bias": True,
    },
    "gpt_neo": {"attention_types": [[["global", "local"], 2]], "window_size": 9},
    "gpt_neox_japanese": {"intermediate_multiple_size": 2},
    "gptj": {"rotary_dim": 4, "n_positions": 512},
    "mpt": {"max_seq_len": 512},
    "mpt_bounded": {
        "model_type": "mpt",
        "hidden_size": 48,
        "num_attention_heads": 12,
        "max_seq_len": 512,
        "attn_config": {"clip_qkv": 1.5, "softmax_scale": 0.3},
    },
    "xglm": {"ffn_dim": 48},
}
"""What differs from SHAPE, by model_type or a name of a variant."""

COLUMNS = (
    "query_key_value", "qkv_proj", "Wqkv", "q_proj", "k_proj", "v_proj", "dense_h_to_4h", "fc_in",
    "c_fc", "fc1", "up_proj",
)  # fmt: skip
ROWS = ("dense", "out_proj", "dense_4h_to_h", "fc_out", "c_proj", "fc2", "down_proj")
ENDS = ("word_embeddings", "wte", "embed_in", "embed_tokens", "lm_head", "embed_out")
HEADS = ("lm_head.weight", "embed_out.weight")

OWN_ADAPTERS = {
    "r8": AdapterRecipe(r=8, alpha=16.0, target_modules=(*COLUMNS, *ROWS), seed=12, std=0.05),
    "columns": AdapterRecipe(r=5, target_modules=COLUMNS, std=0.1, seed=16),
    "rows": AdapterRecipe(r=6, target_modules=ROWS, std=0.1, seed=17),
    "dora": AdapterRecipe(
        r=4, target_modules=(*COLUMNS, *ROWS), seed=18, std=0.05, extra={"use_dora": True}
    ),
    "everything": AdapterRecipe(
        r=4, target_modules=(*COLUMNS, *ROWS, *ENDS), seed=23, std=0.05, save_embeddings=True
    ),
}


def write_own(folder: Path, variant: str, **changes: Any) -> Path:
    """Write a tiny random model of a variant into `folder`; changes: of its config."""
    fields = {**SHAPE, **OWN[variant], **changes}
    config = CONFIG_MAPPING[fields.pop("model_type", variant)](**fields)
    auto: Any = AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            randomise(name, parameter, generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


def publish(model: Path, prefix: str, *more: str) -> None:
    """Name tensors as published files do, without `prefix`; more: what they hold besides."""
    path = model / "model.safetensors"
    tensors = load_file(path)
    embedding = next(name for name in tensors if name.partition(".")[2].startswith(ENDS))
    for name in more:
        tensors[name] = tensors[embedding].clone() if name in HEADS else torch.ones(1, 1, 8, 8)
    bare = {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}
    save_file(bare, path, metadata={"format": "pt"})
