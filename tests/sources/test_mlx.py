"""Adapters that mlx_lm 0.32 trained, converted to PEFT's: its own files and its own logits.

mlx_lora/ and mlx_dora/ were made over `write_llama`'s model: LoRA layers on the last of two layers
with random lora_b, saved as mlx_lm.lora saves them. logits.safetensors has what MLX computes for
IDS.
"""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file, save
from transformers import AutoModelForCausalLM

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources import mlx
from sources.files import is_mlx
from tests.checkpoints import write_llama
from tests.hub_server import HubServer
from tests.sources.adapter_files import fetch, left_over, refusal, sources

WRITTEN = Path(__file__).parent
RED = AdapterReference(AdapterSource.LOCAL, "red")
SQL = AdapterReference(AdapterSource.HUB, "acme/sql")
IDS = torch.tensor([[5, 9, 2, 30, 11]])
FILES = ["adapter_config.json", "adapter_model.safetensors"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("model"))


def put(folder: Path, kind: str = "lora") -> Path:
    for name in ("adapter_config.json", "adapters.safetensors"):
        folder.mkdir(parents=True, exist_ok=True)
        shutil.copy(WRITTEN / f"mlx_{kind}" / name, folder)
    return folder


@pytest.mark.parametrize("kind", ["lora", "dora"])
def test_peft_computes_what_mlx_computes(kind: str, model: Path, tmp_path: Path) -> None:
    put(tmp_path / "red", kind)
    found = fetch(sources(tmp_path, local_roots=[str(tmp_path)]), RED)
    assert found.folder != tmp_path / "red", "the operator's folder is not ours to write to"
    base = AutoModelForCausalLM.from_pretrained(model)
    plain = base(IDS).logits
    adapted = PeftModel.from_pretrained(base, str(found.folder))(IDS).logits
    expected = load_file(WRITTEN / f"mlx_{kind}" / "logits.safetensors")["logits"]
    assert torch.allclose(adapted, expected, atol=1e-4)
    assert not torch.allclose(plain, expected, atol=0.1)


def test_a_download_is_converted_where_it_lies(tmp_path: Path) -> None:
    put(tmp_path / "red")
    files = {path.name: path.read_bytes() for path in (tmp_path / "red").iterdir()}
    with HubServer() as hub:
        hub.add("acme/sql", files)
        found = fetch(sources(tmp_path, hub_endpoint=hub.url), SQL)
    assert sorted(path.name for path in found.folder.iterdir()) == FILES


def test_files_of_peft_are_preferred(tmp_path: Path) -> None:
    folder = put(tmp_path / "red")
    assert is_mlx(folder)
    (folder / "adapter_model.safetensors").write_bytes(save({"x": torch.ones(1)}))
    assert not is_mlx(folder)
    found = fetch(sources(tmp_path, local_roots=[str(tmp_path)]), RED)
    assert found.folder == folder
    assert [name for name, _, _ in found.fingerprint] == FILES


def spoil(folder: Path, config: Any = None, **tensors: torch.Tensor) -> str:
    """Why an adapter is refused that differs so."""
    put(folder)
    fields = json.loads((folder / "adapter_config.json").read_text("utf-8"))
    if isinstance(config, dict):
        config = json.dumps({**fields, **config})
    if config is not None:
        (folder / "adapter_config.json").write_text(config)
    weights = load_file(folder / "adapters.safetensors")
    named = {name.replace("__", "."): tensor for name, tensor in tensors.items()}
    (folder / "adapters.safetensors").write_bytes(save({**weights, **named}))
    with pytest.raises(AdapterError) as caught:
        mlx.convert(folder, folder, "red")
    assert caught.value.refusal is AdapterRefusal.UNSUPPORTED
    assert is_mlx(folder), "what is refused stays as it was"
    return caught.value.message


@pytest.mark.parametrize(
    ("config", "word"),
    [
        ("{", "not valid JSON"),
        ("[" * 100_000, "not valid JSON"),
        ("[]", "must hold an object"),
        ({"fine_tune_type": "full"}, "mlx_lm.fuse"),
        ({"lora_parameters": None}, "must name the rank"),
        ({"lora_parameters": {"rank": 4}}, "must name the scale"),
        ({"lora_parameters": {"rank": 4, "scale": 10**400}}, "must name the scale"),
        ({"lora_parameters": {"rank": 4, "scale": 2.0, "alpha": 16}}, "without alpha"),
    ],
)
def test_configs_that_say_too_little_are_refused(config: Any, word: str, tmp_path: Path) -> None:
    assert word in spoil(tmp_path, config)


def test_tensors_that_peft_s_files_cannot_hold_are_refused(tmp_path: Path) -> None:
    at = "model__layers__0__"
    ones = torch.ones(4, 4)
    assert "no factor" in spoil(tmp_path / "a", **{f"{at}mlp__weight": ones})
    assert "experts" in spoil(tmp_path / "b", **{f"{at}mlp__lora_a": torch.ones(2, 4, 4)})
    assert "has type I64" in spoil(tmp_path / "c", **{f"{at}mlp__lora_a": ones.long()})
    assert "the embedding" in spoil(tmp_path / "d", model__embed_tokens__lora_a=ones)


def test_a_file_that_is_damaged_or_too_large_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = put(tmp_path / "red")
    monkeypatch.setattr(mlx, "MAX_BYTES", 1000)
    with pytest.raises(AdapterError, match="over the 1000 that are converted"):
        mlx.convert(folder, tmp_path, "red")
    (folder / "adapters.safetensors").write_bytes(b"\x00" * 40)
    store = sources(tmp_path, local_roots=[str(tmp_path)])
    assert refusal(store, RED) is AdapterRefusal.UNSUPPORTED
    assert not left_over(tmp_path)
