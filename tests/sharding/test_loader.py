"""Weights: types, slices, and the proof that the whole checkpoint was used."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from sharding.checkpoint import CheckpointError, DummySource, SafetensorsCheckpoint
from sharding.group import SingleRank
from sharding.loader import RowsOf, Weights

CPU = torch.device("cpu")


def weights(folder: Path, dtype: torch.dtype = torch.float32) -> Weights:
    return Weights(SafetensorsCheckpoint(folder), SingleRank(), dtype, CPU)


def test_slices_arrive_in_the_wanted_type(tmp_path: Path) -> None:
    save_file({"m": torch.arange(12.0).view(3, 4)}, tmp_path / "model.safetensors")
    got = weights(tmp_path, torch.bfloat16).read("m", (3, 4), rows=((1, 3),), columns=((0, 2),))
    assert got.dtype == torch.bfloat16
    assert got.tolist() == [[4, 5], [8, 9]]


def test_a_tensor_may_hold_several_one_below_the_other(tmp_path: Path) -> None:
    tensors = {"qkv.weight": torch.arange(24.0).view(6, 4), "qkv.bias": torch.arange(6.0)}
    save_file(tensors, tmp_path / "model.safetensors")
    loaded = weights(tmp_path)
    for end in ("weight", "bias"):
        loaded.inside(f"k.{end}", RowsOf(f"qkv.{end}", 3, 6))
    assert loaded.lists("k.weight")
    found = loaded.read("k.weight", (2, 4), rows=((1, 2),), columns=((2, 4),))
    assert found.tolist() == [[18, 19]]
    assert loaded.read_stored("k.bias", (2,)).tolist() == [3, 4]
    loaded.finish()
    loaded.inside("k.weight", RowsOf("qkv.weight", 3, 7))
    with pytest.raises(CheckpointError, match=r"shape \(6, 4\), the model needs \(7, 4\)"):
        loaded.read("k.weight", (2, 4))


def test_unused_tensors_are_listed(tmp_path: Path) -> None:
    frequencies = "model.layers.0.self_attn.rotary_emb.inv_freq"
    names = ["a", "extra.weight", frequencies, "lm_head.weight"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    loaded = weights(tmp_path)
    loaded.parameter("a", (1,))
    with pytest.raises(CheckpointError, match=r"2 tensors.*: extra\.weight, lm_head\.weight; "):
        loaded.finish((r".*\.rotary_emb\.inv_freq",))
    loaded.parameter("extra.weight", (1,))
    loaded.finish((r".*\.inv_freq", r"lm_head\.weight"))


def test_biases_of_layers_without_one_may_be_unused(tmp_path: Path) -> None:
    names = ["q_proj.weight", "q_proj.bias", "norm.weight", "norm.bias", "other.bias"]
    save_file({name: torch.ones(1) for name in names}, tmp_path / "model.safetensors")
    loaded = weights(tmp_path)
    for name in ("q_proj.weight", "norm.weight"):
        loaded.parameter(name, (1,))
    with pytest.raises(CheckpointError, match=r"1 tensors of the checkpoint: other\.bias; "):
        loaded.finish()
    loaded.finish((r"other\.bias",))


def test_a_long_list_is_cut(tmp_path: Path) -> None:
    save_file({f"x{i}": torch.ones(1) for i in range(20)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"20 tensors.*x0.*, \.\.\.; if it"):
        weights(tmp_path).finish()


def test_a_dummy_source_has_no_unused_tensors() -> None:
    source = DummySource(CPU, torch.float16)
    loaded = Weights(source, SingleRank(), torch.float16, CPU)
    assert loaded.read("a.weight", (4, 2), rows=()).shape == (0, 2)
    loaded.finish()


def test_biases_of_quantised_layers_may_be_unused(tmp_path: Path) -> None:
    """AutoGPTQ wrote some of zeros for every layer."""
    names = ["q_proj.qweight", "q_proj.bias", "k_proj.bias"]
    save_file({name: torch.zeros(1) for name in names}, tmp_path / "model.safetensors")
    loaded = weights(tmp_path)
    loaded.parameter("q_proj.qweight", (1,))
    with pytest.raises(CheckpointError, match=r"1 tensors of the checkpoint: k_proj\.bias; "):
        loaded.finish()
