"""Whole linear maps that adapters bring (modules_to_save): PEFT's answers, beside others."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterError
from modeling.adapters import whole_linears
from modeling.adapters.bank import DeviceAdapter
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.token_rows import groups_of
from modeling.runner.adapter_check import adaptable, judge
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.modeling.kinds import WHOLE_LINEARS as NAMES
from tests.modeling.kinds import once
from tests.modeling.parity.comparison import (
    BASE,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)

FILE = "adapter_model.safetensors"
WEIGHT = "base_model.model.model.layers.0.self_attn.o_proj.weight"


def setting(family: str, ranks: int, *names: str, **more: Any) -> Setting:
    (variant,) = (variant for known, variant in NAMES if known == family)
    return Setting(family, variant, ranks, names, linears=NAMES[family, variant], **more)


@pytest.mark.parametrize(("family", "_variant", "ranks"), once("whole"))
def test_together(world: World, family: str, _variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, setting(family, ranks, "whole", BASE, "one", "plain", rejoins_at=3))


@pytest.mark.parametrize("name", ["whole", "biased"])
def test_alone(world: World, name: str) -> None:
    compare(world, setting("gpt2_whole", 2, name, chunk=WHOLE))


def test_in_recurrent_layers(world: World) -> None:
    """Those compute their rows by themselves, so they have the adapters of these alone."""
    names = ("in_proj_qkvz", "out_proj")
    asked = Setting("mixers_whole", "qwen3_next", 1, ["whole", BASE, "plain"], linears=names)
    compare(world, asked)


def test_under_the_scheduler(world: World) -> None:
    """With prefix hits, and after a loss of the ranks."""
    asked = setting("llama_whole", 2, "whole", BASE, "whole", "one", lost_at=14)
    compare(world, dataclasses.replace(asked, lengths=[35, 35, 35, 20]))


@pytest.mark.parametrize("fault", ["left out", "for all", "of the first layer", "no bias"])
def test_a_map_that_is_wrong(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "left out":
        monkeypatch.setattr(whole_linears.WholeLinears, "replace", lambda *args: None)
    elif fault == "for all":

        def for_all(*args: Any) -> Any:
            return [type(group)(slice(None), group.adapter) for group in groups_of(*args)]

        monkeypatch.setattr(whole_linears, "groups_of", for_all)
    elif fault == "of the first layer":
        matrix = DeviceAdapter.matrix
        monkeypatch.setattr(
            DeviceAdapter, "matrix", lambda *args: (found := matrix(*args)).roll(len(found) // 2, 0)
        )
    else:
        replace: Any = whole_linears.WholeLinears.replace
        monkeypatch.setattr(
            whole_linears.WholeLinears, "replace", lambda *args: replace(*args[:-1], None)
        )
    expect_mismatch(world, setting("gpt2_whole", 1, "whole", BASE))


def test_a_raw_state_is_read_as_what_peft_saves(world: World, tmp_path: Path) -> None:
    """With the adapter's name in it, and the base model's own weights beside."""
    model = world.model("llama_whole", "gqa")
    saved = {"modules_to_save": ["o_proj", "norm"], "trainable_token_indices": [3, 4]}
    recipe = AdapterRecipe(target_modules=("q_proj",), extra=saved)
    folder = write_adapter(tmp_path / "it", model, recipe)
    projections = adaptable(opened(model, "o_proj"))
    adapter = open_adapter(folder, projections, 64)
    expected = list(adapter.read_matrices())
    raw = {}
    for key, tensor in load_file(folder / FILE).items():
        path, _, name = key.rpartition(".")
        if "lora_" in key:
            raw[f"{path}.default.{name}"] = tensor
        elif "token_adapter" in key:
            raw[f"{key}.default"] = tensor
        else:
            raw[f"{path}.modules_to_save.default.{name}"] = tensor
            raw[f"{path}.original_module.{name}"] = tensor.clone()
    save_file(raw, folder / FILE)
    found = open_adapter(folder, projections, 64)
    assert found.ranks == adapter.ranks
    verdict = judge(folder, projections, opened(model).adapters, lambda *_: None)
    assert (verdict.num_whole, verdict.num_norms, verdict.num_tokens) == (2, 5, 2)
    for one, other in zip(found.read_matrices(), expected, strict=True):
        assert one.position == other.position
        assert one.rows.equal(other.rows)


def opened(model: Path, *names: str) -> EngineConfig:
    """A server of that model that takes these whole maps."""
    config = engine_config(model)
    adapters = config.adapters.model_copy(update={"whole_linears": dict.fromkeys(names, 1)})
    return config.model_copy(update={"adapters": adapters})


SAID = {
    "not opened": r"start it with adapters.whole_linears {o_proj: 1}",
    "shape": r"o_proj.weight has shape \[31, 32\], this model needs \[32, 32\]",
    "missing": f"modules_to_save requires {WEIGHT}, of which the file holds 0",
    "a parent": "'self_attn' is none of what adapters may bring whole",
    "twice": "o_proj is adapted twice",
}


@pytest.mark.parametrize("fault", SAID)
def test_what_is_refused(world: World, tmp_path: Path, fault: str) -> None:
    model = world.model("llama_whole", "gqa")
    recipe = AdapterRecipe(target_modules=("q_proj",), extra={"modules_to_save": ["o_proj"]})
    folder = write_adapter(tmp_path / "it", model, recipe)
    tensors = load_file(folder / FILE)
    if fault == "shape":
        tensors[WEIGHT] = tensors[WEIGHT][:-1].clone()
    elif fault == "missing":
        del tensors[WEIGHT]
    elif fault == "twice":
        for side in "AB":
            key = f"base_model.model.model.layers.0.self_attn.q_proj.lora_{side}.weight"
            tensors[key.replace("q_proj", "o_proj")] = tensors[key].clone()
    save_file(tensors, folder / FILE)
    if fault in ("a parent", "twice"):
        file, old = folder / "adapter_config.json", "self_attn" if fault == "a parent" else "o_proj"
        text = file.read_text().replace('"o_proj"', f'"{old}"')
        file.write_text(
            text if fault == "a parent" else text.replace('"q_proj"', '"q_proj", "o_proj"')
        )
    projections = adaptable(opened(model, *([] if fault == "not opened" else ["o_proj"])))
    with pytest.raises(AdapterError, match=SAID[fault]):
        open_adapter(folder, projections, 64)


def test_names_that_no_map_has(world: World) -> None:
    with pytest.raises(
        ValueError, match=r"whole_linears names router; .* are down_proj, gate_proj"
    ):
        adaptable(opened(world.model("llama_whole", "gqa"), "router"))
