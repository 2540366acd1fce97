"""Merges and their oracle: PEFT's add_weighted_adapter, saved as an adapter of its own."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from peft import PeftModel
from safetensors.torch import load_file, save_file
from torch.nn.functional import pad

from configs.wire.adapters import AdapterKey, FetchedAdapter
from configs.wire.merging import MergeRule
from tests.checkpoints import AdapterRecipe, load_oracle, write_adapter

PARTS: dict[str, AdapterRecipe] = {
    "one": AdapterRecipe(r=8, alpha=16.0, seed=41),
    "two": AdapterRecipe(r=8, alpha=6.0, seed=42),
    "three": AdapterRecipe(r=8, alpha=5.0, use_rslora=True, seed=43),
    "columns": AdapterRecipe(
        r=8, alpha=12.0, target_modules=("q_proj", "v_proj"), std=0.2, seed=44
    ),
    "rows": AdapterRecipe(
        r=8, alpha=20.0, target_modules=("o_proj", "down_proj"), std=0.2, seed=45
    ),
    "narrow": AdapterRecipe(r=3, alpha=9.0, seed=46),
    "ends": AdapterRecipe(
        r=8, alpha=16.0, target_modules=("embed_tokens", "lm_head"), std=0.2, seed=47,
        save_embeddings=True,
    ),
}  # fmt: skip


def write_part(root: Path, model: Path, name: str) -> Path:
    """The folder of a part, written when first asked for."""
    folder = root / name
    return folder if folder.exists() else write_adapter(folder, model, PARTS[name])


def fetched(key: int, folders: Sequence[Path], rule: MergeRule) -> FetchedAdapter:
    """What a driver sends to its ranks for a merge of these folders."""
    parts = tuple(
        FetchedAdapter(AdapterKey(100 + i), folder.name, str(folder), folder.name)
        for i, folder in enumerate(folders)
    )
    digest = rule.digest([part.digest for part in parts])
    return FetchedAdapter(AdapterKey(key), "merge", "", digest, parts=parts, rule=rule)


def write_merged(folder: Path, model: Path, parts: Sequence[Path], rule: MergeRule) -> Path:
    """What PEFT makes of the parts, whose ranks must be equal."""
    first, *others = parts
    merged: Any = PeftModel.from_pretrained(load_oracle(model), str(first), adapter_name="p0")
    names = ["p0"]
    for i, part in enumerate(others, 1):
        names.append(f"p{i}")
        merged.load_adapter(str(part), adapter_name=names[-1])
    merged.add_weighted_adapter(
        names,
        list(rule.weights),
        "merged",
        combination_type=rule.strategy.value,
        density=rule.density,
        majority_sign_method=rule.sign_method.value,
    )
    merged.save_pretrained(str(folder), selected_adapters=["merged"], save_embedding_layers=False)
    return folder / "merged"


def write_padded(folder: Path, part: Path, rank: int) -> Path:
    """The same adapter with rows of zeros up to a rank."""
    shutil.copytree(part, folder)
    config = json.loads((part / "adapter_config.json").read_text())
    assert not config["use_rslora"]
    changed = {**config, "r": rank, "lora_alpha": config["lora_alpha"] * rank / config["r"]}
    (folder / "adapter_config.json").write_text(json.dumps(changed))
    lacking = rank - config["r"]
    tensors = {
        name: pad(tensor, (0, 0, 0, lacking) if "lora_A" in name else (0, lacking))
        for name, tensor in load_file(part / "adapter_model.safetensors").items()
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return folder
