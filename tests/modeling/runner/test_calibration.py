"""Measured scales: what they leave room for, and that every rank and every start finds them."""

import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.architectures.select import load_architecture
from modeling.attention.kv_cache import FP8_MAX, CacheScales
from modeling.models.base import PagedModel
from modeling.runner import calibration
from modeling.runner.calibration import HEAD_ROOM, measured_scales
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import load_oracle, write_llama
from tests.modeling.models.stepping import load
from tests.modeling.teacher import SYSTEMS
from tests.ranks import run_ranks


def measured(folder: Path, model: PagedModel, group: TensorParallel) -> tuple[CacheScales, ...]:
    architecture = load_architecture(folder)
    return measured_scales(model, architecture, architecture.max_position_embeddings, group)


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("llama") / "model")


def test_scales_leave_room_above_what_the_oracle_computes(llama: Path) -> None:
    scales = measured(llama, load(llama, SingleRank()), SingleRank())
    tokens = calibration._tokens(load_architecture(llama), 256)
    with torch.no_grad():
        cache = load_oracle(llama)(tokens, use_cache=True).past_key_values
    for own, layer in zip(scales, cache.layers, strict=True):
        for scale, part in ((own.keys, layer.keys), (own.values, layer.values)):
            room = FP8_MAX * scale / float(part.abs().max())
            assert HEAD_ROOM * (1 - 1e-5) <= room < 2 * HEAD_ROOM
            assert math.log2(scale).is_integer()


@pytest.mark.parametrize("system", ["llama", "gpt2", "opt", "gpt_neox"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_all_ranks_find_the_same(system: str, ranks: int, tmp_path: Path) -> None:
    folder = SYSTEMS[system][0](tmp_path / "model", 64)

    def on_rank(group: TensorParallel) -> tuple[CacheScales, ...]:
        return measured(folder, load(folder, group), group)

    (one,) = run_ranks(1, on_rank)
    assert run_ranks(ranks, on_rank) == [one] * ranks
    assert len(one) == 2


def test_short_sequences_are_enough(llama: Path) -> None:
    model, architecture = load(llama, SingleRank()), load_architecture(llama)
    assert len(measured_scales(model, architecture, 3, SingleRank())) == 2


def changed(llama: Path, folder: Path, name: str, value: float) -> Path:
    weights = load_file(llama / "model.safetensors")
    weights[name] = torch.full_like(weights[name], value)
    folder.mkdir()
    (folder / "config.json").write_text((llama / "config.json").read_text())
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_what_is_not_finite_is_refused(llama: Path, tmp_path: Path) -> None:
    name = "model.layers.1.self_attn.v_proj.weight"
    folder = changed(llama, tmp_path / "model", name, float("inf"))
    with pytest.raises(ValueError, match=r"not finite on random tokens.*set cache\.dtype to auto"):
        measured(folder, load(folder, SingleRank()), SingleRank())


def test_values_that_are_all_zero_are_as_they_are(llama: Path, tmp_path: Path) -> None:
    folder = changed(llama, tmp_path / "model", "model.layers.1.self_attn.v_proj.weight", 0.0)
    assert measured(folder, load(folder, SingleRank()), SingleRank())[1].values == 1.0
