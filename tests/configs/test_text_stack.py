"""Decoders inside larger models: what their config.json says, and how their tensors are named."""

import json
from pathlib import Path
from typing import Any

import pytest

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from configs.architectures.llama import Architecture
from configs.architectures.select import end_token_ids, parse_architecture, vocab_size
from configs.architectures.text_stack import decoder_name, outer_paths

TEXT: dict[str, Any] = {
    "model_type": "mistral", "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
MISTRAL3: dict[str, Any] = {
    "architectures": ["Mistral3ForConditionalGeneration"], "model_type": "mistral3",
    "text_config": TEXT, "eos_token_id": 7, "tie_word_embeddings": False,
}  # fmt: skip


def test_the_decoder_is_read_as_the_model_that_it_is() -> None:
    spec = parse_architecture(MISTRAL3)
    assert isinstance(spec, Architecture)
    assert (spec.architecture, spec.is_text_stack) == ("MistralForCausalLM", True)
    assert (spec.vocab_size, spec.eos_token_ids, spec.tie_word_embeddings) == (96, (7,), False)


def test_a_generic_decoder_too() -> None:
    text = {**TEXT, "model_type": "gemma3_text", "sliding_window": 8}
    spec = parse_architecture(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    )
    assert isinstance(spec, GenericArchitecture)
    assert (spec.architecture, spec.is_text_stack) == ("Gemma3ForCausalLM", True)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "PaliGemma.* is not served"),
        ({"text_config": {**TEXT, "model_type": "t5"}}, "model_type t5 is not served"),
        ({"text_config": {**TEXT, "final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    **TEXT, "model_type": "gemma3_text",
                    "rope_parameters": {"rope_type": "dynamic", "factor": 2.0},
                },
            },
            "decoder alone: rope_type dynamic",
        ),
    ],
)  # fmt: skip
def test_refusals_say_what_is_not_served(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ArchitectureError, match=message):
        parse_architecture({**MISTRAL3, **changes})


@pytest.mark.parametrize(
    ("stored", "own"),
    [
        ("language_model.model.norm.weight", "model.norm.weight"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("model.norm.weight", "model.norm.weight"),
        ("model.text_model.norm.weight", "model.norm.weight"),
        ("language_model.lm_head.weight", "lm_head.weight"),
        ("lm_head.weight", "lm_head.weight"),
        ("vision_tower.layers.0.weight", None),
        ("model.visual.blocks.0.weight", None),
        ("model.multi_modal_projector.linear.weight", None),
    ],
)
def test_names_of_tensors(stored: str, own: str | None) -> None:
    assert decoder_name(stored) == own


def test_paths_of_adapters() -> None:
    assert outer_paths("model.layers.{layer}.mlp") == (
        "model.language_model.layers.{layer}.mlp",
        "language_model.model.layers.{layer}.mlp",
        "model.text_model.layers.{layer}.mlp",
    )
    assert outer_paths("lm_head") == ("language_model.lm_head",)


def test_the_sizes_of_a_folder_are_the_decoders(tmp_path: Path) -> None:
    inner = {"text_config": {**TEXT, "eos_token_id": [5, 6]}}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert (vocab_size(tmp_path), end_token_ids(tmp_path)) == (96, (5, 6))
    (tmp_path / "config.json").write_text(json.dumps({**inner, "eos_token_id": 7}))
    assert end_token_ids(tmp_path) == (7,)
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    assert end_token_ids(tmp_path) == (8,)
