"""Which names scales of an fp8 cache go by in a checkpoint, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from modeling.attention.kv_cache import CacheScales
from modeling.attention.scales import stored_scales
from sharding.checkpoint import (
    Checkpoint,
    CheckpointError,
    PickledCheckpoint,
    SafetensorsCheckpoint,
)

LAYERS = (CacheScales(0.125, 0.0625), CacheScales(0.03, 0.7))

NAMES = {
    "compressed-tensors": "model.layers.{0}.self_attn.{1}_scale",
    "ModelOpt": "model.layers.{0}.self_attn.{1}_proj.{1}_scale",
    "output scales": "model.layers.{0}.self_attn.{1}_proj.output_scale",
    "vLLM": "model.layers.{0}.self_attn.attn.{1}_scale",
    "fused": "model.layers.{0}.self_attn.qkv_proj.{1}_scale",
    "GPT-2": "transformer.h.{0}.attn.{1}_scale",
    "GPT-2, bare": "h.{0}.attn.{1}_scale",
    "OPT": "model.decoder.layers.{0}.self_attn.{1}_scale",
    "GPT-NeoX": "gpt_neox.layers.{0}.attention.{1}_scale",
}


def tensors(pattern: str, **form: Any) -> dict[str, torch.Tensor]:
    shape, dtype = form.get("shape", ()), form.get("dtype", torch.float32)
    return {
        pattern.format(layer, part): torch.full(shape, value, dtype=dtype)
        for layer, own in enumerate(LAYERS)
        for part, value in (("k", own.keys), ("v", own.values))
    }


def opened(folder: Path, found: dict[str, torch.Tensor]) -> Checkpoint:
    others = {"lm_head.weight": torch.ones(3, 2), "model.layers.0.self_attn.q_scale": torch.ones(3)}
    save_file({**others, **found}, folder / "model.safetensors")
    return SafetensorsCheckpoint(folder)


@pytest.mark.parametrize("pattern", NAMES.values(), ids=NAMES)
def test_names(tmp_path: Path, pattern: str) -> None:
    found = stored_scales(opened(tmp_path, tensors(pattern)), 2)
    assert found is not None
    for one, other in zip(found, LAYERS, strict=True):
        assert one.keys == pytest.approx(other.keys)
        assert one.values == pytest.approx(other.values)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_types(tmp_path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> None:
    found = stored_scales(opened(tmp_path, tensors(NAMES["ModelOpt"], shape=shape, dtype=dtype)), 2)
    assert found is not None
    assert found[0] == LAYERS[0]


def test_pickled_scales(tmp_path: Path) -> None:
    torch.save(tensors(NAMES["compressed-tensors"]), tmp_path / "pytorch_model.bin")
    found = stored_scales(PickledCheckpoint(tmp_path), 2)
    assert found is not None
    assert found[0] == LAYERS[0]


def test_one_scale_for_both(tmp_path: Path) -> None:
    name = "model.layers.{0}.self_attn.kv_scale"
    found = {name.format(layer): torch.tensor(0.5) for layer in range(2)}
    assert stored_scales(opened(tmp_path, found), 2) == (CacheScales(0.5, 0.5),) * 2


def test_a_checkpoint_without(tmp_path: Path) -> None:
    assert stored_scales(opened(tmp_path, {}), 2) is None


@pytest.mark.parametrize("lost", ["0.self_attn.v_scale", "1.self_attn.k_scale"])
def test_all_or_none(tmp_path: Path, lost: str) -> None:
    found = tensors(NAMES["compressed-tensors"])
    del found[f"model.layers.{lost}"]
    with pytest.raises(CheckpointError, match=f"not both of layer {lost[0]}.*cache.dtype to auto"):
        stored_scales(opened(tmp_path, found), 2)


@pytest.mark.parametrize("value", [0.0, -1.0, float("nan"), float("inf")])
def test_a_scale_is_a_positive_number(tmp_path: Path, value: float) -> None:
    found = tensors(NAMES["ModelOpt"])
    found["model.layers.1.self_attn.v_proj.v_scale"] = torch.tensor(value)
    with pytest.raises(CheckpointError, match=r"1\.self_attn\.v_proj\.v_scale.*positive number"):
        stored_scales(opened(tmp_path, found), 2)


def test_a_scale_for_each_head_is_refused(tmp_path: Path) -> None:
    found = tensors(NAMES["compressed-tensors"], shape=(4, 1, 1))
    with pytest.raises(CheckpointError, match=r"shape \(4, 1, 1\).*one scale for a layer's keys"):
        stored_scales(opened(tmp_path, found), 2)


def test_two_scales_for_one_thing_are_refused(tmp_path: Path) -> None:
    found = {**tensors(NAMES["ModelOpt"]), **tensors(NAMES["compressed-tensors"])}
    with pytest.raises(CheckpointError, match="another scale for it"):
        stored_scales(opened(tmp_path, found), 2)
