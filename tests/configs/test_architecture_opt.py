"""OPT's config.json to one spec: published sizes, defaults, and every refusal by its name."""

from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import Activation, ArchitectureError
from configs.architectures.opt import OPTArchitecture
from configs.architectures.select import load_architecture, parse_architecture
from tests.checkpoints_others import OPT_VARIANTS, write_opt

PUBLISHED: dict[str, Any] = {
    "_remove_final_layer_norm": False,
    "activation_dropout": 0.0,
    "activation_function": "relu",
    "architectures": ["OPTForCausalLM"],
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "do_layer_norm_before": True,
    "dropout": 0.1,
    "eos_token_id": 2,
    "init_std": 0.02,
    "layerdrop": 0.0,
    "max_position_embeddings": 2048,
    "model_type": "opt",
    "pad_token_id": 1,
    "prefix": "</s>",
    "torch_dtype": "float16",
    "use_cache": True,
    "vocab_size": 50272,
}

SIZES = {
    # hidden_size, num_hidden_layers, num_attention_heads, word_embed_proj_dim
    "125m": (768, 12, 12, 768),
    "350m": (1024, 24, 16, 512),
    "1.3b": (2048, 24, 32, 2048),
    "2.7b": (2560, 32, 32, 2560),
    "6.7b": (4096, 32, 32, 4096),
    "13b": (5120, 40, 40, 5120),
    "30b": (7168, 48, 56, 7168),
    "66b": (9216, 64, 72, 9216),
}


def parse(**changes: Any) -> OPTArchitecture:
    parsed = parse_architecture({**PUBLISHED, **changes})
    assert isinstance(parsed, OPTArchitecture)
    return parsed


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size: str) -> None:
    hidden, layers, heads, embedding = SIZES[size]
    before = size != "350m"
    spec = parse(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        word_embed_proj_dim=embedding,
        ffn_dim=4 * hidden,
        do_layer_norm_before=before,
    )
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (hidden, layers, heads)
    assert spec.embedding_size == embedding
    assert spec.intermediate_size == 4 * hidden
    assert spec.head_dim in (64, 80, 128)
    assert spec.norm_first == spec.last_norm == before
    assert spec.bias
    assert spec.affine_norms
    assert spec.tie_word_embeddings
    assert spec.checkpoint_dtype == "float16"


def test_defaults_are_transformers_own() -> None:
    spec = parse_architecture({"architectures": ["OPTForCausalLM"]})
    assert isinstance(spec, OPTArchitecture)
    assert (spec.hidden_size, spec.embedding_size, spec.intermediate_size) == (768, 768, 3072)
    assert (spec.vocab_size, spec.max_position_embeddings) == (50272, 2048)
    assert spec.activation is Activation.RELU
    assert spec.use_cache


@pytest.mark.parametrize("variant", OPT_VARIANTS)
def test_reads_what_transformers_writes(tmp_path: Path, variant: str) -> None:
    spec = load_architecture(write_opt(tmp_path, variant))
    assert isinstance(spec, OPTArchitecture)
    wanted = OPT_VARIANTS[variant]
    assert spec.vocab_size == wanted.get("vocab_size", 96)
    assert spec.embedding_size == wanted.get("word_embed_proj_dim", 32)
    assert spec.norm_first == wanted.get("do_layer_norm_before", True)
    assert spec.last_norm == (variant not in ("post_norm", "no_last_norm"))
    assert spec.bias == wanted.get("enable_bias", True)
    assert spec.affine_norms == wanted.get("layer_norm_elementwise_affine", True)
    assert spec.tie_word_embeddings == wanted.get("tie_word_embeddings", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"activation_function": "xielu"}, "activation_function 'xielu'"),
        ({"ffn_dim": None}, "does not give ffn_dim"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


def test_heads_that_do_not_fit() -> None:
    with pytest.raises(ArchitectureError, match="hidden_size"):
        parse(hidden_size=100, num_attention_heads=12)
