"""Random adapters of any model, made and saved by PEFT."""

import json
import random
import re
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from torch import nn
from transformers.pytorch_utils import Conv1D

from tests.modeling.models.sweep_truth import load

NO_LORA = {"falcon_h1": "out_proj", "nemotron_h": "out_proj"}
"""What PEFT takes no LoRA on, by model_type."""

BLOCKS = "self_attn|attention|attn|mlp|feed_forward|ffn|dense|mixer"


@dataclass(frozen=True)
class _Names:
    """Names in a model: linear maps by their paths and by their ends, norms, both ends."""

    linears: list[str]
    leaves: list[str]
    norms: list[str]
    ends: list[str]
    parameters: list[str]
    is_conv: bool


def write_random(rng: random.Random, folder: Path, model: Path) -> dict[str, Any]:
    """Write an adapter over a model's folder; returns its fields, {} where it has no linear maps.

    Fields that PEFT refuses together are drawn again; raises what PEFT does at last.
    """
    names = _names(load(model))
    for _ in range(5):
        fields = _draw(rng, names) if names.linears else {}
        try:
            return fields and _write(rng, folder, model, fields)
        except (ValueError, TypeError, AttributeError, NotImplementedError, RuntimeError):
            continue
    return _write(rng, folder, model, {"r": 2, "target_modules": names.linears[:1]})


def _names(model: Any) -> _Names:
    ends = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = dict(model.named_modules())
    left_out = NO_LORA.get(model.config.model_type)
    kinds = (nn.Linear, Conv1D)
    linears = [
        name
        for name, each in modules.items()
        if isinstance(each, kinds) and re.search(r"\.\d+\.", name) and _leaf(name) != left_out
    ]
    norms = {_leaf(name) for name, each in modules.items() if "norm" in type(each).__name__.lower()}
    experts = {
        ".".join(name.split(".")[-2:])
        for name, each in model.named_parameters()
        if each.ndim == 3 and "experts" in name
    }
    weights = {f"{'.'.join(name.split('.')[-2:])}.weight" for name in linears}
    return _Names(
        linears,
        sorted(set(map(_leaf, linears))),
        sorted(name for name in norms if not name.isdigit()),
        [_leaf(name) for name, each in modules.items() if any(each is end for end in ends)],
        sorted(experts or weights),
        any(isinstance(each, Conv1D) for each in modules.values()),
    )


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


def _some(rng: random.Random, names: Sequence[str], most: int = 99) -> list[str]:
    return rng.sample(names, rng.randint(1, min(most, len(names)))) if names else []


def _draw(rng: random.Random, names: _Names) -> dict[str, Any]:
    """Draw fields of a LoraConfig: always targets, any of the others rarely."""
    every = [*names.linears, *names.leaves, r".*\.1\..*", "layers.0"]
    tokens = sorted(rng.sample(range(3, 90), rng.choice((1, 3, 12))))
    some = _some(rng, names.leaves)
    rare: dict[str, tuple[float, Callable[[], Any]]] = {
        "exclude_modules": (0.1, lambda: rng.choice((_some(rng, names.leaves, 1), r".*\.1\..*"))),
        "rank_pattern": (
            0.25,
            lambda: {key: rng.choice((1, 5, 12)) for key in _some(rng, every, 2)},
        ),
        "alpha_pattern": (
            0.25,
            lambda: {key: rng.choice((2, 3.5)) for key in _some(rng, every, 2)},
        ),
        "use_rslora": (0.2, lambda: True),
        "use_dora": (0.13, lambda: True),
        "lora_bias": (0.06, lambda: True),
        "bias": (0.12, lambda: rng.choice(("all", "lora_only"))),
        "layers_to_transform": (0.1, lambda: rng.choice((0, [1], [0, 1]))),
        "modules_to_save": (0.14, lambda: _some(rng, [*names.norms, *names.ends, *some[:1]], 2)),
        "target_parameters": (0.2, lambda: _some(rng, names.parameters, 2)),
        "trainable_token_indices": (0.1, lambda: tokens),
        "init_lora_weights": (0.1, lambda: rng.choice((False, "gaussian", "orthogonal", "pissa"))),
    }
    fields = {name: draw() for name, (chance, draw) in rare.items() if rng.random() < chance}
    fields |= {"r": rng.choice((1, 2, 3, 8, 16)), "lora_alpha": rng.choice((1, 4, 8, 7.5))}
    fields |= {"lora_dropout": 0.1, "task_type": rng.choice(("CAUSAL_LM", None))}
    if names.is_conv:
        fields["fan_in_fan_out"] = rng.random() < 0.5
    alternatives = "|".join(map(re.escape, some))
    unsloth = rf"(?:.*?(?:language|text).*?(?:{BLOCKS}).*?(?:{alternatives}).*?)"
    unsloth += rf"|(?:\bmodel\.layers\.[\d]{{1,}}\.(?:{BLOCKS})\.(?:(?:{alternatives})))"
    ways: list[Any] = [some, some, [*some, *_some(rng, names.ends, 1)], "all-linear"]
    ways += [_some(rng, names.linears, 6), rf".*\.({alternatives})", unsloth]
    fields["target_modules"] = rng.choice(ways)
    return fields


def _write(rng: random.Random, folder: Path, model: Path, fields: dict[str, Any]) -> dict[str, Any]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PEFT warns of layouts and of what it renames.
        adapted = get_peft_model(load(model), LoraConfig(**fields))
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    as_it_was = rng.choice((".bias", "no name"))
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            if "magnitude" in name:
                parameter.mul_(1 + 0.3 * noise)
            elif "lora_" in name:
                parameter.copy_(0.2 * noise)
            elif parameter.requires_grad and not name.endswith(as_it_was):
                parameter.add_(0.1 * noise)
    with_ends = rng.choice(("auto", "auto", True, False))
    adapted.save_pretrained(str(folder), save_embedding_layers=with_ends)
    return {**fields, **_rewrite(rng, folder)}


def _rewrite(rng: random.Random, folder: Path) -> dict[str, Any]:
    """Round some factors to 16 bits, and leave what goes without saying out of some configs."""
    said: dict[str, Any] = {}
    path = folder / "adapter_model.safetensors"
    if rng.random() < 0.2:
        dtype = rng.choice((torch.bfloat16, torch.float16))
        half = {
            key: value.to(dtype) if "lora_" in key else value
            for key, value in load_file(path).items()
        }
        save_file(half, path, metadata={"format": "pt"})
        said["file"] = str(dtype)
    if rng.random() < 0.15:
        path, usual = folder / "adapter_config.json", LoraConfig().to_dict()
        fields = json.loads(path.read_text(encoding="utf-8"))
        kept = {
            key: value
            for key, value in fields.items()
            if key == "peft_type" or key not in usual or usual[key] != value or rng.random() < 0.4
        }
        path.write_text(json.dumps(kept), encoding="utf-8")
        said["unsaid"] = sorted(fields.keys() - kept)
    return said
