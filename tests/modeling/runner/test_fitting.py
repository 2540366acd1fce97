"""Models that do not fit say in which form they would; smaller weights leave more to the cache."""

from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import nn

from configs.architectures.select import load_architecture
from configs.engine import CacheConfig, Device, EngineConfig
from configs.model import ModelConfig, Quantize
from modeling.models.select import build_model
from modeling.quantisation.formats import linear_format
from modeling.runner import loading
from modeling.runner.fitting import META, smaller_form, too_large, weight_sizes
from modeling.runner.memory import DeviceMemory, cuda_blocks
from sharding.checkpoint import DummySource
from sharding.group import SingleRank
from sharding.loader import Weights
from tests.checkpoints import write_llama
from tests.checkpoints_generic import write_generic
from tests.modeling.parity.comparison import engine_config

DTYPE = torch.bfloat16
CPU = torch.device("cpu")
SIZES: dict[str, Any] = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 2}


def built(folder: Path, quantize: Quantize) -> nn.Module:
    form = linear_format(None, quantize)
    weights = Weights(DummySource(CPU, DTYPE), SingleRank(), DTYPE, CPU, form)
    return cast(nn.Module, build_model(load_architecture(folder), weights))


def resident(model: nn.Module) -> int:
    return sum(parameter.nbytes for parameter in model.parameters())


def test_sizes_are_those_of_built_models(tmp_path: Path) -> None:
    folder = write_llama(tmp_path, **SIZES)
    dense, fp8 = built(folder, Quantize.NONE), built(folder, Quantize.FP8)
    sizes = weight_sizes(dense)
    assert sizes.dense_bytes(DTYPE) == resident(dense)
    assert sizes.fp8_bytes(DTYPE) == resident(fp8)
    nf4 = resident(built(folder, Quantize.BITSANDBYTES_NF4))
    # Each map has a table of 16 numbers, and each of its inputs the number of its group.
    assert 0 < nf4 - sizes.four_bit_bytes(DTYPE) < 0.1 * nf4
    assert weight_sizes(fp8).linear == 0


def test_memory_that_smaller_weights_free_goes_to_the_cache(tmp_path: Path) -> None:
    """To the byte: a block more for each block's bytes that the weights do not take."""
    folder = write_llama(tmp_path, **SIZES)
    taken = [resident(built(folder, each)) for each in (Quantize.NONE, Quantize.FP8)]
    config = EngineConfig(model=ModelConfig(id="m"), cache=CacheConfig(device_memory_fraction=1.0))
    total, block = 2**22, 1000
    found = [
        cuda_blocks(config, DeviceMemory(total, total - weights), 0, block) for weights in taken
    ]
    assert found == [(total - weights) // block for weights in taken]
    assert found[1] - found[0] in {(taken[0] - taken[1]) // block + n for n in (0, 1)}


def test_forms_are_named_that_fit(tmp_path: Path) -> None:
    sizes = weight_sizes(built(write_llama(tmp_path, **SIZES), Quantize.NONE))
    fp8 = sizes.fp8_bytes(DTYPE)
    assert "in fp8 (model.quantize: fp8)" in smaller_form(sizes, DTYPE, fp8)
    four = sizes.four_bit_bytes(DTYPE)
    both = smaller_form(sizes, DTYPE, fp8)
    assert "in 4 bits (model.quantize: bitsandbytes-nf4)" in both
    assert "fp8" not in smaller_form(sizes, DTYPE, fp8 - 1)
    assert "in 4 bits" in smaller_form(sizes, DTYPE, four)
    assert smaller_form(sizes, DTYPE, four - 1) == ""
    cut = replace(sizes, in_blocks=False)
    assert smaller_form(cut, DTYPE, fp8 - 1) == ""


def test_a_model_that_does_not_fit_says_which_form_would(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_llama(tmp_path, **SIZES)

    def full(*_: Any) -> nn.Module:
        raise torch.OutOfMemoryError("CUDA out of memory")

    free = weight_sizes(built(folder, Quantize.NONE)).fp8_bytes(torch.float32)
    monkeypatch.setattr(loading, "build_model", full)
    monkeypatch.setattr(loading, "device_memory", lambda device: DeviceMemory(free, free))
    config = engine_config(folder, device=Device.CUDA)
    with pytest.raises(ValueError, match=r"does not fit.*tensor_parallel.*in fp8 \(model"):
        loading.load_model(config, SingleRank(), torch.device("cuda"))
    with pytest.raises(ValueError, match=r"tensor_parallel\)$"):
        raise too_large(load_architecture(folder), SingleRank(), torch.float32, 1)


@pytest.mark.parametrize("kind", ["gemma2", "qwen3_moe", "deepseek_v3"])
def test_models_of_transformers_modules_are_counted_without_values(
    tmp_path: Path, kind: str
) -> None:
    """As they must be for the sentence about a model that did not fit."""
    folder = write_generic(tmp_path, kind)
    architecture = load_architecture(folder)
    weights = Weights(DummySource(META, DTYPE), SingleRank(), DTYPE, META)
    counted = weight_sizes(cast(nn.Module, build_model(architecture, weights)))
    assert counted == weight_sizes(built(folder, Quantize.NONE))
    error = too_large(architecture, SingleRank(), DTYPE, counted.fp8_bytes(DTYPE))
    assert "in fp8 (model.quantize: fp8)" in str(error)
