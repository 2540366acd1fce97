"""Factors of q, k and v in a file, over a model that fuses them."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from configs.wire.adapters import AdapterError
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import Projection
from tests.modeling.adapters.lora_files import UP, factors, write_lora

FUSED = replace(UP, name="qkv_proj", module="model.layers.{layer}.qkv_proj")
STARTS = {"q": (0, 6), "k": (6, 2), "v": (8, 2)}
"""Of ten rows: the first of each part, and their number."""


def part(name: str, rows: int) -> Projection:
    module = f"model.layers.{{layer}}.{name}_proj"
    return replace(UP, name=f"{name}_proj", module=module, out_features=rows)


@pytest.mark.parametrize("names", ["q", "k", "v", "qv", "kv", "qkv"])
def test_each_part_has_its_rows(tmp_path: Path, names: str) -> None:
    saved: dict[str, Tensor] = {}
    for seed, name in enumerate(names):
        saved |= factors(part(name, STARTS[name][1]), [4, 0, 4], seed)
    ranks = {"k_proj": 4}
    folder = write_lora(tmp_path, saved, rank_pattern=ranks, alpha_pattern={"v_proj": 3})
    adapter = open_adapter(folder, (FUSED,), 12)
    assert set(adapter.ranks.values()) == {4 * len(names)}
    modules = list(adapter.read())
    assert [module.position.layer for module in modules] == [0, 2]
    for module in modules:
        wanted = torch.zeros(10, 6)
        for name in names:
            first, rows = STARTS[name]
            path = f"base_model.model.model.layers.{module.position.layer}.{name}_proj.lora_"
            scale = (3 if name == "v" else 8) / 4
            change = saved[f"{path}B.weight"] @ saved[f"{path}A.weight"] * scale
            wanted[first : first + rows] = change
        torch.testing.assert_close(module.b @ module.a, wanted)


@pytest.mark.parametrize(("name", "rows"), [("q", 5), ("q", 11), ("k", 6), ("v", 11)])
def test_parts_of_another_size_are_refused(tmp_path: Path, name: str, rows: int) -> None:
    folder = write_lora(tmp_path, factors(part(name, rows), [4]))
    with pytest.raises(AdapterError, match="the parts of qkv_proj have other sizes"):
        open_adapter(folder, (FUSED,), 12)


def test_types_and_ranks_of_parts_are_checked(tmp_path: Path) -> None:
    saved = factors(part("q", 6), [4])
    with pytest.raises(AdapterError, match=r"has rank 4, but adapter_config\.json .* says 3"):
        open_adapter(write_lora(tmp_path / "rank", saved, r=3), (FUSED,), 12)
    whole = {key: tensor.long() for key, tensor in saved.items()}
    with pytest.raises(AdapterError, match="has type I64"):
        open_adapter(write_lora(tmp_path / "whole", whole), (FUSED,), 12)


def test_the_sum_of_the_ranks_has_a_limit(tmp_path: Path) -> None:
    saved = factors(part("q", 6), [4]) | factors(part("k", 2), [4])
    with pytest.raises(AdapterError, match=r"rank 8 at .*qkv_proj is above"):
        open_adapter(write_lora(tmp_path, saved), (FUSED,), 7)
