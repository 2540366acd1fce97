"""GPT-2's config.json to one spec: published sizes, defaults, and every refusal by its name."""

from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import Activation, ArchitectureError
from configs.architectures.gpt2 import GPT2Architecture
from configs.architectures.select import load_architecture, parse_architecture
from tests.checkpoints_others import GPT2_VARIANTS, write_gpt2

XL: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 1600,
    "n_head": 25,
    "n_layer": 48,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "vocab_size": 50257,
}


def parse(**changes: Any) -> GPT2Architecture:
    parsed = parse_architecture({**XL, **changes})
    assert isinstance(parsed, GPT2Architecture)
    return parsed


def test_reads_a_published_config() -> None:
    spec = parse()
    assert (spec.num_layers, spec.num_heads, spec.head_dim) == (48, 25, 64)
    assert (spec.hidden_size, spec.intermediate_size) == (1600, 6400)
    assert spec.tie_word_embeddings
    assert spec.scale_attn_weights
    assert not spec.scale_attn_by_inverse_layer_idx
    assert spec.activation is Activation.GELU_NEW
    assert spec.max_position_embeddings == 1024


def test_defaults_are_transformers_own() -> None:
    spec = parse_architecture({"architectures": ["GPT2LMHeadModel"]})
    assert isinstance(spec, GPT2Architecture)
    assert (spec.num_layers, spec.num_heads, spec.hidden_size) == (12, 12, 768)
    assert (spec.vocab_size, spec.max_position_embeddings) == (50257, 1024)
    assert spec.layer_norm_eps == 1e-5


def test_general_names_are_the_familys_own() -> None:
    spec = parse_architecture(
        {
            "architectures": ["GPT2LMHeadModel"],
            "hidden_size": 64,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "max_position_embeddings": 99,
        }
    )
    assert isinstance(spec, GPT2Architecture)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (64, 3, 4)
    assert spec.max_position_embeddings == 99


@pytest.mark.parametrize("variant", GPT2_VARIANTS)
def test_reads_what_transformers_writes(tmp_path: Path, variant: str) -> None:
    spec = load_architecture(write_gpt2(tmp_path, variant))
    assert isinstance(spec, GPT2Architecture)
    wanted = GPT2_VARIANTS[variant]
    assert spec.vocab_size == wanted.get("vocab_size", 96)
    assert spec.intermediate_size == (128 if variant == "inner" else 48)
    by_layer = wanted.get("scale_attn_by_inverse_layer_idx", False)
    assert spec.scale_attn_by_inverse_layer_idx == by_layer
    assert spec.scale_attn_weights == wanted.get("scale_attn_weights", True)
    assert spec.tie_word_embeddings == wanted.get("tie_word_embeddings", True)
    assert spec.activation == wanted.get("activation_function", "gelu_new")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"add_cross_attention": True}, "add_cross_attention is not supported"),
        ({"activation_function": "prelu"}, "activation_function 'prelu'"),
        ({"n_embd": None}, "does not give n_embd"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ArchitectureError, match="n_embd"):
        parse(n_head=24, n_embd=1601)
