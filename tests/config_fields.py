"""Every field of config.json for each family, decided: it counts, is idle, or is refused.

The tables name every field of transformers' config classes and every key that transformers looks
for besides. A new one fails tests/modeling/parity/test_config.py until it is decided.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.checkpoints import LLAMA3_ROPE, LONGROPE, write_llama, write_relative
from tests.checkpoints_others import write_gpt2, write_gpt_neox, write_opt

ABOUT_THE_FILE = frozenset(
    {"architectures", "transformers_version", "dtype", "return_dict", "fusion_config", "auto_map"}
    | {"vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio"}
)
"""What says how a file is read or what transformers' own outputs look like. dtype is the engine's
choice; a fused module computes what its parts do; auto_map is for code that is not run."""

IDLE: dict[str, Any] = {
    "output_hidden_states": True,
    "output_attentions": True,
    "output_cross_attentions": True,
    "chunk_size_feed_forward": 1,
    "id2label": {"0": "a"},
    "label2id": {"a": 0},
    "problem_type": "regression",
    "use_cache": False,
    "pad_token_id": 3,
    "bos_token_id": 5,
    "eos_token_id": [7, 8],
    "gradient_checkpointing": True,
    "initializer_range": 0.5,
    "attention_dropout": 0.5,
}
"""Fields that change no logits, wherever they are."""

REFUSED: dict[str, Any] = {
    "is_encoder_decoder": True,
    "is_causal": False,
    "sliding_window": 5,
    "layer_types": ["full_attention", "sliding_attention"],
    "attention_chunk_size": 5,
    "kv_sharing_modes": ["reuse", None],
    "per_layer_config": {"1": {"intermediate_size": 40}},
    "transformers_weights": "other.safetensors",
    "quantization_config": {"quant_method": "gptq"},
}
"""Keys that transformers heeds in any model and that only some compute here."""

SIZES: dict[str, Any] = {
    "vocab_size": 83,
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "tie_word_embeddings": True,
}

LLAMA: dict[str, Any] = {
    **SIZES,
    "num_key_value_heads": 1,
    "hidden_act": "gelu_new",
    "rms_norm_eps": 0.05,
    "head_dim": 12,
}

WINDOWED: dict[str, Any] = {
    **LLAMA,
    "use_sliding_window": False,
    "sliding_window": 5,
    "max_window_layers": 0,
    "layer_types": ["sliding_attention", "full_attention"],
}

ROPES: list[dict[str, Any]] = [
    {"rope_type": "default", "rope_theta": 100.0},
    {"rope_type": "linear", "rope_theta": 500.0, "factor": 3.0},
    {"rope_type": "dynamic", "rope_theta": 500.0, "factor": 3.0},
    LLAMA3_ROPE,
    {**LLAMA3_ROPE, "low_freq_factor": 3.0, "high_freq_factor": 2.0},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32},
    {
        "rope_type": "yarn",
        "rope_theta": 300.0,
        "factor": 3.0,
        "original_max_position_embeddings": 16,
        "beta_fast": 8,
        "beta_slow": 2,
        "mscale": 1.5,
        "mscale_all_dim": 0.7,
        "truncate": False,
    },
    {"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.3},
]
LONG: dict[str, Any] = {**LONGROPE, "short_factor": [1.0, 1.2, 1.3, 1.5]}
LONG["long_factor"] = [1.3, 1.5, 2.0, 4.0]


@dataclass(frozen=True)
class Kind:
    """A family: how to write a model of it, and its fields.

    counts: a value for each field that changes results. ropes: rope_parameters that do. idle,
    refused: those of this family beside the general ones; its own entry comes first. keys: what
    config.json may say outside the class's fields, to what else must go.
    """

    write: Callable[..., Path]
    counts: Mapping[str, Any]
    ropes: tuple[dict[str, Any], ...] = ()
    idle: Mapping[str, Any] = field(default_factory=dict)
    refused: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)

    @property
    def all_idle(self) -> dict[str, Any]:
        return {**{k: v for k, v in IDLE.items() if k not in self.counts}, **self.idle}

    @property
    def all_refused(self) -> dict[str, Any]:
        own = {k: v for k, v in REFUSED.items() if k not in self.counts}
        return {**own, **self.refused}

    @property
    def decided(self) -> set[str]:
        found = {*self.counts, *self.all_idle, *self.all_refused, *self.keys, *ABOUT_THE_FILE}
        return found | ({"rope_parameters"} if self.ropes else set())


ROPE_KEYS = {"rope_theta": 50.0, "rope_scaling": {"type": "linear", "factor": 4.0}}
FULL_LAYERS = {"layer_types": ["full_attention"] * 2}
BIASES = {"attention_bias": True, "mlp_bias": True}
MULTIPLIERS = {
    "embedding_multiplier": 2.0,
    "logits_scaling": 1.7,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.5,
}
STRANGE: dict[str, Any] = {
    "max_position_embeddings": 300,
    "partial_rotary_factor": 0.5,
    "use_sliding_window": True,
    "bskcn_1": [0],
    "bskcn_3": [1],
    "bskcn_tv": [0.9, 0.3],
}
"""What other members of Llama's family read: idle where the class has no such field."""


def relative(name: str, counts: Mapping[str, Any], **fields: Any) -> Kind:
    """A member of Llama's family."""

    def write(folder: Path, **changes: Any) -> Path:
        return write_relative(folder, name, **changes)

    own: dict[str, Any] = {
        "ropes": (*ROPES, {**LONG, "original_max_position_embeddings": 32}),
        "idle": {**STRANGE, **FULL_LAYERS, **BIASES, **MULTIPLIERS},
        "refused": {},
        "keys": ROPE_KEYS,
    }
    return Kind(write, counts, **{**own, **fields})


def plain_names(sizes: Mapping[str, Any]) -> dict[str, Any]:
    names = {
        "hidden_size": "n_embd",
        "num_hidden_layers": "n_layer",
        "num_attention_heads": "n_head",
    }
    return {names.get(key, key): value for key, value in sizes.items()}


WINDOWED_STRANGE = {
    **{key: value for key, value in STRANGE.items() if key not in WINDOWED},
    **BIASES,
    **MULTIPLIERS,
}
FULL = {key: value for key, value in LLAMA.items() if key != "sliding_window"}
NO_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 5.0}, "rope_theta": 3.0}

KINDS: dict[str, Kind] = {
    "Llama": replace(
        relative(
            "",
            {**FULL, **BIASES},
            idle={"pretraining_tp": 2, **STRANGE, **FULL_LAYERS, **MULTIPLIERS},
        ),
        write=write_llama,
    ),
    "Mistral": relative(
        "mistral",
        {**LLAMA, "sliding_window": 5},
        idle={**STRANGE, **BIASES, **MULTIPLIERS},
        refused={"layer_types": ["full_attention", "chunked_attention"]},
        keys={
            **ROPE_KEYS,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
    "Qwen2": relative("qwen2_window", WINDOWED, idle=WINDOWED_STRANGE),
    "Qwen3": relative(
        "qwen3_window",
        {
            **WINDOWED,
            "attention_bias": False,
            "layer_types": ["full_attention", "sliding_attention"],
        },
        idle={key: value for key, value in WINDOWED_STRANGE.items() if key != "attention_bias"},
    ),
    "Granite": relative(
        "granite",
        {
            **FULL,
            **BIASES,
            **MULTIPLIERS,
        },
        idle={**STRANGE, **FULL_LAYERS},
    ),
    "Phi3": relative(
        "phi3",
        {**LLAMA, "sliding_window": 5},
        ropes=(
            {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5},
            {**LONG, "partial_rotary_factor": 1.0},
            {**LONG, "rope_type": "yarn", "attention_factor": 1.4},
            {
                **LONG,
                "rope_type": "su",
                "factor": 3.0,
                "original_max_position_embeddings": 32,
            },
        ),
        idle={
            **{key: STRANGE[key] for key in STRANGE if key != "partial_rotary_factor"},
            **FULL_LAYERS,
            **BIASES,
            **MULTIPLIERS,
            "original_max_position_embeddings": 100,
            "resid_pdrop": 0.5,
            "embd_pdrop": 0.5,
        },
        keys={"rope_theta": 50.0, "partial_rotary_factor": 0.5},
    ),
    "Solar": relative(
        "solar",
        {
            **LLAMA,
            "num_hidden_layers": 4,
            "sliding_window": 5,
            "bskcn_1": [1],
            "bskcn_2": [0],
            "bskcn_3": [4],
            "bskcn_4": [2],
            "bskcn_tv": [0.9, 0.3],
        },
        idle={
            "max_position_embeddings": 300,
            "partial_rotary_factor": 0.5,
            "layer_types": ["full_attention"] * 5,
            **MULTIPLIERS,
        },
    ),
    "GPTNeoX": Kind(
        write_gpt_neox,
        {
            **SIZES,
            "hidden_size": 96,
            "num_attention_heads": 2,
            "hidden_act": "relu",
            "layer_norm_eps": 0.05,
            "use_parallel_residual": False,
            "attention_bias": False,
        },
        ropes=(*({**rope, "partial_rotary_factor": 0.5} for rope in ROPES), ROPES[0]),
        idle={
            "max_position_embeddings": 300,
            "hidden_dropout": 0.5,
            "classifier_dropout": 0.5,
            "is_decoder": True,
            "rope_theta": 3.0,
            "partial_rotary_factor": 0.5,
        },
        refused={"head_dim": 8},
        keys={"rotary_emb_base": 50.0, "rotary_pct": 0.5},
    ),
    "OPT": Kind(
        write_opt,
        {
            **{key: value for key, value in SIZES.items() if key != "intermediate_size"},
            "tie_word_embeddings": False,
            "ffn_dim": 40,
            "max_position_embeddings": 60,
            "do_layer_norm_before": False,
            "_remove_final_layer_norm": True,
            "word_embed_proj_dim": 24,
            "activation_function": "gelu_new",
            "enable_bias": False,
            "layer_norm_elementwise_affine": False,
        },
        idle={**NO_ROPE, "dropout": 0.5, "layerdrop": 0.5, "init_std": 0.5},
    ),
    "GPT2": Kind(
        write_gpt2,
        {
            **plain_names({k: v for k, v in SIZES.items() if k != "intermediate_size"}),
            "tie_word_embeddings": False,
            "n_positions": 60,
            "n_inner": 40,
            "activation_function": "relu",
            "layer_norm_epsilon": 0.05,
            "scale_attn_weights": False,
            "scale_attn_by_inverse_layer_idx": True,
        },
        idle={
            **NO_ROPE,
            "resid_pdrop": 0.5,
            "embd_pdrop": 0.5,
            "attn_pdrop": 0.5,
            "reorder_and_upcast_attn": True,
            "summary_type": "first",
            "summary_use_proj": False,
            "summary_activation": "tanh",
            "summary_proj_to_labels": False,
            "summary_first_dropout": 0.5,
        },
        refused={"add_cross_attention": True},
    ),
}
