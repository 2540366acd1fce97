"""What a folder of sentence-transformers says of its model: pooling, length, activation."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from configs.architectures.base import ArchitectureError
from configs.architectures.files import read_json
from configs.wire.sampling import Pooling
from configs.wire.tasks import ScoreActivation

_POOLINGS = {
    "cls": Pooling.CLS,
    "mean": Pooling.MEAN,
    "max": Pooling.MAX,
    "lasttoken": Pooling.LAST,
}
_OLD_KEYS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
"""Names of the pooling before sentence-transformers 5."""

_SETTINGS = "config_sentence_transformers.json"

_ACTIVATIONS = {"Identity": ScoreActivation.NONE, "Sigmoid": ScoreActivation.SIGMOID}


def pooling_of(folder: Path) -> tuple[Pooling, bool]:
    """Return the pooling, and whether embeddings have the length 1; NONE for other folders."""
    modules = _read(folder / "modules.json")
    kinds = _kinds(modules)
    if not kinds:
        return Pooling.NONE, False
    unknown = set(kinds) - {"Transformer", "Pooling", "Normalize"}
    if unknown or kinds.count("Pooling") != 1:
        raise ArchitectureError(
            f"modules.json has {', '.join(kinds)}: of sentence-transformers' modules Transformer, "
            "one Pooling and Normalize are served"
        )
    prompt = _settings(folder).get("default_prompt_name")
    if prompt is not None:
        raise ArchitectureError(
            f"default_prompt_name ({prompt}) of {_SETTINGS} is not put before texts: remove it, "
            "and let clients send the prompt with their texts"
        )
    path = f"{modules[kinds.index('Pooling')]['path']}/config.json"
    config = _read(folder / path)
    if config is None:
        raise ArchitectureError(f"the folder lacks {path}, which modules.json names: copy it too")
    return _pooling(config), "Normalize" in kinds


def _kinds(modules: Any) -> list[str]:
    return [str(module["type"]).rsplit(".", 1)[-1] for module in modules or []]


def _pooling(config: Mapping[str, Any]) -> Pooling:
    given = config.get("pooling_mode", [name for key, name in _OLD_KEYS.items() if config.get(key)])
    modes = [given] if isinstance(given, str) else given or ["mean"]
    if len(modes) != 1 or modes[0] not in _POOLINGS:
        raise ArchitectureError(
            f"the pooling {', '.join(map(str, modes))} is not served; known: "
            f"{', '.join(_POOLINGS)}, one of them"
        )
    return _POOLINGS[modes[0]]


def longest_input(folder: Path) -> int | None:
    """Return how many tokens a text may have; None where the folder names no limit.

    It is max_seq_length, or the tokenizer's own limit.
    """
    own = _read(folder / "sentence_bert_config.json") or {}
    tokenizer = _read(folder / "tokenizer_config.json") or {}
    if own.get("do_lower_case") and not tokenizer.get("do_lower_case"):
        raise ArchitectureError(
            "do_lower_case of sentence_bert_config.json is not served for a tokenizer that keeps "
            "the case: set it in tokenizer_config.json, or to false"
        )
    found = own.get("max_seq_length") or tokenizer.get("model_max_length")
    return None if found is None else int(found)


def pair_activation(folder: Path, config: Mapping[str, Any]) -> ScoreActivation | None:
    """Return what a cross-encoder puts behind its logits; None: it does not say.

    config: its config.json, where versions before 5 say it.
    """
    others = set(_kinds(_read(folder / "modules.json"))) - {"Transformer"}
    if others:
        raise ArchitectureError(
            f"modules.json has {', '.join(sorted(others))}, which is not served behind a "
            "classification head"
        )
    own = config.get("sentence_transformers") or {}
    named = own.get("activation_fn") or config.get("sbert_ce_default_activation_function")
    named = named or _settings(folder).get("activation_fn")
    if named is None:
        return None
    kind = str(named).rsplit(".", 1)[-1]
    if kind not in _ACTIVATIONS:
        raise ArchitectureError(
            f"the activation {named} of scores is not served; known: {', '.join(_ACTIVATIONS)}"
        )
    return _ACTIVATIONS[kind]


def _settings(folder: Path) -> Any:
    return _read(folder / _SETTINGS) or {}


def _read(path: Path) -> Any:
    return read_json(path) if path.is_file() else None
