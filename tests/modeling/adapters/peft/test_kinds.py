"""Adapters of other kinds that PEFT itself converted to LoRA: their change of the weights."""

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor, nn

from configs.wire.adapters import AdapterError
from modeling.adapters.peft.folder import open_adapter
from tests.modeling.adapters.lora_files import UP

# What PEFT warns of while it trains and converts is its own concern.
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

BASE = nn.ModuleDict(
    {
        "model": nn.ModuleDict(
            {
                "layers": nn.ModuleList(
                    nn.ModuleDict({"up": nn.Linear(6, 10, bias=False)}) for _ in range(3)
                )
            }
        )
    }
)


def trained(config: Any) -> PeftModel:
    """A model whose adapter differs from what it began as."""
    generator = torch.Generator().manual_seed(0)
    model = get_peft_model(copy.deepcopy(BASE), config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    return model


def weights(model: nn.Module) -> list[Tensor]:
    """The weight of each layer."""
    return [value for name, value in model.state_dict().items() if name.endswith("up.weight")]


def served(folder: Path) -> list[Tensor]:
    """The weights with what our reader takes from a folder."""
    modules = open_adapter(folder, (UP,), 64).read()
    return [w + m.b @ m.a for w, m in zip(weights(BASE), modules, strict=True)]


def close(found: list[Tensor], expected: list[Tensor]) -> bool:
    pairs = zip(found, expected, strict=True)
    return all(torch.allclose(a, b, atol=1e-5) for a, b in pairs)


@pytest.mark.parametrize("use_rslora", [False, True])
@pytest.mark.parametrize("init", ["pissa", "olora"])
def test_an_init_that_changed_the_base_is_served_converted(
    init: str, use_rslora: bool, tmp_path: Path
) -> None:
    config = LoraConfig(
        r=3, lora_alpha=5, target_modules=["up"], init_lora_weights=init, use_rslora=use_rslora
    )
    fresh = get_peft_model(copy.deepcopy(BASE), copy.deepcopy(config))
    fresh.peft_config["default"].init_lora_weights = True
    fresh.save_pretrained(str(tmp_path / "begin"))
    model = trained(config)
    model.save_pretrained(str(tmp_path / "as saved"))
    begin = str(tmp_path / "begin")
    model.save_pretrained(str(tmp_path / "whole"), path_initial_model_for_weight_conversion=begin)
    with pytest.raises(AdapterError, match="path_initial_model_for_weight_conversion"):
        open_adapter(tmp_path / "as saved", (UP,), 64)
    assert close(served(tmp_path / "whole"), weights(model.merge_and_unload()))


def test_eva_s_factors_are_served_as_saved(tmp_path: Path) -> None:
    eva = peft.EvaConfig()
    model = trained(LoraConfig(r=3, target_modules=["up"], init_lora_weights="eva", eva_config=eva))
    model.save_pretrained(str(tmp_path))
    assert close(served(tmp_path), weights(model.merge_and_unload()))


@pytest.mark.parametrize(
    ("config", "rank"),
    [
        (peft.LoHaConfig(r=2, target_modules=["up"], init_weights=False), 4),
        (peft.LoKrConfig(r=2, target_modules=["up"], init_weights=False), 6),
        (peft.MissConfig(r=2, target_modules=["up"]), 2),
        (peft.VeraConfig(r=4, target_modules=["up"]), 4),
    ],
    ids=["loha", "lokr", "miss", "vera"],
)
def test_another_tuner_is_served_as_peft_converts_it(
    config: Any, rank: int, tmp_path: Path
) -> None:
    model = trained(config)
    model.save_pretrained(str(tmp_path / "as saved"))
    with pytest.raises(AdapterError, match="save_as_lora"):
        open_adapter(tmp_path / "as saved", (UP,), 64)
    # Its change is of this rank: nothing is lost.
    peft.save_as_lora(str(tmp_path / "lora"), model, rank)
    assert close(served(tmp_path / "lora"), weights(model.merge_and_unload()))
