"""Tiny sequence classifiers, and adapters that bring a head, as transformers and PEFT save them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import safe_open
from torch import Tensor
from transformers import AutoModel, AutoModelForSequenceClassification


def _classifier(folder: Path, **settings: Any) -> Any:
    """The model of a folder with a head, random where the folder has none."""
    auto: Any = AutoModelForSequenceClassification
    model: Any = auto.from_pretrained(folder, attn_implementation="eager", **settings)
    return model.eval()


@torch.no_grad()
def _randomise(model: Any, generator: torch.Generator) -> None:
    """The head's weights, and B of all factors; of a size that moves logits by about one."""
    for name, parameter in model.named_parameters():
        if any(part in name for part in ("score.", "classifier.", "lora_")):
            parameter.normal_(std=0.1, generator=generator)


def write_classifier(folder: Path, base: Path, num_labels: int, **settings: Any) -> Path:
    """Write the decoder of a model's folder with a random head; returns `folder`."""
    model = _classifier(base, num_labels=num_labels, **settings)
    _randomise(model, torch.Generator().manual_seed(num_labels))
    model.save_pretrained(folder)
    return folder


def write_score_adapter(folder: Path, base: Path, num_labels: int) -> Path:
    """Write an adapter with a head of its own, trained over a model's folder."""
    model = _classifier(base, num_labels=num_labels, ignore_mismatched_sizes=True)
    config = LoraConfig(task_type="SEQ_CLS", r=4, lora_alpha=8, target_modules="all-linear")
    adapted = get_peft_model(model, config)
    _randomise(adapted, torch.Generator().manual_seed(100 + num_labels))
    adapted.save_pretrained(str(folder))
    return folder


def write_feature_adapter(folder: Path, base: Path, targets: Sequence[str] | str) -> Path:
    """Write an adapter that was trained over a model without any head."""
    model: Any = AutoModel.from_pretrained(base)
    chosen = targets if isinstance(targets, str) else list(targets)
    config = LoraConfig(task_type="FEATURE_EXTRACTION", r=4, target_modules=chosen)
    adapted = get_peft_model(model, config)
    _randomise(adapted, torch.Generator().manual_seed(7))
    adapted.save_pretrained(str(folder))
    return folder


def adapted_classifier(base: Path, adapter: Path | None) -> Any:
    """transformers' model with PEFT's adapter, as the adapter's own head wants it."""
    if adapter is None:
        return _classifier(base)
    with safe_open(adapter / "adapter_model.safetensors", "pt") as file:
        own = [key for key in file.keys() if ".score." in key or ".classifier." in key]  # noqa: SIM118
        rows = {file.get_slice(key).get_shape()[0] for key in own if "lora" not in key}
    settings = {"num_labels": min(rows), "ignore_mismatched_sizes": True} if rows else {}
    return PeftModel.from_pretrained(_classifier(base, **settings), str(adapter)).eval()


@torch.no_grad()
def scores(model: Any, ids: Sequence[int]) -> Tensor:
    """Logits [labels] of one sequence by itself."""
    found: Tensor = model(input_ids=torch.tensor([list(ids)])).logits[0]
    return found.float()
