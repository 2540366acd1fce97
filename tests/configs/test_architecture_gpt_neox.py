"""GPT-NeoX's config.json to one spec: published sizes, both rope layouts, every refusal."""

from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import Activation, ArchitectureError
from configs.architectures.gpt_neox import GPTNeoXArchitecture
from configs.architectures.rope import Rope, RopeType
from configs.architectures.select import load_architecture, parse_architecture
from tests.checkpoints_others import GPT_NEOX_VARIANTS, write_gpt_neox

PUBLISHED: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "initializer_range": 0.02,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "use_cache": True,
    "use_parallel_residual": True,
}

SIZES = {
    # hidden_size, num_hidden_layers, num_attention_heads, intermediate_size, vocab_size
    "pythia-70m": (512, 6, 8, 2048, 50304),
    "pythia-160m": (768, 12, 12, 3072, 50304),
    "pythia-1.4b": (2048, 24, 16, 8192, 50304),
    "pythia-2.8b": (2560, 32, 32, 10240, 50304),
    "pythia-6.9b": (4096, 32, 32, 16384, 50432),
    "pythia-12b": (5120, 36, 40, 20480, 50688),
    "gpt-neox-20b": (6144, 44, 64, 24576, 50432),
}
HEAD_DIMS = {"pythia-1.4b": 128, "pythia-2.8b": 80, "pythia-6.9b": 128, "pythia-12b": 128}


def parse(**changes: Any) -> GPTNeoXArchitecture:
    parsed = parse_architecture({**PUBLISHED, "hidden_size": 512, **changes})
    assert isinstance(parsed, GPTNeoXArchitecture)
    return parsed


@pytest.mark.parametrize("size", SIZES)
def test_published_sizes(size: str) -> None:
    hidden, layers, heads, inner, vocabulary = SIZES[size]
    spec = parse(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        intermediate_size=inner,
        vocab_size=vocabulary,
    )
    assert (spec.num_layers, spec.num_heads, spec.intermediate_size) == (layers, heads, inner)
    assert spec.head_dim == HEAD_DIMS.get(size, 96 if size == "gpt-neox-20b" else 64)
    assert spec.rope.width(spec.head_dim) == spec.head_dim // 4
    assert spec.parallel_residual
    assert spec.attention_bias
    assert not spec.tie_word_embeddings
    assert spec.hidden_act is Activation.GELU


def test_defaults_are_transformers_own() -> None:
    spec = parse_architecture({"architectures": ["GPTNeoXForCausalLM"]})
    assert isinstance(spec, GPTNeoXArchitecture)
    assert (spec.hidden_size, spec.num_layers, spec.num_heads) == (6144, 44, 64)
    assert (spec.vocab_size, spec.max_position_embeddings) == (50432, 2048)
    assert spec.rope == Rope(fraction=0.25)


def test_both_rope_layouts() -> None:
    old = parse(rotary_pct=0.5, rotary_emb_base=500)
    assert old.rope == Rope(theta=500, fraction=0.5)
    new = {"rope_type": "default", "rope_theta": 500, "partial_rotary_factor": 0.5}
    assert parse(rope_parameters=new, rotary_pct=None, rotary_emb_base=None).rope == old.rope
    scaled = parse(rope_scaling={"type": "linear", "factor": 4.0})
    assert scaled.rope == Rope(type=RopeType.LINEAR, factor=4.0, fraction=0.25)


def test_dynamic_rope_sets_a_limit_that_an_operator_may_move() -> None:
    spec = parse(rope_scaling={"type": "dynamic", "factor": 2.0})
    assert not spec.stretches
    assert spec.with_rope_length(4096).max_total_tokens == 4096


def test_rotation_sets_no_limit_of_its_own() -> None:
    assert parse().stretches
    assert parse(rope_scaling={"type": "linear", "factor": 2.0}).stretches
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 512}
    assert not parse(rope_scaling=yarn).stretches


@pytest.mark.parametrize("variant", GPT_NEOX_VARIANTS)
def test_reads_what_transformers_writes(tmp_path: Path, variant: str) -> None:
    spec = load_architecture(write_gpt_neox(tmp_path, variant))
    assert isinstance(spec, GPTNeoXArchitecture)
    wanted = GPT_NEOX_VARIANTS[variant]
    assert spec.rope.fraction == wanted.get("rotary_pct", 0.25)
    assert spec.rope.theta == wanted.get("rotary_emb_base", 10000.0)
    assert spec.parallel_residual == wanted.get("use_parallel_residual", True)
    assert spec.attention_bias == wanted.get("attention_bias", True)
    assert spec.tie_word_embeddings == wanted.get("tie_word_embeddings", False)
    assert spec.hidden_act == wanted.get("hidden_act", "gelu")


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_act": "prelu"}, "hidden_act 'prelu'"),
        ({"rope_scaling": {"type": "other", "factor": 2.0}}, "rope type 'other'"),
        ({"intermediate_size": None}, "does not give intermediate_size"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 7}, "hidden_size"),
        ({"num_attention_heads": 8, "rotary_pct": 0.05}, "must be even, 3 of 64"),
    ],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)
