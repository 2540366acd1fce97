"""Which config.json is paged by transformers' modules, and which is padded."""

import json
from math import inf
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from configs.architectures.padded import PaddedArchitecture
from configs.architectures.select import load_architecture, padded_reason, parse_architecture

GLM: dict[str, Any] = {
    "architectures": ["Glm4ForCausalLM"], "model_type": "glm4", "vocab_size": 96,
    "num_hidden_layers": 2, "max_position_embeddings": 128,
}  # fmt: skip
GRANITE = {
    **GLM,
    "architectures": ["GraniteMoeHybridForCausalLM"],
    "model_type": "granitemoehybrid",
}


@pytest.mark.parametrize(
    "config",
    [
        GLM,
        {**GLM, "auto_map": {"AutoModelForCausalLM": "modeling_glm4.Glm4ForCausalLM"}},
        {**GLM, "rope_scaling": {"type": "dynamic", "factor": 2.0}},
        {**GRANITE, "layer_types": ["attention", "attention"]},
        {**GRANITE, "layer_types": ["mamba", "attention"]},
        {**GLM, "architectures": ["LlamaForCausalLM"], "model_type": "exaone"},
    ],
    ids=[
        "plain",
        "code of its repository",
        "dynamic",
        "attention alone",
        "recurrent layers",
        "another",
    ],
)
def test_paged(config: dict[str, Any]) -> None:
    """Code of a repository is not run where transformers has the type, as there by itself."""
    assert isinstance(parse_architecture(config), GenericArchitecture)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**GLM, "rope_scaling": {"type": "longrope"}}, "rope_type longrope is not served paged"),
        (
            {**GLM, "rope_parameters": {"one": None, "other": {"rope_type": "longrope"}}},
            "rope_type longrope is not served paged",
        ),
        (
            {**GLM, "rope_parameters": {"one": {"rope_type": "longrope"}, "rope_type": "default"}},
            "rope_type longrope is not served paged",
        ),
        ({**GLM, "layer_types": ["mamba", "full_attention"]}, "layer_types mamba are not served"),
        ({**GLM, "model_type": "mine"}, "model_type mine is not among those with a paged"),
        ({**GLM, "max_position_embeddings": None}, "does not give max_position_embeddings"),
    ],
)
def test_padded(config: dict[str, Any], reason: str) -> None:
    found = parse_architecture(config)
    assert isinstance(found, PaddedArchitecture)
    assert reason in str(padded_reason(found))


BLOOM: dict[str, Any] = {
    "architectures": ["BloomForCausalLM"], "model_type": "bloom", "vocab_size": 250880,
    "n_embed": 1024, "n_layer": 24, "num_attention_heads": 16, "seq_length": 2048,
    "slow_but_exact": False, "pretraining_tp": 1,
}  # fmt: skip
FALCON: dict[str, Any] = {
    "architectures": ["FalconForCausalLM"], "model_type": "falcon", "vocab_size": 65024,
    "hidden_size": 4544, "num_hidden_layers": 32, "num_attention_heads": 71, "alibi": False,
    "multi_query": True, "new_decoder_architecture": False, "parallel_attn": True,
}  # fmt: skip
MPT: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"], "model_type": "mpt", "vocab_size": 50432,
    "d_model": 4096, "n_heads": 32, "n_layers": 32, "max_seq_len": 65536, "no_bias": True,
    "learned_pos_emb": True, "logit_scale": None, "norm_type": "low_precision_layernorm",
    "attn_config": {"alibi": True, "alibi_bias_max": 8, "attn_impl": "torch", "clip_qkv": 6,
                    "prefix_lm": False, "qk_ln": False, "attn_uses_sequence_id": False},
    "auto_map": {"AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM"},
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "length", "stretches"),
    [(BLOOM, 2048, True), (FALCON, 2048, False), (MPT, 65536, False)],
    ids=["bloom", "falcon", "mpt"],
)
def test_lengths_of_published_files(config: dict[str, Any], length: int, stretches: bool) -> None:
    """Falcon's does not say its own, and BLOOM has none."""
    found = parse_architecture(config)
    assert isinstance(found, GenericArchitecture)
    assert (found.max_total_tokens, found.stretches) == (length, stretches)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({**FALCON, "alibi": True}, "alibi: transformers rounds"),
        ({**BLOOM, "slow_but_exact": True, "pretraining_tp": 4}, "slow_but_exact"),
    ],
)
def test_settings_that_stay_padded(config: dict[str, Any], reason: str) -> None:
    found = parse_architecture(config)
    assert isinstance(found, PaddedArchitecture)
    assert reason in str(padded_reason(found))


def test_a_doge_with_experts_is_refused() -> None:
    """Its routers mix tokens, of other requests too."""
    fields = {"model_type": "doge", "architectures": ["DogeForCausalLM"], "vocab_size": 96}
    fields |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "is_moe": False}
    assert parse_architecture(fields).num_layers == 2
    with pytest.raises(ArchitectureError, match=r"is_moe: .* other requests"):
        parse_architecture({**fields, "is_moe": True})


def test_a_minimax_with_a_window_is_refused() -> None:
    fields = {"model_type": "minimax", "architectures": ["MiniMaxForCausalLM"], "vocab_size": 96}
    fields |= {"num_hidden_layers": 2, "max_position_embeddings": 64, "sliding_window": None}
    assert parse_architecture(fields).num_layers == 2
    with pytest.raises(ArchitectureError, match=r"sliding_window \(8\): .* MiniMax"):
        parse_architecture({**fields, "sliding_window": 8})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"no_bias": False}, r"no_bias \(False\): transformers does not read it"),
        ({"norm_type": "rmsnorm"}, "norm_type"),
        ({"logit_scale": "inv_sqrt_d_model"}, "logit_scale"),
        ({"attn_config": {"alibi": False}}, "alibi"),
        ({"attn_config": {"alibi_bias_max": 16}}, "alibi_bias_max"),
        ({"attn_config": {"qk_ln": True}}, "qk_ln"),
        ({"attn_config": {"prefix_lm": True}}, "prefix_lm"),
    ],
)
def test_an_mpt_that_transformers_takes_for_another(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse_architecture({**MPT, **changes})


def test_infinity_is_read_as_transformers_writes_it(tmp_path: Path) -> None:
    fields = {**GLM, "time_step_limit": [0.0, {"__float__": "Infinity"}]}
    (tmp_path / "config.json").write_text(json.dumps(fields), encoding="utf-8")
    spec = load_architecture(tmp_path)
    assert isinstance(spec, GenericArchitecture)
    assert spec.settings["time_step_limit"] == [0.0, inf]
