"""Chat templates as they lie beside a model or an adapter: text, not yet compiled."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import msgspec

_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token",
                  "mask_token")  # fmt: skip


class TemplateSource(msgspec.Struct, frozen=True):
    """A Jinja template and its special tokens by role; "" is no template."""

    text: str = ""
    special_tokens: dict[str, str] = {}


def read_template(folder: Path) -> TemplateSource:
    """A folder's chat template: its own file first, else the default of tokenizer_config.json.

    ValueError when the files cannot be read as what they should be.
    """
    path = folder / "tokenizer_config.json"
    try:
        config: Any = json.loads(path.read_text("utf-8")) if path.is_file() else {}
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path.name} must hold an object")
    file = folder / "chat_template.jinja"
    text = file.read_text("utf-8") if file.is_file() else config.get("chat_template")
    if isinstance(text, list):
        named = {entry["name"]: entry["template"] for entry in text if _is_named(entry)}
        text = named.get("default")
    if not isinstance(text, str | None):
        raise ValueError(f"chat_template in {path.name} must be a text or a list of named texts")
    return TemplateSource(text or "", _special_tokens(config))


def _is_named(entry: Any) -> bool:
    return isinstance(entry, dict) and {"name", "template"} <= entry.keys()


def _special_tokens(config: Mapping[str, Any]) -> dict[str, str]:
    """Special tokens by role; a config has each as a string or as an object with `content`."""
    found = {name: config[name] for name in _SPECIAL_NAMES if config.get(name)}
    return {
        name: str(token.get("content", "") if isinstance(token, dict) else token)
        for name, token in found.items()
    }
