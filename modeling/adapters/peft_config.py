"""adapter_config.json: every field of PEFT's LoraConfig decided as served, ignored or refused.

An adapter is served exactly or not at all. A field that this table does not know is a refusal
unless its value says that nothing is asked of it (null, false, empty).
"""

import json
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from configs.adapters import AdapterError, AdapterRefusal
from configs.reading import read_text
from sharding.sources.base import MAX_TEXT_BYTES

CONFIG_NAME = "adapter_config.json"

SERVED = frozenset(
    {"peft_type", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern"}
    | {"init_lora_weights", "ensure_weight_tying", "modules_to_save"}
)

IGNORED: Mapping[str, str] = {
    "task_type": "which head was trained; a head of its own kind is refused by modules_to_save",
    "auto_mapping": "how PEFT finds the base class",
    "peft_version": "informational",
    "base_model_name_or_path": "informational; shapes are compared instead",
    "revision": "of the base model, informational",
    "inference_mode": "whether PEFT freezes the weights",
    "target_modules": "the tensors in the file say which modules are adapted",
    "exclude_modules": "the tensors in the file say which modules are adapted",
    "layers_to_transform": "the tensors in the file say which layers are adapted",
    "layers_pattern": "the tensors in the file say which layers are adapted",
    "lora_dropout": "training only",
    "fan_in_fan_out": "how the base weight lies in memory; A and B lie the same either way",
    "megatron_core": "names a module; megatron_config switches it on",
    "loftq_config": "init only; init_lora_weights says whether it was used",
    "eva_config": "init only; what it chose is in rank_pattern and alpha_pattern",
    "corda_config": "init only; init_lora_weights says whether it was used",
    "lora_ga_config": "init only; init_lora_weights says whether it was used",
    "velora_config": "changes the backward pass only; what the file holds of it is not read",
    "qalora_group_size": "read only when use_qalora is set",
    "runtime_config": "never saved",
}

REFUSED: Mapping[str, str] = {
    "bias": 'retrain with bias="none", or merge the biases into the base model',
    "lora_bias": "retrain with lora_bias=false",
    "use_dora": "retrain without DoRA, or merge the adapter into the base model",
    "trainable_token_indices": "merge the trained tokens into the base model",
    "alora_invocation_tokens": "activated LoRA is not served; retrain as plain LoRA",
    "target_parameters": "adapt modules (target_modules) instead of bare parameters",
    "layer_replication": "save the replicated model as a base model of its own",
    "megatron_config": "save the adapter without Megatron layers",
    "use_qalora": "convert the adapter to plain LoRA",
    "use_bdlora": "convert the adapter to plain LoRA",
    "monteclora_config": "convert the adapter to plain LoRA",
    "arrow_config": "a router over adapters is not served; name one adapter per request",
    "kasa_config": "convert the adapter to plain LoRA",
}

HARMLESS_INITS = frozenset({"gaussian", "eva", "orthogonal", "mica"})
"""Kinds of init_lora_weights that leave the base weights as they were (peft/tuners/lora/layer.py);
the others subtract from them, so that A and B alone do not give the trained model."""

MAX_QUANTIFIERS = 3
MAX_GROUPS = 3
MAX_ALTERNATIVES = 128
"""In one pattern: what bounds the time of a match to a polynomial of the module's path length."""

# A question mark is one too, but for those that begin a group's kind or make another one lazy.
_QUANTIFIER = re.compile(r"[*+{]|(?<![(*+?}])\?")


@dataclass(frozen=True)
class LoraPlan:
    """What an adapter_config.json says about ranks and scalings, module by module.

    rank_pattern, alpha_pattern: compiled in the file's order; the first match wins, as in PEFT.
    ensure_weight_tying: an adapted embedding and head were trained as one. modules_to_save:
    ends of paths whose weights the file holds whole.
    """

    rank: int
    alpha: float
    use_rslora: bool
    rank_pattern: tuple[tuple[re.Pattern[str], int], ...]
    alpha_pattern: tuple[tuple[re.Pattern[str], float], ...]
    ensure_weight_tying: bool = False
    modules_to_save: tuple[str, ...] = ()

    def rank_of(self, module: str) -> int:
        """Return the rank of a module, named by its path in the base model."""
        return next((r for p, r in self.rank_pattern if p.match(module)), self.rank)

    def scaling_of(self, module: str) -> float:
        """Return alpha / r of a module, or alpha / sqrt(r) with rsLoRA (arXiv:2312.03732)."""
        alpha = next((a for p, a in self.alpha_pattern if p.match(module)), self.alpha)
        rank = self.rank_of(module)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


def refuse(message: str, refusal: AdapterRefusal = AdapterRefusal.UNSUPPORTED) -> NoReturn:
    """Raise AdapterError."""
    raise AdapterError(refusal, message)


def read_config(folder: Path, within: Path | None = None) -> LoraPlan:
    """Read and judge the adapter_config.json of a folder; AdapterError names what is wrong.

    within: the folder that links must not lead out of.
    """
    path = folder / CONFIG_NAME
    if not path.is_file():
        refuse(f"no {CONFIG_NAME} among the adapter's files: it was not saved by PEFT")
    try:
        fields = json.loads(read_text(path, MAX_TEXT_BYTES, within))
    except OSError as error:
        refuse(f"{CONFIG_NAME} cannot be read: {error}; try again", AdapterRefusal.UNAVAILABLE)
    except (ValueError, RecursionError) as error:
        refuse(f"{CONFIG_NAME} is not valid JSON: {error}")
    if not isinstance(fields, dict):
        refuse(f"{CONFIG_NAME} must hold an object, found {type(fields).__name__}")
    return parse_config(fields)


def parse_config(fields: Mapping[str, object]) -> LoraPlan:
    """Judge every field and return the plan of ranks and scalings."""
    if fields.get("peft_type") != "LORA":
        refuse(
            f"peft_type {fields.get('peft_type')!r} is not served, only 'LORA': "
            "convert the adapter with peft's save_as_lora"
        )
    _check_init(fields.get("init_lora_weights", True))
    for name, value in fields.items():
        if name not in SERVED and name not in IGNORED:
            _check_unserved(name, value)
    return LoraPlan(
        rank=_rank("r", fields.get("r", 8)),
        alpha=_alpha("lora_alpha", fields.get("lora_alpha", 8)),
        use_rslora=_flag("use_rslora", fields.get("use_rslora")),
        rank_pattern=tuple(
            (_pattern("rank_pattern", key), _rank(f"rank_pattern[{key!r}]", value))
            for key, value in _mapping("rank_pattern", fields.get("rank_pattern")).items()
        ),
        alpha_pattern=tuple(
            (_pattern("alpha_pattern", key), _alpha(f"alpha_pattern[{key!r}]", value))
            for key, value in _mapping("alpha_pattern", fields.get("alpha_pattern")).items()
        ),
        ensure_weight_tying=_flag("ensure_weight_tying", fields.get("ensure_weight_tying")),
        modules_to_save=_names("modules_to_save", fields.get("modules_to_save")),
    )


def _check_init(value: object) -> None:
    """Refuse inits that moved a part of the base weights into A and B."""
    if isinstance(value, bool) or value is None:
        return
    if not isinstance(value, str) or value.lower() not in HARMLESS_INITS:
        refuse(
            f"init_lora_weights={value!r} is not served: it changes the base weights, which "
            "A and B alone do not carry; save it converted to plain LoRA (PEFT's "
            "path_initial_model_for_weight_conversion)"
        )


def _check_unserved(name: str, value: object) -> None:
    """Refuse a field that is set and that we would not honour."""
    # By identity: 0 equals False, yet an unknown field may mean something by 0.
    if value is None or value is False or value in ("", [], {}):
        return
    if name == "bias" and value == "none":
        return
    advice = REFUSED.get(name, "the field is unknown here; save the adapter as plain LoRA")
    refuse(f"{name}={_short(value)} is not served: {advice}")


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _rank(name: str, value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        refuse(f"{name}={_short(value)} must be a positive integer")
    return value


def _alpha(name: str, value: object) -> float:
    good = isinstance(value, int | float) and not isinstance(value, bool)
    if not good or not math.isfinite(float(str(value))):
        refuse(f"{name}={_short(value)} must be a finite number")
    return float(str(value))


def _flag(name: str, value: object) -> bool:
    if value is None or isinstance(value, bool):
        return bool(value)
    refuse(f"{name}={_short(value)} must be true or false")


def _names(name: str, value: object) -> tuple[str, ...]:
    # Empty values of any type are how a field is left out.
    if value is None or value is False or value in ("", [], {}):
        return ()
    if not isinstance(value, list) or not all(isinstance(each, str) and each for each in value):
        refuse(f"{name}={_short(value)} must be a list of names")
    return tuple(value)


def _mapping(name: str, value: object) -> dict[str, object]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        refuse(f"{name}={_short(value)} must be an object")
    return value


def _pattern(name: str, key: str) -> re.Pattern[str]:
    """Compile a pattern key as PEFT's get_pattern_key matches it: a regex for the path's end."""
    # A stranger's regex runs in our process: nested repetition could take for ever, and so could
    # many places that may each match in two ways.
    repeated = re.search(r"\)[*+{]", key) or len(_QUANTIFIER.findall(key)) > MAX_QUANTIFIERS
    num_bars = key.count("|")
    branched = num_bars and (num_bars > MAX_ALTERNATIVES or key.count("(") > MAX_GROUPS)
    if repeated or branched:
        refuse(
            f"{name} key {_short(key)} repeats or branches too much to be matched in bounded time: "
            "write the module names out"
        )
    try:
        return re.compile(rf"(.*\.)?({key})$")
    except re.error as error:
        refuse(f"{name} key {_short(key)} is not a regular expression: {error}")
