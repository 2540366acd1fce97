"""EAGLE-3 heads, as their folder's config.json describes them.

There are two forms: that of the authors, SpecForge and Model Optimizer, and that of speculators,
which has the decoder's keys in `transformer_layer_config`.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import PositiveFloat, PositiveInt

from configs.architectures.base import Activation, ArchitectureError, activation, required
from configs.architectures.files import read_config
from configs.architectures.rope import Rope, RopeType, read_rope
from configs.base import Config

CONFIG_NAME = "config.json"

_DEFAULTS: dict[str, Any] = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 2048,
    "rope_theta": 10000.0,
}

_FIXED: dict[str, Any] = {
    "num_hidden_layers": 1,
    "tie_word_embeddings": False,
    "bias": False,
    "mlp_bias": False,
    "fc_norm": False,
    "norm_output": False,
    "norm_before_fc": False,
    "parallel_drafting": False,
    "use_aux_hidden_state": True,
    "use_input_layernorm_in_first_layer": True,
    "use_last_layernorm": True,
    "use_mtp_layernorm": False,
    "parallel_draft_step": 1,
    "logit_scale": 1.0,
    "quantization_config": None,
}
"""Settings that change what heads compute, with the only value that is computed here."""


class Eagle3Architecture(Config):
    """One decoder layer over embedded tokens beside the target model's states.

    draft_vocab_size: tokens that can be guessed; None: all, by the
    target's head where the files have none. layers: the target's layers after which states are
    read; (): the usual three. norm_before_residual: the stream begins with the normed state.
    """

    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    num_heads: PositiveInt
    num_kv_heads: PositiveInt
    head_dim: PositiveInt
    rms_norm_eps: PositiveFloat
    hidden_act: Activation
    rope: Rope
    draft_vocab_size: PositiveInt | None
    layers: tuple[int, ...] = ()
    norm_before_residual: bool = False

    def layers_of(self, num_layers: int) -> tuple[int, ...]:
        """Return the layers after which a target of so many layers is read."""
        # The authors read what enters layers 2, n / 2 and n - 3.
        found = self.layers or (1, num_layers // 2 - 1, num_layers - 4)
        if min(found) < 0 or max(found) >= num_layers:
            raise ArchitectureError(
                f"these heads read states behind layers {', '.join(map(str, found))}, and the "
                f"model has {num_layers}: name others in eagle_aux_hidden_state_layer_ids"
            )
        return found


def load_eagle3(folder: Path) -> Eagle3Architecture:
    """Read `folder`/config.json; ArchitectureError says what is missing or not supported."""
    path = folder / CONFIG_NAME
    return parse_eagle3(read_config(path), str(path))


def parse_eagle3(config: Mapping[str, Any], where: str) -> Eagle3Architecture:
    """Check a config of EAGLE-3 heads; where: its file, for messages."""
    if not _is_eagle3(config):
        raise ArchitectureError(f"{where} describes no EAGLE-3 heads")
    inner = config.get("transformer_layer_config") or {}
    eagle = config.get("eagle_config") or {}
    given = {**_DEFAULTS, **config, **inner}
    for key, only in _FIXED.items():
        value = eagle.get(key, given.get(key, only))
        if value != only:
            raise ArchitectureError(f"{where}: {key} {value!r} is not supported, only {only!r} is")
    rope = read_rope(given)
    if rope.type in (RopeType.LONGROPE, RopeType.DYNAMIC):
        raise ArchitectureError(f"{where}: rope type {rope.type.value} is not supported")
    hidden, heads = required(given, "hidden_size"), required(given, "num_attention_heads")
    return Eagle3Architecture(
        hidden_size=hidden,
        intermediate_size=required(given, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=given.get("num_key_value_heads") or heads,
        head_dim=given.get("head_dim") or hidden // heads,
        rms_norm_eps=given["rms_norm_eps"],
        hidden_act=activation(given["hidden_act"]),
        rope=rope,
        draft_vocab_size=config.get("draft_vocab_size"),
        layers=_layers(config, eagle, where),
        norm_before_residual=bool(config.get("norm_before_residual")),
    )


def _is_eagle3(config: Mapping[str, Any]) -> bool:
    names = config.get("architectures") or ()
    return "draft_vocab_size" in config or any("eagle3" in str(name).lower() for name in names)


def _layers(config: Mapping[str, Any], eagle: Mapping[str, Any], where: str) -> tuple[int, ...]:
    """Return the layers behind which states are read.

    In eagle_config they are named so. Outside of it, as vLLM and speculators have it, they are
    those that the states enter.
    """
    key = "eagle_aux_hidden_state_layer_ids"
    own, entered = eagle.get(key) or [], config.get(key) or []
    found = own or entered
    if not isinstance(found, list) or any(type(each) is not int for each in found):
        raise ArchitectureError(f"{where}: {key} is {found!r}, it must be a list of layers")
    return tuple(own or (each - 1 for each in entered))
