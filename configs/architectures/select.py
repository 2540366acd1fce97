"""The one place that knows which file reads which architecture's config.json."""

import json
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

from configs.architectures.base import ArchitectureError, ModelArchitecture

FAMILIES: dict[str, str] = {
    "GPT2LMHeadModel": "configs.architectures.gpt2",
    "GPTNeoXForCausalLM": "configs.architectures.gpt_neox",
    "LlamaForCausalLM": "configs.architectures.llama",
    "MistralForCausalLM": "configs.architectures.llama",
    "Qwen2ForCausalLM": "configs.architectures.llama",
    "Qwen3ForCausalLM": "configs.architectures.llama",
    "GraniteForCausalLM": "configs.architectures.llama",
    "Phi3ForCausalLM": "configs.architectures.llama",
    "SolarForCausalLM": "configs.architectures.llama",
    "OPTForCausalLM": "configs.architectures.opt",
}
"""Architecture to the module whose `parse(name, config)` makes its frozen spec."""


def load_architecture(folder: Path) -> ModelArchitecture:
    """Read `folder`/config.json; ArchitectureError says what is missing or not supported."""
    path = folder / "config.json"
    if not path.is_file():
        raise ArchitectureError(f"{folder} holds no config.json: is this a model's folder?")
    return parse_architecture(json.loads(path.read_text(encoding="utf-8")))


def parse_architecture(config: Mapping[str, Any]) -> ModelArchitecture:
    """Normalise a config.json; ArchitectureError for unknown architectures and settings."""
    names = config.get("architectures") or []
    for name in names:
        if name in FAMILIES:
            parsed: ModelArchitecture = import_module(FAMILIES[name]).parse(name, config)
            return parsed
    raise ArchitectureError(
        f"architecture {', '.join(map(str, names)) or '(none named)'} is not supported; "
        f"known: {', '.join(sorted(FAMILIES))}"
    )
