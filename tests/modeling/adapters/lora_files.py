"""Adapter folders written tensor by tensor, so that each can be wrong in its own way."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling.adapters.faults import Faults
from modeling.adapters.peft.config import LoraPlan, check_config, check_fields
from modeling.adapters.projection import Projection

UP = Projection("up", "model.layers.{layer}.up", 6, 10, ((0, 6),), ((0, 10),), 3)
DOWN = Projection("down", "model.layers.{layer}.down", 10, 6, ((0, 10),), ((0, 6),), 3)


def factors(
    projection: Projection, ranks: list[int], seed: int = 0, dtype: torch.dtype = torch.float32
) -> dict[str, Tensor]:
    """Random A and B for each layer with a rank above 0."""
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer, rank in enumerate(ranks):
        if rank:
            module = f"base_model.model.{projection.module.format(layer=layer)}"
            a = torch.randn(rank, projection.in_features, generator=generator)
            b = torch.randn(projection.out_features, rank, generator=generator)
            tensors[f"{module}.lora_A.weight"] = a.to(dtype)
            tensors[f"{module}.lora_B.weight"] = b.to(dtype)
    return tensors


def write_lora(folder: Path, tensors: dict[str, Tensor], **fields: Any) -> Path:
    """Write both files; fields are those of adapter_config.json, with targets."""
    folder.mkdir(parents=True, exist_ok=True)
    targets = sorted({key.split(".lora_")[0].rsplit(".", 1)[-1] for key in tensors})
    plain = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": targets}
    config = {**plain, **fields}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


def parse_config(fields: Mapping[str, object]) -> LoraPlan:
    """The plan of an adapter_config.json; AdapterError names all that is wrong."""
    faults = Faults()
    plan = check_fields(fields, faults)
    faults.check()
    assert plan is not None
    return plan


def read_config(folder: Path) -> LoraPlan:
    """The same for the file of a folder."""
    faults = Faults()
    plan = check_config(folder, faults)
    faults.check()
    assert plan is not None
    return plan
