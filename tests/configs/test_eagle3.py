"""EAGLE-3 heads' config.json: both forms that are published, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.eagle3 import load_eagle3, parse_eagle3
from configs.architectures.rope import RopeType

SPECFORGE: dict[str, Any] = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 17, 32]},
    "hidden_act": "silu",
    "hidden_size": 2880,
    "head_dim": 64,
    "intermediate_size": 17280,
    "num_attention_heads": 64,
    "num_hidden_layers": 1,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-05,
    "rope_scaling": {"rope_type": "llama3", "factor": 8.0, "original_max_position_embeddings": 8192,
                     "low_freq_factor": 1.0, "high_freq_factor": 4.0},
    "rope_theta": 500000.0,
    "tie_word_embeddings": False,
    "vocab_size": 201088,
    "draft_vocab_size": 32000,
}  # fmt: skip

AUTHORS = {
    key: value
    for key, value in SPECFORGE.items()
    if key not in ("eagle_config", "head_dim", "rope_scaling")
} | {"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32}

SPECULATORS: dict[str, Any] = {
    "architectures": ["Eagle3Speculator"],
    "speculators_model_type": "eagle3",
    "draft_vocab_size": 64000,
    "norm_before_residual": True,
    "target_hidden_size": 5120,
    "eagle_aux_hidden_state_layer_ids": [2, 20, 37],
    "transformer_layer_config": {**AUTHORS, "rms_norm_eps": 1e-6, "draft_vocab_size": 1},
}


def test_both_forms_are_read() -> None:
    found = parse_eagle3(SPECFORGE, "there")
    assert (found.hidden_size, found.head_dim, found.num_kv_heads) == (2880, 64, 8)
    assert (found.rope.type, found.rope.theta) == (RopeType.LLAMA3, 500000.0)
    assert found.draft_vocab_size == 32000
    assert found.layers_of(36) == (1, 17, 32)
    found = parse_eagle3(AUTHORS, "there")
    assert (found.head_dim, found.norm_before_residual) == (128, False)
    assert found.layers_of(32) == (1, 15, 28), "what enters layers 2, 16 and 29"
    found = parse_eagle3(SPECULATORS, "there")
    assert found.draft_vocab_size == 64000
    assert (found.rms_norm_eps, found.norm_before_residual) == (1e-6, True)
    assert found.layers_of(40) == (1, 19, 36), "the layers that the states enter are named"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers 2 is not supported, only 1 is"),
        ({"eagle_config": {"use_mtp_layernorm": True}}, "use_mtp_layernorm True is not"),
        ({"fc_norm": True}, "fc_norm True is not supported"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rope type dynamic"),
        ({"hidden_size": None}, "hidden_size"),
        ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1.5]}}, "a list of layers"),
        ({"eagle_aux_hidden_state_layer_ids": "2", "eagle_config": {}}, "a list of layers"),
    ],
)
def test_what_would_change_guesses_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse_eagle3({**SPECFORGE, **changes}, "there")


def test_other_files_and_models_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArchitectureError, match="describes no EAGLE-3 heads"):
        parse_eagle3({"architectures": ["LlamaForCausalLM"]}, "there")
    with pytest.raises(ArchitectureError, match="cannot be read"):
        load_eagle3(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps([SPECFORGE]))
    with pytest.raises(ArchitectureError, match=r"config\.json must hold an object"):
        load_eagle3(tmp_path)
    with pytest.raises(ArchitectureError, match="layers 1, 17, 32, and the model has 32"):
        parse_eagle3(SPECFORGE, "there").layers_of(32)
