"""Tiny random models of many families, written by transformers."""

from pathlib import Path
from typing import Any

import torch
import transformers

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_others import adapters

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": None,
}

WIDE: dict[str, Any] = {
    **SIZES,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}

SHORT: dict[str, Any] = {**SIZES, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 256}

CONFIGS: dict[str, tuple[type[transformers.PretrainedConfig], dict[str, Any]]] = {
    "bloom": (
        transformers.BloomConfig,
        {**SIZES, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "mpt": (
        transformers.MptConfig,
        {
            **SIZES,
            "d_model": 32,
            "n_layers": 2,
            "n_heads": 4,
            "max_seq_len": 256,
            "expansion_ratio": 2,
        },
    ),
    "falcon": (transformers.FalconConfig, {**WIDE, "new_decoder_architecture": True}),
    "falcon_alibi": (transformers.FalconConfig, {**WIDE, "alibi": True, "multi_query": False}),
    "gptj": (transformers.GPTJConfig, {**SHORT, "rotary_dim": 4, "n_inner": 48}),
    "stablelm": (
        transformers.StableLmConfig,
        {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2},
    ),
    "bert": (transformers.BertConfig, {**WIDE, "intermediate_size": 48, "is_decoder": True}),
    "diffllama": (
        transformers.DiffLlamaConfig,
        {**WIDE, "intermediate_size": 48, "num_key_value_heads": 2},
    ),
    "gpt_bigcode": (transformers.GPTBigCodeConfig, {**SHORT, "n_inner": 48}),
    "gemma2": (
        transformers.Gemma2Config,
        {
            **WIDE,
            "intermediate_size": 48,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "sliding_window": 8,
        },
    ),
}
"""Kinds of model by name. gemma2: every other layer sees eight tokens back. There is no
paged implementation of bert and falcon_alibi, which the padded code does not ask for."""

_NEOX_LIKE = adapters(["query_key_value", "dense_h_to_4h"], ["dense", "dense_4h_to_h"])
_LLAMA_LIKE = adapters(
    ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"], ["o_proj", "down_proj"]
)

ADAPTERS: dict[str, dict[str, AdapterRecipe]] = {
    "bloom": _NEOX_LIKE,
    "mpt": adapters(["Wqkv", "up_proj"], ["out_proj", "down_proj"]),
    "falcon": _NEOX_LIKE,
    "falcon_alibi": _NEOX_LIKE,
    "gptj": adapters(["q_proj", "k_proj", "v_proj", "fc_in"], ["out_proj", "fc_out"]),
    "stablelm": _LLAMA_LIKE,
    "bert": adapters(["query", "key", "value"], ["output.dense"]),
    "diffllama": _LLAMA_LIKE,
    "gpt_bigcode": adapters(["c_attn", "c_fc"], ["attn.c_proj", "mlp.c_proj"]),
    "gemma2": _LLAMA_LIKE,
}
"""Adapters of each kind, by the model's own module names."""


def write_padded(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a tiny random model of a kind into `folder` and return it."""
    config_class, fields = CONFIGS[kind]
    config = config_class(**{**fields, **changes})
    build: Any = transformers.AutoModelForCausalLM
    model = build.from_config(config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            randomise(name, parameter, generator)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


FACTORS = {
    **dict.fromkeys(("sqk", "s_gate", "suv_gate", "suv_up"), 1.0),
    **dict.fromkeys(("lambda_1", "lambda_2", "logit_scale"), 10.0),
}  # fmt: skip
"""What a Dory multiplies by: how many times what transformers begins with it is on average, so that
each layer counts and tokens are won by comfortable margins."""


def randomise_factors(
    name: str, parameter: torch.nn.Parameter, generator: torch.Generator | None = None
) -> bool:
    """Randomise one of FACTORS, around what it was made with; False for others."""
    factor = FACTORS.get(name.rpartition(".")[2])
    if factor is None:
        return False
    first = parameter.flatten()[0].item()
    parameter.uniform_(0.7, 1.3, generator=generator).mul_(factor * first)
    return True


def randomise(name: str, parameter: torch.nn.Parameter, generator: torch.Generator) -> None:
    """Norms near one, all else (biases too) of std 0.2: tokens are won by comfortable margins."""
    if name.endswith("weight") and ("norm" in name.lower() or ".ln_" in name):
        parameter.uniform_(0.7, 1.3, generator=generator)
    elif not randomise_factors(name, parameter, generator):
        parameter.normal_(std=0.2, generator=generator)


def randomise_scales(model: torch.nn.Module, generator: torch.Generator | None = None) -> None:
    """What scales a layer's result around one (Gemma 4), where transformers begins with one.

    And what makes ZAYA choose an expert, around what transformers sets for none.
    """
    for name, buffer in model.named_buffers():
        if name.endswith("layer_scalar"):
            buffer.uniform_(0.7, 1.3, generator=generator)
        if name.endswith("balancing_biases"):
            buffer.uniform_(-1.2, -0.8, generator=generator)
