"""Random small configs of any causal class, of numbers that published models vary."""

import random
from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING, PreTrainedConfig

from tests.checkpoints_stacks import STACKS, larger_config
from tests.modeling.models.tiny_causal import ORIGINAL, OWN, SMALL, tiny_config

IDLE = (
    "use_cache", "output_", "return_dict", "is_decoder", "is_encoder_decoder", "add_cross",
    "chunk_size", "dropout", "pdrop", "initializer", "init_", "aux_loss", "router_z", "_coef",
    "use_mamba_kernels", "bidirectional", "pretraining", "is_causal", "slow_but", "jitter",
)  # fmt: skip
"""Parts of names of settings that change no answer, or of which transformers has no truth."""

SHAPE = (
    "hidden_size", "d_model", "n_embd", "num_attention_heads", "n_head", "n_heads", "head_dim",
    "num_key_value_heads", "num_kv_heads", "intermediate_size",
)  # fmt: skip
"""Numbers that fit each other only when all of them are drawn."""

ACTIVATIONS = (
    *("silu", "gelu", "gelu_new", "gelu_pytorch_tanh", "relu", "relu2", "quick_gelu", "tanh"),
    *("gelu_fast", "mish"),
)

WORDS: dict[str, tuple[Any, ...]] = {
    "topk_method": ("greedy", "group_limited_greedy", "noaux_tc"),
    "scoring_func": ("softmax", "sigmoid"),
    "position_embedding_type": ("rope", "nope"),
}
"""Settings whose values are words."""

FIXED_LAYERS = ("gemma3n_text", "nemotron_h")
"""Kinds whose other lists are as long as their layers are many."""


def draw_config(
    rng: random.Random, kind: str, boldness: float
) -> tuple[PreTrainedConfig, list[str]]:
    """Draw a config of a kind, and what is said of it; raises what its class does.

    boldness: the probability with which each of its settings is another than in the sweep.
    """
    if kind in STACKS:
        return _larger(rng, kind, boldness)
    base = tiny_config(kind)
    changes = _changes(rng, CONFIG_MAPPING[kind](), boldness)
    changes |= _layers(rng, kind, base, boldness)
    config = tiny_config(kind, **changes)
    said = [f"{name}={value}" for name, value in changes.items()]
    if rng.random() < 0.45 and getattr(config, "rope_parameters", None):
        config = _with_rope(rng, config)
        said.append(f"rope={config.rope_parameters}")
    return config, said


def _larger(rng: random.Random, stack: str, boldness: float) -> tuple[PreTrainedConfig, list[str]]:
    """Draw the decoder of a larger model; its widths are the other parts' too, and stay."""
    drawn = _changes(rng, larger_config(stack).get_text_config(decoder=True), boldness)
    kept = (*SHAPE, "vocab_size")
    changes = {name: value for name, value in drawn.items() if name not in kept}
    if "text_config" not in STACKS[stack]:
        changes = {}
    return larger_config(stack, **changes), [f"{name}={each}" for name, each in changes.items()]


def _changes(rng: random.Random, usual: Any, boldness: float) -> dict[str, Any]:
    """Draw other values for some settings of a config."""
    numbers, changes = _numbers(rng), {}
    with_shape = rng.random() < 1.5 * boldness
    for name, value in sorted(vars(usual).items()):
        is_own = not isinstance(getattr(type(usual), name, None), property)
        if name.startswith("_") or any(idle in name for idle in IDLE) or not is_own:
            continue
        if name in SHAPE and with_shape and (value is None or isinstance(value, int)):
            changes[name] = numbers[name]
        if name not in SHAPE and rng.random() < boldness:
            changes.update(_other(rng, name, value, numbers))
    if rng.random() < 0.5:
        changes["tie_word_embeddings"] = rng.random() < 0.5
    return changes


def _other(
    rng: random.Random, name: str, value: object, numbers: Mapping[str, Any]
) -> dict[str, Any]:
    """Draw another value of one setting; {} where none is known."""
    if name in numbers:
        return {name: numbers[name]}
    if isinstance(value, bool):
        return {name: not value}
    if isinstance(value, float):
        eps = "eps" in name
        return {name: rng.choice((1e-3, 1e-5, 1e-6) if eps else (0.5, 0.7 * value, 2 * value))}
    if isinstance(value, int) and value <= 64 and "token" not in name and name not in SMALL:
        return {name: rng.choice((1, 2, 3, 4))}
    return {name: rng.choice(WORDS[name])} if name in WORDS else {}


def _numbers(rng: random.Random) -> dict[str, Any]:
    """Draw numbers that fit each other, by all names that configs have for them."""
    heads = rng.choice((2, 4, 4, 6, 8))
    hidden = heads * rng.choice((4, 6, 8, 10, 12))
    kv = rng.choice([each for each in range(1, heads + 1) if heads % each == 0])
    experts = rng.choice((2, 3, 4, 6, 8))
    choices: dict[str, tuple[Any, ...]] = {
        "hidden_size d_model n_embd": (hidden,),
        "num_attention_heads n_head n_heads": (heads,),
        "num_key_value_heads num_kv_heads": (kv,),
        "head_dim": (4, 6, 8, 10, 12, 16),
        "intermediate_size ffn_dim n_inner dff ffn_hidden_size": (20, 36, 50, 52, 72),
        "vocab_size": (96, 97, 101, 113, 128),
        "num_local_experts num_experts n_routed_experts": (experts,),
        "num_experts_per_tok": tuple(range(1, min(3, experts) + 1)),
        "moe_intermediate_size shared_expert_intermediate_size": (16, 20, 30),
        "n_shared_experts first_k_dense_replace decoder_sparse_step": (1, 2),
        "mlp_only_layers": ([], [0], [1]),
        "max_position_embeddings n_positions max_seq_len": (40, 64, 100, 256),
        "sliding_window window_size attention_chunk_size": (2, 3, 5, 8, 13, 64, 300),
        "max_window_layers": (0, 1, 2),
        "kv_lora_rank": (8, 12, 16),
        "q_lora_rank": (None, 8, 12),
        "qk_nope_head_dim v_head_dim": (4, 8, 12),
        "partial_rotary_factor rotary_pct": (0.25, 0.5, 0.75, 1.0),
        "attn_logit_softcapping final_logit_softcapping": (None, 2.0, 5.0, 30.0),
        "query_pre_attn_scalar": (8, 16, 7.5),
        "hidden_act activation_function hidden_activation": ACTIVATIONS,
        "word_embed_proj_dim": (hidden, 16),
        "clip_qkv": (None, 0.5, 3.0),
        "rope_theta": (100.0, 1e4, 5e5),
    }
    return {name: rng.choice(own) for names, own in choices.items() for name in names.split()}


def _layers(rng: random.Random, kind: str, base: Any, boldness: float) -> dict[str, Any]:
    """Draw how many layers there are, and of which kinds."""
    lists = {name for name, value in OWN.get(kind, {}).items() if isinstance(value, list)}
    if kind in FIXED_LAYERS or lists - {"layer_types"} or rng.random() > 1.5 * boldness:
        return {}
    count, names = rng.choice((1, 3, 4)), ("num_hidden_layers", "n_layer", "n_layers")
    name = next((each for each in names if each in vars(base)), None)
    types = vars(base).get("layer_types")
    if name is None:
        return {}
    own = {"layer_types": [rng.choice(sorted(set(types))) for _ in range(count)]} if types else {}
    return {name: count, **own}


def _with_rope(rng: random.Random, config: Any) -> PreTrainedConfig:
    """Draw other rotary frequencies, for each kind of layer where a model has several."""
    rope = config.rope_parameters
    if "rope_theta" in rope or "rope_type" in rope:
        new = _rope(rng, rope, config)
    else:
        new = {key: part and _rope(rng, part, config) for key, part in rope.items()}
    fields = {key: value for key, value in config.to_dict().items() if key != "rope_theta"}
    if "longrope" in str(new):
        fields["original_max_position_embeddings"] = ORIGINAL
    made: PreTrainedConfig = type(config)(**{**fields, "rope_parameters": new})
    return made


def _rope(rng: random.Random, old: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Draw the settings of one table of frequencies."""
    kind = rng.choice(("default", "linear", "dynamic", "yarn", "yarn", "llama3", "longrope"))
    kept = {key: old[key] for key in ("partial_rotary_factor", "mrope_section") if key in old}
    found = {**kept, "rope_type": kind, "rope_theta": rng.choice((100.0, 1e4, 500000))}
    if kind != "default":
        found["factor"] = rng.choice((1.5, 2.0, 4.0, 8))
    if kind in ("yarn", "llama3"):
        found["original_max_position_embeddings"] = rng.choice((8, 16, 32))
    if kind == "llama3":
        found |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0}
    if kind == "yarn":
        more = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.707, "mscale_all_dim": 0.5}
        more |= {"attention_factor": 1.3, "truncate": False}
        found |= {name: value for name, value in more.items() if rng.random() < 0.3}
    if kind == "longrope":
        head = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        pairs = int(head * (kept.get("partial_rotary_factor") or 1.0)) // 2
        found["original_max_position_embeddings"] = ORIGINAL
        found["short_factor"] = [1.0 + 0.1 * pair for pair in range(pairs)]
        found["long_factor"] = [1.5 + 1.5 * pair for pair in range(pairs)]
    return found
