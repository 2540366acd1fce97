"""config.json to one spec: both transformers layouts, and every refusal by its name."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from configs.architectures.base import Activation, ArchitectureError
from configs.architectures.llama import Architecture, Rope, RopeType
from configs.architectures.select import load_architecture, parse_architecture
from tests.checkpoints import VARIANTS, write_llama


def load(folder: Path) -> Architecture:
    loaded = load_architecture(folder)
    assert isinstance(loaded, Architecture)
    return loaded


LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 128256,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "bfloat16",
    "bos_token_id": 128000,
    "eos_token_id": [128001, 128008, 128009],
}

LLAMA3: dict[str, Any] = {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def parse(**changes: Any) -> Architecture:
    parsed = parse_architecture({**LLAMA, **changes})
    assert isinstance(parsed, Architecture)
    return parsed


def test_reads_the_layout_before_transformers_5() -> None:
    spec = parse(rope_theta=5e5, rope_scaling={"rope_type": "llama3", **LLAMA3})
    assert (spec.num_layers, spec.num_heads, spec.num_kv_heads, spec.head_dim) == (32, 32, 8, 128)
    assert spec.rope == Rope(type=RopeType.LLAMA3, theta=5e5, **LLAMA3)
    assert spec.eos_token_ids == (128001, 128008, 128009)
    assert spec.checkpoint_dtype == "bfloat16"
    assert spec.hidden_act is Activation.SILU


def test_reads_the_layout_of_transformers_5() -> None:
    inside = parse(rope_parameters={"rope_type": "llama3", "rope_theta": 5e5, **LLAMA3})
    assert inside.rope == Rope(type=RopeType.LLAMA3, theta=5e5, **LLAMA3)
    assert parse(rope_parameters={"rope_type": "default", "rope_theta": 3.0}).rope.theta == 3.0
    assert parse(dtype="float16", torch_dtype=None).checkpoint_dtype == "float16"


def test_old_linear_scaling_is_named_by_type() -> None:
    spec = parse(rope_scaling={"type": "linear", "factor": 4.0})
    assert spec.rope == Rope(type=RopeType.LINEAR, factor=4.0)


def test_defaults_are_transformers_own() -> None:
    spec = parse(num_key_value_heads=None, head_dim=None, eos_token_id=None)
    assert spec.num_kv_heads == 32
    assert spec.head_dim == 128
    assert spec.rope == Rope()
    assert spec.eos_token_ids == ()
    assert (spec.tie_word_embeddings, spec.attention_bias, spec.mlp_bias) == (False, False, False)
    assert parse(head_dim=64).head_dim == 64


@pytest.mark.parametrize("variant", VARIANTS)
def test_reads_what_transformers_writes(tmp_path: Path, variant: str) -> None:
    spec = load(write_llama(tmp_path, variant))
    wanted = VARIANTS[variant]
    assert spec.vocab_size == wanted.get("vocab_size", 96)
    assert spec.tie_word_embeddings == wanted.get("tie_word_embeddings", False)
    assert spec.attention_bias == spec.mlp_bias == wanted.get("mlp_bias", False)
    assert spec.rope.type == wanted.get("rope_parameters", {}).get("rope_type", "default")
    assert spec.checkpoint_dtype == "float32"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"architectures": ["BertModel"]},
            r"BertModel is not supported; known: .*LlamaForCausalLM",
        ),
        ({"architectures": None}, r"\(none named\) is not supported"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2.0}}, r"rope type 'yarn'.*llama3"),
        ({"rope_scaling": {"type": "linear"}}, "rope settings do not give factor"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor"),
        ({"rope_parameters": {"full_attention": {}}}, "rope settings full_attention"),
        ({"sliding_window": 4096}, r"sliding_window \(4096\)"),
        ({"quantization_config": {"quant_method": "gptq"}}, r"quantization_config \(gptq\)"),
        ({"hidden_act": "prelu"}, "hidden_act 'prelu'"),
        ({"vocab_size": None}, "does not give vocab_size"),
    ],
)
def test_refusals_name_the_key(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse(**changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [({"num_key_value_heads": 5}, "must be a multiple"), ({"head_dim": 7}, "must be even")],
)
def test_sizes_that_contradict_each_other(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        parse(**changes)


def test_mistral_is_the_same_family_without_a_window() -> None:
    spec = parse(architectures=["MistralForCausalLM"], sliding_window=None, num_key_value_heads=4)
    assert (spec.architecture, spec.num_kv_heads) == ("MistralForCausalLM", 4)
    with pytest.raises(ArchitectureError, match="sliding_window"):
        parse(architectures=["MistralForCausalLM"])  # transformers' default is 4096


def test_a_folder_without_config(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    assert load(tmp_path).vocab_size == 128256
