"""A checkpoint may bring scales of an fp8 cache; any other quantisation is refused by its name."""

from typing import Any

import pytest

from configs.architectures import padded
from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.select import parse_architecture

SCALES: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {},
    "format": "dense",
    "ignore": [],
    "kv_cache_scheme": {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": 8,
        "observer": "minmax",
        "strategy": "tensor",
        "symmetric": True,
        "type": "float",
    },
    "quantization_status": "compressed",
}

LLAMA: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}


def parse(quantization: dict[str, Any], name: str = "LlamaForCausalLM") -> ModelArchitecture:
    named = {"architectures": [name], "quantization_config": quantization}
    return parse_architecture({**LLAMA, **named})


def test_scales_alone_are_no_quantised_weights() -> None:
    assert parse(SCALES).quantisation is None
    scheme = SCALES["kv_cache_scheme"]
    alone = parse({"quant_method": "compressed-tensors", "kv_cache_scheme": scheme})
    assert alone.quantisation is None
    assert parse(SCALES, "GPT2LMHeadModel").quantisation is None


@pytest.mark.parametrize(
    "changes",
    [
        {"config_groups": {"group_0": {"weights": {"num_bits": 8}}}},
        {"sparsity_config": {"format": "dense"}},
        {"transform_config": {"config_groups": {"u": {}}}},
        {"kv_cache_scheme": None},
        *(
            {"kv_cache_scheme": {**SCALES["kv_cache_scheme"], key: value}}
            for key, value in [
                ("type", "int"),
                ("num_bits", 4),
                ("strategy", "attn_head"),
                ("symmetric", False),
                ("dynamic", True),
            ]
        ),
    ],
)
def test_anything_else_is(changes: dict[str, Any]) -> None:
    with pytest.raises(ArchitectureError, match=r"quantization_config \(compressed-tensors\)"):
        parse({**SCALES, **changes})


def test_transformers_own_code_would_want_more_than_scales() -> None:
    with pytest.raises(ArchitectureError, match=r"quantization_config \(compressed-tensors\)"):
        padded.parse("GPTJForCausalLM", {**LLAMA, "quantization_config": SCALES})
