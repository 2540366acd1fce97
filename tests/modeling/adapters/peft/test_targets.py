"""Which modules a config means: compared with PEFT itself, module by module."""

import json
import random
import re
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from configs.wire.adapters import AdapterError
from tests.modeling.adapters.lora_files import parse_config

LINEARS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
SIZES: dict[str, Any] = {
    "hidden_size": 8,
    "num_hidden_layers": 12,
    "num_attention_heads": 2,
    "vocab_size": 8,
}

Fields = Mapping[str, Any]


def llama() -> PreTrainedModel:
    with torch.device("meta"):
        return LlamaForCausalLM(LlamaConfig(**SIZES, intermediate_size=8))


def gpt2() -> PreTrainedModel:
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(n_embd=8, n_layer=12, n_head=2, vocab_size=8))


MODELS = {"llama": llama, "gpt2": gpt2}


def linears(model: PreTrainedModel) -> list[str]:
    """Paths of what adapters may change inside layers."""
    kinds = ("Linear", "Conv1D")
    found = (name for name, module in model.named_modules() if type(module).__name__ in kinds)
    return [name for name in found if name != "lm_head"]


def by_peft(model: PreTrainedModel, fields: Fields) -> set[str] | None:
    """Paths that PEFT adapts; None where it takes no such config, or no module fits."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            # As it comes out of the file.
            config = LoraConfig(r=2, **json.loads(json.dumps(fields)))
            adapted = get_peft_model(model, config)
        except (ValueError, TypeError, re.error):
            return None
    return {name.replace(".base_layer", "") for name in adapted.targeted_module_names}


def by_us(paths: list[str], fields: Fields) -> set[str] | None:
    try:
        plan = parse_config({"peft_type": "LORA", "r": 2, **fields})
    except AdapterError:
        return None
    return {path for path in paths if plan.left_out_by(path, is_linear=True) is None}


def check(kind: str, fields: Fields) -> set[str]:
    model = MODELS[kind]()
    paths = linears(model)
    theirs = by_peft(model, fields)
    assert (by_us(paths, fields) or set()) == (theirs or set()) & set(paths), fields
    return theirs or set()


PATHS = [f"model.layers.{i}.self_attn.{name}" for i in range(12) for name in ("q_proj", "v_proj")]

CASES: dict[str, Fields] = {
    "ends": {"target_modules": ["q_proj", "mlp.up_proj"]},
    "an end of a name is no end of a path": {"target_modules": ["proj", "_proj", "up_proj"]},
    "parts in the middle": {"target_modules": ["attn", "layers.40", "odel", "v_proj"]},
    "whole paths": {"target_modules": PATHS[:3]},
    "many whole paths": {"target_modules": PATHS},
    "names are no patterns": {"target_modules": [".*q_proj", "q.proj", "v_proj"]},
    "none": {"target_modules": []},
    "an empty name": {"target_modules": ["", "q_proj"]},
    "all linear": {"target_modules": "all-linear"},
    "in capitals": {"target_modules": "All-Linear"},
    "all linear of a list": {"target_modules": ["all-linear", "q_proj"]},
    "a name as a pattern": {"target_modules": "q_proj"},
    "an empty pattern": {"target_modules": ""},
    "a pattern": {"target_modules": r".*\.(q|v)_proj"},
    "a pattern that fits in part": {"target_modules": r"model\.layers\.1"},
    "a pattern with an anchor": {"target_modules": r"^model\.layers\.1?[02]\..*_proj$"},
    "a pattern that looks ahead": {"target_modules": r"^(model\.layers)(?!.*(mlp|emb)).*_proj"},
    "a pattern of two": {"target_modules": r"(?:.*?mlp.*?(?:up|down)_proj)|(?:\bmodel\..*q_proj)"},
    "no pattern": {"target_modules": "(q_proj"},
    "missing": {"target_modules": None, "exclude_modules": ["v_proj", "q_proj"]},
    "but some": {"target_modules": "all-linear", "exclude_modules": ["up_proj", "layers.0.mlp"]},
    "but a path": {"target_modules": ["q_proj"], "exclude_modules": PATHS[:3]},
    "but a pattern": {"target_modules": ["q_proj"], "exclude_modules": r".*\.1\d?\..*"},
    "but a pattern that fits in part": {"target_modules": ["q_proj"], "exclude_modules": "model"},
    "but none": {"target_modules": ["q_proj"], "exclude_modules": []},
    "but all": {"target_modules": ["q_proj"], "exclude_modules": ["q_proj"]},
    "a layer": {"target_modules": ["q_proj"], "layers_to_transform": 1},
    "the first layer": {"target_modules": ["q_proj"], "layers_to_transform": 0},
    "layers": {"target_modules": ["q_proj"], "layers_to_transform": [1, 11, 40]},
    "no layers": {"target_modules": ["q_proj"], "layers_to_transform": []},
    "true is one": {"target_modules": ["q_proj"], "layers_to_transform": True},
    "layers of whole paths": {"target_modules": [*PATHS[:5], "k_proj"], "layers_to_transform": [1]},
    "layers of a list": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "layers",
    },
    "layers of a path": {
        "target_modules": ["q_proj", "c_attn"],
        "layers_to_transform": [1],
        "layers_pattern": ["transformer.h", "model.layers"],
    },
    "layers of part of a name": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["ayers"],
    },
    "layers of another list": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": ["blocks"],
    },
    "no list": {"target_modules": ["q_proj"], "layers_to_transform": [1], "layers_pattern": []},
    "no list's name": {
        "target_modules": ["q_proj"],
        "layers_to_transform": [1],
        "layers_pattern": "",
    },
    "a list alone": {"target_modules": ["q_proj"], "layers_pattern": "layers"},
    "layers of a pattern": {"target_modules": ".*q_proj", "layers_to_transform": [1]},
    "layers of all": {"target_modules": "all-linear", "layers_to_transform": [1]},
    "a list of all": {"target_modules": "all-linear", "layers_pattern": "layers"},
    "saved whole": {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]},
}
"""Changes of a config; those of target_modules that fit nothing are refused by PEFT."""


@pytest.mark.parametrize("name", [name for name in CASES if name != "missing"])
def test_modules_are_those_of_peft(name: str) -> None:
    check("llama", CASES[name])


def test_missing_targets_are_not_guessed() -> None:
    """PEFT takes q_proj and v_proj of a Llama, and something else elsewhere."""
    fields = {"target_modules": None}
    assert len(by_peft(llama(), fields) or ()) == 24
    with pytest.raises(AdapterError, match="target_modules is missing"):
        parse_config({"peft_type": "LORA", **fields})


def test_parameters_alone_need_no_targets() -> None:
    """PEFT guesses none either, for models that it does not know."""
    fields = {"target_modules": None, "target_parameters": ["mlp.up_proj.weight"]}
    plan = parse_config({"peft_type": "LORA", **fields})
    assert plan.left_out_by("model.layers.0.mlp.up_proj", is_linear=True) is None
    assert plan.left_out_by("model.layers.0.mlp.down_proj", is_linear=True) == "target_modules"


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["c_proj"]},
        {"target_modules": ["mlp.c_proj", "c_attn"], "layers_to_transform": [1, 10]},
        {"target_modules": r"transformer\.h\.\d\.attn\.c_.*"},
        {"target_modules": "all-linear", "exclude_modules": ["attn.c_proj"]},
        {"target_modules": ["c_fc"], "layers_to_transform": [2], "layers_pattern": "h"},
    ],
)
def test_modules_of_gpt2_are_those_of_peft(fields: Fields) -> None:
    assert check("gpt2", {**fields, "fan_in_fan_out": True})


@pytest.mark.parametrize("seed", range(30))
def test_random_configs_mean_the_same_as_in_peft(seed: int) -> None:
    rng = random.Random(seed)
    ends = [*LINEARS, "self_attn.q_proj", "1.mlp.up_proj", "layers.10.mlp.down_proj", *PATHS[:6]]
    named: dict[str, Any] = {"target_modules": rng.sample(ends, rng.randint(1, 5))}
    if rng.random() < 0.5:
        named["layers_to_transform"] = rng.sample(range(14), rng.randint(0, 6))
        if rng.random() < 0.5:
            lists = ["layers", "h", "model.layers", "model", "self_attn"]
            named["layers_pattern"] = rng.sample(lists, rng.randint(1, 2))
    pattern = f"(model|x).*({'|'.join(rng.sample(ends, 3))})".replace("1", r"\d+")
    fields: dict[str, Any] = {"target_modules": pattern}
    if rng.random() < 0.7:
        fields = named
    if rng.random() < 0.4:
        text = rf".*\.\d?{rng.randint(0, 9)}\..*"
        fields["exclude_modules"] = rng.sample(ends, 2) if rng.random() < 0.5 else text
    check("llama", fields)


def test_a_long_list_with_layers_is_never_more_than_peft_takes(tmp_path: Path) -> None:
    """From 20 names on PEFT may shorten them, and then their layers count."""
    fields = {"target_modules": PATHS, "layers_to_transform": [3]}
    model = llama()
    ours = by_us(linears(model), fields)
    assert ours is not None
    assert ours <= (by_peft(model, fields) or set())
