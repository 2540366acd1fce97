"""Decoders of transformers that are paged by its own modules, read for what a server needs.

transformers builds the modules; attention, cache, linear layers and both ends are ours. So only
types that were compared with transformers' own results are listed here.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Any, Self

from configs.architectures import not_paged, padded
from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.outer_tokens import OuterTokens

PAGED_TYPES = frozenset(
    (
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2",
        "bailing_hybrid", "bamba", "beam", "biogpt", "bitnet", "bloom", "codegen", "cohere",
        "cohere2", "cohere2_moe", "cohere_compass_text", "ctrl", "cwm", "dbrx", "deepseek_v2",
        "deepseek_v3", "deepseek_v32", "diffllama", "dory", "dots1", "ernie4_5", "ernie4_5_moe",
        "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo",
        "flint", "gemma", "gemma2", "gemma3_text", "gemma3n_text", "gemma4_text",
        "gemma4_unified_text", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
        "gpt_bigcode", "gpt_neo", "gpt_neox_japanese", "gpt_oss", "gptj", "granite_swa",
        "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium",
        "hrm_text", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax",
        "internlm3", "iquestcoder", "jais2", "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna",
        "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama4_text", "longcat_flash", "mamba", "mamba2",
        "mellum", "mimo_v2_flash", "minicpm3", "minimax", "minimax_m2", "minimax_m3_vl_text",
        "ministral", "ministral3", "mixtral", "modernbert-decoder", "mpt", "nanochat", "nemotron",
        "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid", "olmoe", "persimmon", "phi",
        "phimoe", "qwen2_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next",
        "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3", "solar_open", "stablelm", "starcoder2",
        "vaultgemma", "xglm", "youtu", "zamba2", "zaya",
    )
)  # fmt: skip
"""The `model_type`s of config.json that are served so."""

INNER_TYPES = frozenset(
    (
        "cosmos3_edge_text", "emu3_text_model", "hunyuan_vl_text", "mistral4", "mllama_text_model",
        "muse_glimmer_text", "paddleocr_vl_text",
    )
)  # fmt: skip
"""Those of decoders that AutoModelForCausalLM does not know: they are parts of larger models."""

BUILT_AS: dict[str, tuple[str, ...]] = {
    "LlamaForCausalLM": ("exaone", "internlm3", "iquestcoder"),
}
"""Those of which transformers makes a class of another type, by its name."""

_REFINED_WEB = {
    "n_head": "num_attention_heads", "n_head_kv": "num_kv_heads", "n_layer": "num_hidden_layers",
}  # fmt: skip
"""Fields of Falcons that were published before transformers knew them, by today's names."""

_BLOCKS = ("num_hidden_layers", "n_input_layers", "n_recurrent_layers", "n_output_layers")
"""Fields of a Dory that count attention and feed-forward as two."""

_ROPE_TYPES = frozenset(
    {None, "default", "dynamic", "linear", "llama3", "proportional", "xdrope", "yarn"}
)
"""Rotary frequencies that are one table for all rows: dynamic up to the model's own length, or by
alpha alone, as xdrope (HunYuan)."""

RECURRENT_TYPES = frozenset(
    (
        "bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba",
        "kimi_linear", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "minimax",
        "nemotron_h", "olmo_hybrid", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2",
        "zaya",
    )
)  # fmt: skip
"""Those of them that may have recurrent layers, beside those that attend or without any."""

_IDLE_MODULES = {
    **dict.fromkeys(("falcon_mamba", "jamba", "mamba"), ("dt_proj",)),
    "longcat_flash": ("classifier",),
}
"""Linear maps by the ends of their paths, of which mixers and routers read the weight: no adapter's
factors."""

INDEXED_TYPES = frozenset({"axk2", "deepseek_v32", "glm_moe_dsa", "hy_v4"})
"""Those of which an index chooses the positions that tokens see."""

_INDEXED = frozenset({"indexed_attention", "deepseek_sparse_attention"})
"""How transformers calls all of their layers, since 5.24 and before."""

_UNLIMITED = frozenset({"bloom", "falcon_mamba", "mamba", "mamba2"})
"""Those that take any length: no position is embedded. BLOOM's scores grow with a key's, others'
states with what was read."""

_LAYER_KINDS = frozenset({"attention", "full_attention", "sliding_attention", "chunked_attention"})


class GenericArchitecture(ModelArchitecture):
    """A decoder made of transformers' modules over the paged cache.

    settings: the whole config.json, for transformers' own config class.
    expert_parallel: whether ranks have whole experts.
    padded_tokens: tokens for images and sound, which are embedded as pad_token.
    outer_tokens: those that other parts of a larger model embed, the vocabulary's last.
    limited: whether max_position_embeddings is the model's own (else a guess, as it has ALiBi).
    """

    settings: dict[str, Any]
    expert_parallel: bool = False
    padded_tokens: tuple[int, ...] = ()
    pad_token: int = 0
    outer_tokens: tuple[OuterTokens, ...] = ()
    limited: bool = True

    @property
    def stretches(self) -> bool:
        """A model without positions takes any length."""
        return not self.limited

    @property
    def idle_layers(self) -> tuple[int, ...]:
        """Numbers of the layers that attend to images alone (Llama 3.2 Vision)."""
        if self.settings["model_type"] != "mllama_text_model":
            return ()
        given = self.settings.get("cross_attention_layers") or ()
        return tuple(layer for layer in given if layer in range(self.num_layers))

    @property
    def idle_modules(self) -> tuple[str, ...]:
        """Linear maps of which transformers reads the base weight alone, by their paths' ends."""
        return _IDLE_MODULES.get(self.settings["model_type"], ())

    @property
    def outer_parts(self) -> tuple[str, ...]:
        """Those that embed some tokens."""
        return tuple(tokens.part for tokens in self.outer_tokens)

    def with_expert_parallel(self, wanted: bool) -> Self:
        """The same model; whether it has experts is seen when its modules are built."""
        return self.model_copy(update={"expert_parallel": wanted})


def known_names(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config.json as transformers reads it today.

    Falcon's fields had other names. Dory's counts are of blocks, two of which are a layer.
    """
    kind = config.get("model_type")
    blocks = config.get("layer_types")
    if kind == "dory" and isinstance(blocks, list) and "mlp" in blocks:
        halved = {key: config[key] // 2 for key in _BLOCKS if isinstance(config.get(key), int)}
        return {**config, **halved, "layer_types": blocks[::2]}
    if kind not in ("RefinedWeb", "RefinedWebModel"):
        return config
    fields = {_REFINED_WEB.get(key, key): value for key, value in config.items()}
    # The first of the two is what Falcon 40B's code computes, whatever its config says.
    fields |= {"new_decoder_architecture": True} if kind == "RefinedWeb" else {}
    names = [re.sub("^RW", "Falcon", name) for name in config.get("architectures") or ()]
    return {**fields, "model_type": "falcon", "architectures": names}


def parse(name: str, config: Mapping[str, Any]) -> GenericArchitecture | padded.PaddedArchitecture:
    """Normalise the config.json of architecture `name`; ArchitectureError names what is wrong.

    What cannot be paged is a PaddedArchitecture that says why.
    """
    found = padded.parse(name, config)
    reason = _obstacle(config)
    if reason is None and not found.limited and config["model_type"] not in _UNLIMITED:
        reason = "config.json does not give max_position_embeddings"
    if reason is not None:
        return found.model_copy(update={"reason": reason})
    shared = {key: getattr(found, key) for key in ModelArchitecture.model_fields}
    settings = dict(config)
    if settings["model_type"] in INDEXED_TYPES:
        # All are alike, and each version of transformers has a name for them.
        settings.pop("layer_types", None)
    return GenericArchitecture(**shared, settings=settings, limited=found.limited)


def _obstacle(config: Mapping[str, Any]) -> str | None:
    """Return why a model cannot be paged; None for one that can."""
    kind = config.get("model_type")
    if kind not in PAGED_TYPES | INNER_TYPES:
        unknown = f"model_type {kind} is not among those with a paged implementation"
        return not_paged.REASONS.get(str(kind), unknown)
    ropes = {rope.get("rope_type", rope.get("type")) for rope in _ropes(config)} - _ROPE_TYPES
    if ropes:
        return f"rope_type {', '.join(sorted(map(str, ropes)))} is not served paged for {kind}"
    layers = {*(config.get("layer_types") or ())} - _LAYER_KINDS
    if kind in INDEXED_TYPES:
        layers -= _INDEXED
    if layers and kind not in RECURRENT_TYPES:
        return f"layer_types {', '.join(sorted(layers))} are not served paged"
    if kind == "falcon" and config.get("alibi"):
        return "alibi: transformers rounds Falcon's biases to bfloat16, by each key's position"
    if config.get("slow_but_exact") and config.get("pretraining_tp", 1) > 1:
        return "slow_but_exact: transformers leaves biases out then"
    if kind == "dory":
        _check_loops(config)
    if kind == "minimax" and config.get("sliding_window") is not None:
        raise ArchitectureError(
            f"sliding_window ({config['sliding_window']}): transformers' MiniMax heeds it in a "
            "prompt and no longer when it generates, so answers would depend on how a text is cut: "
            "remove it from config.json"
        )
    table = config.get("vocab_size_per_layer_input") or config["vocab_size"]
    is_read = kind == "gemma4_text" and config.get("hidden_size_per_layer_input")
    if is_read and table < config["vocab_size"]:
        raise ArchitectureError(
            f"vocab_size_per_layer_input ({table}) is below vocab_size ({config['vocab_size']}): "
            "transformers fails at tokens that the table lacks"
        )
    # Between tokens of images alone ("vision") is none of a text's.
    if config.get("use_bidirectional_attention") not in (None, False, "vision"):
        raise ArchitectureError(
            "use_bidirectional_attention: tokens that see later ones cannot be generated one by one"
        )
    return None


def _check_loops(config: Mapping[str, Any]) -> None:
    """Refuse a Dory of which transformers answers otherwise when a prompt is cut, or fails."""
    loops = config.get("n_recurrent_loops", 2)
    if config.get("recurrent_kv_cache_mode") == "last_loop" and loops != 1:
        raise ArchitectureError(
            "recurrent_kv_cache_mode (last_loop): transformers computes a prompt in one piece "
            "otherwise than token by token, so answers would depend on how it is cut: set per_loop"
        )
    first, last = config.get("n_input_layers", 8), config.get("n_output_layers", 8)
    count = config["num_hidden_layers"]
    if min(first, last) < 0 or first + last > count:
        raise ArchitectureError(
            f"n_input_layers, n_output_layers ({first}, {last}) are no parts of a model of "
            f"{count} layers: transformers fails on them"
        )


def _ropes(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The rotary settings: one, or one for each kind of layer, None for kinds without.

    ZAYA1's files have a type beside those of the kinds, which transformers does not read.
    """
    for key in ("rope_parameters", "rope_scaling"):
        given = config.get(key) or {}
        parts = [value for value in given.values() if isinstance(value, Mapping)]
        yield from parts or [given]
