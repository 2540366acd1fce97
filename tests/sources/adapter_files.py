"""Small adapters as bytes, and what sources say about them."""

import json
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal
from sources.adapters import AdapterSources
from sources.base import AdapterFolder, Token, Unreachable


def adapter_files(fill: float = 1.0, **others: bytes) -> dict[str, bytes]:
    """A LoRA over one projection; keyword names spell a dot as two underscores."""
    key = "base_model.model.model.layers.0.up.lora_"
    weights = {f"{key}{side}.weight": torch.full((2, 6), fill) for side in "AB"}
    return {
        "adapter_config.json": json.dumps(
            {"peft_type": "LORA", "r": 2, "target_modules": ["up"]}
        ).encode(),
        "adapter_model.safetensors": save(weights),
        **{name.replace("__", "."): content for name, content in others.items()},
    }


def write_files(folder: Path, files: dict[str, bytes]) -> Path:
    """The files in a folder that may exist."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name).write_bytes(content)
    return folder


def adapters_config(
    root: Path, fetch: Mapping[str, object] | None = None, **others: object
) -> AdaptersConfig:
    """Downloads are kept under `root`/cache and tried again at once, if a server says so.

    What is slow is waited for, lest a busy machine look like a fault.
    """
    quick = {"cache_dir": str(root / "cache"), "backoff_s": 0.01}
    patient = {"connect_timeout_s": 600.0, "read_timeout_s": 600.0}
    times = {"fetch": {**quick, **patient, **(fetch or {})}, "look_timeout_s": 600.0}
    return AdaptersConfig.model_validate({**times, **others})


def sources(
    root: Path, fetch: Mapping[str, object] | None = None, **others: object
) -> AdapterSources:
    """Sources of such a config."""
    return AdapterSources(adapters_config(root, fetch, **others))


def fetch(
    store: AdapterSources, reference: AdapterReference, token: Token = False
) -> AdapterFolder:
    """Look and bring, as a driver does."""
    return store.fetch(store.resolve(reference, token), token)


def refusal(
    store: AdapterSources, reference: AdapterReference, token: Token = False
) -> AdapterRefusal:
    """Why an adapter is not to be had; the message names it."""
    with pytest.raises((AdapterError, Unreachable)) as caught:
        fetch(store, reference, token)
    if isinstance(caught.value, Unreachable):
        return AdapterRefusal.UNAVAILABLE
    assert isinstance(caught.value, AdapterError)
    assert reference.id[:20] in caught.value.message
    return caught.value.refusal


def left_over(root: Path) -> list[str]:
    """What lies in the cache besides whole entries."""
    parts = [*root.glob("cache/partial/*"), *root.glob("cache/trash/*"), *root.rglob("*.part")]
    return [str(path) for path in parts]
