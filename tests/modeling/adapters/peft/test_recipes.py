"""Adapters of one training recipe: checked once, each with its own numbers."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.wire.adapters import AdapterError
from modeling.adapters.peft import folder, recipes
from modeling.adapters.peft.adapter import PeftAdapter
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.peft.recipes import Recipes
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

PROJECTIONS = (UP, DOWN)
RANKS = [4, 4, 4]


def tensors(seed: int) -> dict[str, Tensor]:
    return factors(UP, RANKS, seed) | factors(DOWN, RANKS, seed)


@pytest.fixture
def checks(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What ran of the checks."""
    ran, whole = [], folder._check_file

    def check(*given: object) -> PeftAdapter:
        ran.append("check")
        return whole(*given)  # type: ignore[arg-type]

    monkeypatch.setattr(folder, "_check_file", check)
    return ran


def numbers(adapter: PeftAdapter) -> dict[str, Tensor]:
    paths = {position: module for module, position in adapter.modules.items()}
    return {
        f"base_model.model.{paths[read.position]}.lora_{end}.weight": tensor
        for read in adapter.read()
        for end, tensor in (("A", read.a), ("B", read.b))
    }


def test_each_has_its_own_numbers(tmp_path: Path, checks: list[str]) -> None:
    known = Recipes()
    for seed in (1, 2, 3):
        folder = write_lora(tmp_path / str(seed), tensors(seed), lora_alpha=4)
        found = numbers(open_adapter(folder, PROJECTIONS, 8, recipes=known))
        assert found.keys() == tensors(seed).keys()
        assert all(torch.equal(found[key], tensor) for key, tensor in tensors(seed).items())
    assert checks == ["check"]


def test_another_config_or_header_is_another_recipe(tmp_path: Path, checks: list[str]) -> None:
    known, plain = Recipes(), tensors(1)
    renamed = {key.replace("layers.2.up", "layers.9.up"): each for key, each in plain.items()}
    assert len(renamed) == len(plain)
    folder = write_lora(tmp_path, plain, lora_alpha=4)
    once = open_adapter(folder, PROJECTIONS, 8, recipes=known)
    folder = write_lora(tmp_path, plain, lora_alpha=8)
    twice = open_adapter(folder, PROJECTIONS, 8, recipes=known)
    for one, other in zip(once.read(), twice.read(), strict=True):
        assert torch.equal(2 * one.b, other.b)
    folder = write_lora(tmp_path, renamed, lora_alpha=8)
    for _ in range(2):
        with pytest.raises(AdapterError, match=r"layers\.9\.up"):
            open_adapter(folder, PROJECTIONS, 8, recipes=known)
    assert checks == ["check"] * 4


def test_numbers_are_looked_at_each_time(tmp_path: Path, checks: list[str]) -> None:
    known, wrong = Recipes(), tensors(1)
    list(open_adapter(write_lora(tmp_path / "good", wrong), PROJECTIONS, 8, recipes=known).read())
    key = next(key for key in wrong if "layers.1.down.lora_B" in key)
    wrong[key][0, 0] = torch.nan
    bad = open_adapter(write_lora(tmp_path / "bad", wrong), PROJECTIONS, 8, recipes=known)
    assert checks == ["check"]
    with pytest.raises(AdapterError, match=rf"{key} holds values that are not finite"):
        list(bad.read())


def test_a_file_that_ends_early_is_refused_though_its_recipe_is_known(tmp_path: Path) -> None:
    known, folder = Recipes(), write_lora(tmp_path, tensors(1))
    open_adapter(folder, PROJECTIONS, 8, recipes=known)
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(AdapterError, match="incomplete"):
        open_adapter(folder, PROJECTIONS, 8, recipes=known)


def test_no_file_stays_open_and_no_more_than_some_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipes, "MOST_RECIPES", 2)
    known, before = Recipes(), len(os.listdir("/proc/self/fd"))
    for alpha in range(1, 6):
        open_adapter(
            write_lora(tmp_path, tensors(1), lora_alpha=alpha), PROJECTIONS, 8, recipes=known
        )
    assert len(os.listdir("/proc/self/fd")) == before
    assert len(known._checked) == 2
    monkeypatch.setattr(recipes, "MOST_HEADER_BYTES", 10)
    open_adapter(write_lora(tmp_path, tensors(1), lora_alpha=99), PROJECTIONS, 8, recipes=known)
    assert len(known._checked) == 2
