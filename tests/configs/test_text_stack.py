"""Decoders inside larger models: what their config.json says, and how their tensors are named."""

import json
from pathlib import Path
from typing import Any

import pytest
import transformers
from transformers import CONFIG_MAPPING

from configs.architectures.base import ArchitectureError
from configs.architectures.generic import GenericArchitecture
from configs.architectures.llama import Architecture
from configs.architectures.select import end_token_ids, parse_architecture, vocab_size
from configs.architectures.text_decoders import DECODERS
from configs.architectures.text_stack import WRAPPERS, decoder_name, outer_paths, text_config

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
    assert (spec.vocab_size, spec.tie_word_embeddings) == (96, False)


def test_a_generic_decoder_too() -> None:
    text = {**TEXT, "model_type": "gemma3_text", "sliding_window": 8}
    spec = parse_architecture(
        {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": text}
    )
    assert isinstance(spec, GenericArchitecture)
    assert (spec.architecture, spec.is_text_stack) == ("Gemma3ForCausalLM", True)


@pytest.mark.parametrize("name", ["Gemma3ForCausalLM", "Gemma3nForCausalLM", "Emu3ForCausalLM"])
def test_a_decoders_class_that_transformers_makes_of_no_larger_models_config(name: str) -> None:
    with pytest.raises(ArchitectureError, match=f"names {name}, but .*: name the larger model's"):
        parse_architecture({"architectures": [name], "text_config": TEXT})


LLAVA = "LlavaForConditionalGeneration"
"""A class that may have any decoder."""

PUBLISHED: dict[str, dict[str, Any]] = {
    "gemma3": {
        "eos_token_id": [1, 106],
        "text_config": {
            "hidden_size": 2560, "intermediate_size": 10240, "model_type": "gemma3_text",
            "num_hidden_layers": 34, "sliding_window": 1024,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        },
    },
    "gemma3n": {
        "eos_token_id": [1, 106], "torch_dtype": "bfloat16", "image_token_id": 262145,
        "audio_config": {"hidden_size": 1536, "vocab_offset": 262272, "vocab_size": 128},
        "text_config": {
            "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20, "head_dim": 256,
            "final_logit_softcapping": 30.0, "hidden_size": 2048, "intermediate_size": [8192] * 30,
            "layer_types": (["sliding_attention"] * 4 + ["full_attention"]) * 6,
            "model_type": "gemma3n_text", "num_hidden_layers": 30, "num_kv_shared_layers": 10,
            "query_pre_attn_scalar": 256, "rope_local_base_freq": 10000.0, "rope_scaling": None,
            "rope_theta": 1000000.0, "sliding_window": 512, "torch_dtype": "bfloat16",
            "vocab_size": 262400, "vocab_size_per_layer_input": 262144,
        },
        "vision_config": {"hidden_size": 2048, "vocab_offset": 262144, "vocab_size": 128},
    },
    "llava": {
        "vocab_size": 32064, "torch_dtype": "float16",
        "text_config": {
            "architectures": ["LlamaForCausalLM"], "max_position_embeddings": 4096,
            "model_type": "llama", "rms_norm_eps": 1e-05, "vocab_size": 32064,
        },
    },
    "qwen2_5_vl": {
        "hidden_size": 3584, "intermediate_size": 18944, "max_position_embeddings": 128000,
        "max_window_layers": 28, "num_attention_heads": 28, "num_hidden_layers": 28,
        "num_key_value_heads": 4, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "rope_scaling": {"type": "mrope", "mrope_section": [16, 24, 24]}, "sliding_window": 32768,
        "tie_word_embeddings": False, "torch_dtype": "bfloat16", "use_sliding_window": False,
        "vision_config": {"depth": 32}, "vocab_size": 152064,
    },
    "glm4v": {
        "text_config": {
            "attention_bias": True, "max_position_embeddings": 65536, "model_type": "glm4v_text",
            "num_hidden_layers": 40, "partial_rotary_factor": 0.5, "rope_theta": 10000.0,
            "rope_scaling": {"mrope_section": [8, 12, 12], "rope_type": "default"},
        },
    },
    "glm4v_moe": {
        "text_config": {
            "model_type": "glm4v_moe_text", "num_key_value_heads": 8, "partial_rotary_factor": 0.5,
            "rope_scaling": {"rope_type": "default", "mrope_section": [8, 12, 12]},
            "rope_theta": 10000.0, "use_qk_norm": False, "vocab_size": 151552,
        },
    },
    "glm_ocr": {
        "text_config": {
            "attention_bias": False, "head_dim": 128, "hidden_size": 1536,
            "intermediate_size": 4608, "max_position_embeddings": 131072,
            "model_type": "glm_ocr_text", "num_hidden_layers": 16, "num_nextn_predict_layers": 1,
            "rope_parameters": {
                "mrope_section": [16, 24, 24], "partial_rotary_factor": 1.0, "rope_theta": 10000,
                "rope_type": "default",
            },
        },
    },
    "hunyuan_vl": {
        "text_config": {
            "head_dim": 128, "hidden_size": 1024, "intermediate_size": 3584,
            "max_position_embeddings": 32768, "model_type": "hunyuan_vl_text",
            "num_attention_heads": 16, "num_hidden_layers": 24, "num_key_value_heads": 8,
            "rope_scaling": {
                "alpha": 1000.0, "beta_fast": 32, "beta_slow": 1, "factor": 1.0, "mscale": 1.0,
                "mscale_all_dim": 1.0, "type": "xdrope", "xdrope_section": [16, 16, 16, 16],
            },
            "rope_theta": 10000.0, "vocab_size": 120818,
        },
    },
    "mistral3": {
        "text_config": {
            "first_k_dense_replace": 0, "hidden_size": 4096, "kv_lora_rank": 256,
            "max_position_embeddings": 1048576, "model_type": "mistral4",
            "moe_intermediate_size": 2048, "n_routed_experts": 128, "num_hidden_layers": 36,
            "q_lora_rank": 1024, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64,
            "rope_parameters": {
                "beta_fast": 32.0, "beta_slow": 1.0, "factor": 128.0, "llama_4_scaling_beta": 0.1,
                "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 8192,
                "rope_theta": 10000.0, "rope_type": "yarn", "type": "yarn",
            },
            "v_head_dim": 128,
        },
    },
    "mllama": {
        "text_config": {
            "cross_attention_layers": [3, 8, 13, 18, 23, 28, 33, 38], "hidden_size": 4096,
            "max_position_embeddings": 131072, "model_type": "mllama_text_model",
            "num_hidden_layers": 40,
            "rope_scaling": {
                "factor": 8.0, "high_freq_factor": 4.0, "low_freq_factor": 1.0,
                "original_max_position_embeddings": 8192, "rope_type": "llama3",
            },
            "rope_theta": 500000.0, "vocab_size": 128256,
        },
    },
    "qwen2_5_omni_thinker": {
        "text_config": {
            "model_type": "qwen2_5_omni_text", "num_hidden_layers": 28, "rope_theta": 1000000.0,
            "rope_scaling": {
                "mrope_section": [16, 24, 24], "rope_type": "default", "type": "default"
            },
            "sliding_window": 32768, "use_sliding_window": False, "vocab_size": 152064,
        },
    },
    "qwen3_vl_moe": {
        "text_config": {
            "head_dim": 128, "hidden_size": 2048, "max_position_embeddings": 262144,
            "model_type": "qwen3_vl_moe_text", "moe_intermediate_size": 768, "num_experts": 128,
            "num_experts_per_tok": 8, "num_hidden_layers": 48, "num_key_value_heads": 4,
            "rope_scaling": {
                "mrope_interleaved": True, "mrope_section": [24, 20, 20], "rope_type": "default"
            },
            "rope_theta": 5000000, "vocab_size": 151936,
        },
    },
}  # fmt: skip
"""Files as their makers wrote them: what transformers knows is left out, or is not set apart."""

SPEC_KEYS = {
    "vocab_size": "vocab_size", "num_layers": "num_hidden_layers", "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size", "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads", "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}  # fmt: skip


def _wrapper(kind: str) -> str:
    """The class of a kind of larger model."""
    plain = kind.replace("_", "").lower() + "forconditionalgeneration"
    return next(name for name in WRAPPERS if name.replace("_", "").lower() == plain)


def _same_as_transformers(spec: Any, own: Any) -> None:
    for field, key in SPEC_KEYS.items():
        if hasattr(spec, field):
            assert getattr(spec, field) == own.to_dict()[key], field
    if isinstance(spec, Architecture):
        assert spec.rope.theta == own.rope_parameters["rope_theta"]
        assert set(spec.windows) == {own.to_dict().get("sliding_window")}


NOT_COMPARED = {
    "architectures", "bos_token_id", "dtype", "eos_token_id", "initializer_range", "model_type",
    "pad_token_id", "rope_parameters", "router_aux_loss_coef", "tie_word_embeddings",
    "transformers_version", "use_cache",
}  # fmt: skip
"""Fields that say nothing of what a decoder computes, or that its larger model says."""


def _same_settings(made: dict[str, Any], own: Any) -> None:
    """Compare what the decoder is served by with transformers' own config of it."""
    served = CONFIG_MAPPING[made["model_type"]].from_dict(made).to_dict()
    expected = {**own.to_dict(), **DECODERS[own.model_type].fixed}
    compared = (served.keys() & expected.keys()) - NOT_COMPARED
    assert {key: served[key] for key in compared} == {key: expected[key] for key in compared}
    assert _plain(served["rope_parameters"]) == _plain(expected["rope_parameters"])


def _plain(rope: dict[str, Any]) -> dict[str, Any]:
    """Rotary settings without those of images; a factor of 1 says what its absence says."""
    of_images = {"mrope_section", "mrope_interleaved", "type"}
    kept = {key: value for key, value in rope.items() if key not in of_images}
    return {"partial_rotary_factor": 1.0, **kept}


@pytest.mark.parametrize("kind", PUBLISHED)
def test_files_as_their_makers_wrote_them(kind: str) -> None:
    fields = {"architectures": [_wrapper(kind)], "model_type": kind, **PUBLISHED[kind]}
    own = CONFIG_MAPPING[kind].from_dict(fields)
    spec = parse_architecture(fields)
    _same_as_transformers(spec, own.text_config)
    _same_settings(text_config(fields["architectures"][0], fields), own.text_config)
    assert spec.checkpoint_dtype == fields.get("torch_dtype")
    assert spec.is_text_stack


def test_layers_that_read_images_are_of_llamas_vision_alone() -> None:
    text = {**TEXT, "model_type": "mllama_text_model", "cross_attention_layers": [1, 7]}
    fields = {"architectures": ["MllamaForConditionalGeneration"], "text_config": text}
    assert parse_architecture(fields).idle_layers == (1,)
    other = {**text, "model_type": "gemma3_text", "sliding_window": 8}
    fields = {"architectures": ["Gemma3ForConditionalGeneration"], "text_config": other}
    assert parse_architecture(fields).idle_layers == ()


def test_files_that_name_class_and_decoder_otherwise() -> None:
    fields = {
        "architectures": ["KimiK25ForConditionalGeneration"], "model_type": "kimi_k25",
        "text_config": {"model_type": "kimi_k2", "num_hidden_layers": 3},
    }  # fmt: skip
    own = CONFIG_MAPPING["kimi_k25"].from_dict(fields)
    spec = parse_architecture(fields)
    assert isinstance(spec, GenericArchitecture)
    assert spec.settings["model_type"] == own.text_config.model_type == "deepseek_v3"
    assert (spec.num_layers, spec.padded_tokens) == (3, (own.image_token_id, own.video_token_id))


@pytest.mark.parametrize("kind", DECODERS)
def test_what_a_file_leaves_unsaid_is_what_transformers_takes(kind: str) -> None:
    name = DECODERS[kind].capped_in or LLAVA
    fields = {"architectures": [name], "text_config": {"model_type": kind}}
    own = CONFIG_MAPPING[kind]()
    _same_as_transformers(parse_architecture(fields), own)
    _same_settings(text_config(name, fields), own)


@pytest.mark.parametrize("name", sorted(WRAPPERS))
def test_what_a_class_leaves_unsaid_is_what_transformers_takes(name: str) -> None:
    own = getattr(transformers, name).config_class()
    made = text_config(name, {"text_config": {}})
    decoder = DECODERS[own.text_config.model_type]
    assert made["architectures"] == [decoder.architecture]
    assert made["tie_word_embeddings"] is bool(getattr(own, "tie_word_embeddings", False))


@pytest.mark.parametrize(
    ("outer", "inner", "tied"), [(None, None, True), (False, True, True), (False, None, False)]
)
def test_ends_are_tied_where_either_config_says_so(outer: Any, inner: Any, tied: bool) -> None:
    """Mistral 3's class ties unless it is told; a head that is stored and differs is read then."""
    fields = {**MISTRAL3, "text_config": {**TEXT, "tie_word_embeddings": inner}}
    fields["tie_word_embeddings"] = outer
    assert parse_architecture(fields).tie_word_embeddings is tied


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"architectures": ["PaliGemmaForConditionalGeneration"]}, "PaliGemma.* is not served"),
        ({"text_config": {**TEXT, "model_type": "t5"}}, "model_type t5 is not served"),
        ({"text_config": {**TEXT, "final_logit_softcapping": 30.0}}, "final_logit_softcapping"),
        ({"text_config": {**TEXT, "model_type": "muse_glimmer_text"}}, "final_logit_softcapping"),
        # It has a cap unless it is told, and gets its inputs by layer in a class of its own alone.
        ({"text_config": {**TEXT, "model_type": "gemma3n_text"}}, "final_logit_softcapping"),
        (
            {"text_config": {**TEXT, "model_type": "glm4v_text", "head_dim": 16}},
            r"head_dim \(16\) must be hidden_size / num_attention_heads \(8\)",
        ),
        (
            {
                "architectures": ["Gemma3ForConditionalGeneration"],
                "text_config": {
                    **TEXT, "model_type": "gemma3_text",
                    "rope_parameters": {"rope_type": "longrope", "factor": 2.0},
                },
            },
            "decoder alone: rope_type longrope",
        ),
        *(
            ({"text_config": {**TEXT, "model_type": kind, "sliding_window": 8}}, r"window \(8\)")
            for kind in ("qwen3_omni_moe_text", "qwen3_vl_moe_text", "qwen3_vl_text")
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
        ("thinker.model.norm.weight", "model.norm.weight"),
        ("thinker.lm_head.weight", "lm_head.weight"),
        ("thinker.visual.blocks.0.weight", None),
        ("talker.model.norm.weight", None),
    ],
)
def test_names_of_tensors(stored: str, own: str | None) -> None:
    assert decoder_name(stored) == own


def test_paths_of_adapters() -> None:
    assert outer_paths("model.layers.{layer}.mlp") == (
        "model.language_model.layers.{layer}.mlp",
        "language_model.model.layers.{layer}.mlp",
        "model.text_model.layers.{layer}.mlp",
        "thinker.model.layers.{layer}.mlp",
        "thinker.model.language_model.layers.{layer}.mlp",
    )
    assert outer_paths("lm_head") == ("language_model.lm_head", "thinker.lm_head")


def test_the_sizes_of_a_folder_are_the_decoders(tmp_path: Path) -> None:
    named = {"architectures": MISTRAL3["architectures"]}
    inner: dict[str, Any] = {**named, "text_config": {**TEXT, "eos_token_id": [5, 6]}}
    (tmp_path / "config.json").write_text(json.dumps(inner))
    assert (vocab_size(tmp_path), end_token_ids(tmp_path)) == (96, (5, 6))
    (tmp_path / "config.json").write_text(json.dumps({**inner, "eos_token_id": 7}))
    assert end_token_ids(tmp_path) == (7,)
    whole = {"architectures": ["Qwen2_5OmniModel"], "thinker_config": {**inner, "eos_token_id": 9}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    assert (vocab_size(tmp_path), end_token_ids(tmp_path)) == (96, (9,))
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": 8}))
    assert end_token_ids(tmp_path) == (8,)


def test_a_size_that_a_file_leaves_unsaid(tmp_path: Path) -> None:
    fields = {"architectures": [_wrapper("gemma3")], **PUBLISHED["gemma3"]}
    (tmp_path / "config.json").write_text(json.dumps(fields))
    assert vocab_size(tmp_path) == 262208
