"""A random model's files in the forms in which people publish them."""

import json
import random
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import PreTrainedConfig

from tests.checkpoints_padded import randomise, randomise_scales
from tests.checkpoints_stacks import class_of
from tests.modeling.models.tiny_causal import build

FILE = "model.safetensors"

ODD_FIELDS: tuple[dict[str, Any], ...] = (
    {"architectures": None},
    {"auto_map": {"AutoModelForCausalLM": "modeling_other.OtherForCausalLM"}},
    {"pad_token_id": -1},
    {"eos_token_id": [2, 5]},
    {"use_cache": False},
    {"_attn_implementation": "flash_attention_2", "unknown_field": 3},
)
"""What config.json may say besides."""

NULLABLE = ("head_dim", "num_key_value_heads", "sliding_window", "attention_bias", "mlp_bias")


def write_model(
    rng: random.Random, folder: Path, config: PreTrainedConfig, *, larger: bool
) -> list[str]:
    """Write a random model of a config, and return what is odd about its files.

    larger: it is a model of which the decoder alone is served.
    """
    model = _larger(config) if larger else build(config)
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            randomise(name, parameter, generator)
        randomise_scales(model, generator)
    model.tie_weights()
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    shard = rng.choice(("5GB", "5GB", "20KB"))
    model.to(dtype).save_pretrained(folder, max_shard_size=shard)
    if larger:
        return [str(dtype), shard]
    said = [str(dtype), shard, *_rewrite_config(rng, folder / "config.json", config)]
    if (folder / FILE).exists() and rng.random() < 0.4:
        said += _rewrite_weights(rng, folder, model)
    return said


def _larger(config: Any) -> Any:
    return getattr(transformers, class_of(config.model_type))(config).float()


def _rewrite_weights(rng: random.Random, folder: Path, model: Any) -> list[str]:
    """Save a tied head twice, a decoder without its prefix, types side by side, and pickles."""
    tensors, said = load_file(folder / FILE), []
    ends = model.get_input_embeddings(), model.get_output_embeddings()
    head = next((name for name, each in model.named_modules() if each is ends[1]), "")
    tied = model.config.tie_word_embeddings and f"{head}.weight" not in tensors
    prefix = f"{model.base_model_prefix}."
    if tied and rng.random() < 0.3:
        tensors[f"{head}.weight"] = ends[0].weight.detach().clone()
        said.append("a tied head's copy")
    elif tied and rng.random() < 0.3 and all(key.startswith(prefix) for key in tensors):
        tensors = {key.removeprefix(prefix): value for key, value in tensors.items()}
        said.append("no prefix")
    if rng.random() < 0.3:
        tensors = {
            key: value.to(torch.bfloat16) if rng.random() < 0.3 else value
            for key, value in tensors.items()
        }
        said.append("two types")
    (folder / FILE).unlink()
    if rng.random() < 0.3:
        _pickle(folder, tensors)
        return [*said, "pickles"]
    save_file(tensors, folder / FILE, metadata={"format": "pt"})
    return said


def _pickle(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write two files of torch.save and their index."""
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for part in (0, 1):
        file = f"pytorch_model-0000{part + 1}-of-00002.bin"
        torch.save({name: tensors[name] for name in names[part::2]}, folder / file)
        weight_map |= dict.fromkeys(names[part::2], file)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "pytorch_model.bin.index.json").write_text(json.dumps(index), encoding="utf-8")


def _rewrite_config(rng: random.Random, path: Path, config: PreTrainedConfig) -> list[str]:
    """Write config.json as older tools did, or by hand: what goes without saying is left out."""
    fields = json.loads(path.read_text(encoding="utf-8"))
    said = _old_names(rng, fields) + _unsaid_layers(rng, fields, config)
    if rng.random() < 0.35:
        usual = type(config)().to_dict()
        unsaid = [
            key
            for key, value in fields.items()
            if key not in ("model_type", "architectures")
            and key in usual
            and usual[key] == value
            and rng.random() < 0.6
        ]
        for key in unsaid:
            del fields[key]
        said.append(f"unsaid {unsaid}")
    if rng.random() < 0.25:
        odd = rng.choice(ODD_FIELDS)
        fields.update(odd)
        said.append(f"{odd}")
    for key in NULLABLE:
        if key in fields and rng.random() < 0.04:
            fields[key] = None
            said.append(f"{key}=null")
    path.write_text(json.dumps(fields), encoding="utf-8")
    return said


def _old_names(rng: random.Random, fields: dict[str, Any]) -> list[str]:
    """Write the type and the rotary settings as transformers 4 had them."""
    said = []
    if "dtype" in fields and rng.random() < 0.35:
        fields["torch_dtype"] = fields.pop("dtype")
        said.append("torch_dtype")
    rope = fields.get("rope_parameters") or {}
    if "rope_type" in rope and rng.random() < 0.5:
        rope = dict(fields.pop("rope_parameters"))
        fields["rope_theta"] = rope.pop("rope_theta", 10000.0)
        if "partial_rotary_factor" in rope:
            fields["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
        if rng.random() < 0.5:
            rope["type"] = rope.pop("rope_type")
        is_default = "default" in rope.values()
        fields["rope_scaling"] = None if is_default else rope
        said.append(f"rope_scaling={fields['rope_scaling']}")
    local = rope.get("sliding_attention") or {}
    if fields["model_type"] == "gemma3_text" and local.get("rope_type") == "default":
        full = dict(fields.pop("rope_parameters")["full_attention"])
        fields["rope_theta"] = full.pop("rope_theta")
        fields["rope_local_base_freq"] = local["rope_theta"]
        fields["rope_scaling"] = None if full["rope_type"] == "default" else full
        said.append("rope_local_base_freq")
    return said


def _unsaid_layers(
    rng: random.Random, fields: dict[str, Any], config: PreTrainedConfig
) -> list[str]:
    """Leave layer_types out where transformers makes the same of a pattern, or of nothing."""
    if "layer_types" not in fields or rng.random() < 0.5:
        return []
    others = {key: fields[key] for key in fields if key not in ("layer_types", "model_type")}
    patterns: list[dict[str, Any]] = [{}]
    patterns += [{"sliding_window_pattern": each} for each in (2, 3, "LG")]
    patterns += [{"full_attention_interval": 2}, {"global_attn_every_n_layers": 2}]
    for pattern in patterns:
        try:
            made: Any = type(config)(**{**others, **pattern})
        except Exception:
            continue  # The class knows no such pattern.
        if list(made.layer_types or ()) == fields["layer_types"]:
            del fields["layer_types"]
            fields.update(pattern)
            return [f"layer_types unsaid {pattern}"]
    return []
