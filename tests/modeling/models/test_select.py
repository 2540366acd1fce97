"""Building a model: the shares of the ranks, and every reason not to build one."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError, ModelArchitecture
from configs.architectures.llama import Architecture
from configs.architectures.select import FAMILIES, MODEL_TYPES, load_architecture
from modeling.models.base import PagedModel
from modeling.models.kv_groups import attention_specs, kv_layout
from modeling.models.llama import FlashLlamaForCausalLM
from modeling.models.select import MODELS, build_model
from sharding.checkpoint import CheckpointError, DummySource, SafetensorsCheckpoint, TensorSource
from sharding.group import SingleRank, TensorParallel
from sharding.loader import Weights
from tests.checkpoints import write_llama
from tests.modeling.models.stepping import Stepper
from tests.sharding.views import LoneRank

CPU = torch.device("cpu")


def build(folder: Path, rank: int = 0, size: int = 1) -> tuple[PagedModel, TensorSource]:
    source = SafetensorsCheckpoint(folder)
    weights = Weights(source, LoneRank(rank, size), torch.float32, CPU)
    return build_model(load_architecture(folder), weights), source


def dummy(config: ModelArchitecture, group: TensorParallel) -> PagedModel:
    source = DummySource(CPU, torch.bfloat16)
    return build_model(config, Weights(source, group, torch.bfloat16, CPU))


def resident_bytes(model: PagedModel) -> int:
    assert isinstance(model, nn.Module)
    return sum(parameter.nbytes for parameter in model.parameters())


@pytest.mark.parametrize("variant", ["mha", "mqa", "tied"])
@pytest.mark.parametrize("ranks", [2, 4])
def test_each_rank_reads_and_holds_its_share(tmp_path: Path, variant: str, ranks: int) -> None:
    """1/N of everything but the norms, which are whole, and KV heads, of which one is the least."""
    folder = write_llama(tmp_path, variant)
    config = load_architecture(folder)
    assert isinstance(config, Architecture)
    shapes = {name: value.shape for name, value in load_file(folder / "model.safetensors").items()}

    def share(name: str) -> float:
        if "norm" in name:
            return 1.0
        if "k_proj" in name or "v_proj" in name:
            return max(1, config.num_kv_heads / ranks) / config.num_kv_heads
        return 1 / ranks

    expected = sum(4 * shape.numel() * share(name) for name, shape in shapes.items())
    for rank in range(ranks):
        model, source = build(folder, rank, ranks)
        assert source.bytes_read == expected
        assert resident_bytes(model) == expected


def change(folder: Path, edit: Any) -> None:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_a_missing_tensor_is_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    change(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(
        CheckpointError, match=r"no tensor 'model\.layers\.1\.mlp\.up_proj\.weight'"
    ):
        build(folder)


def test_left_over_tensors_are_named(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    extra = {"model.layers.0.self_attn.q_norm.weight": torch.zeros(8)}
    change(folder, lambda tensors: tensors.update(extra))
    with pytest.raises(CheckpointError, match=r"does not use 1 tensors.*q_norm\.weight"):
        build(folder)


def test_known_non_parameters_may_be_there(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    extra = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.zeros(4)}
    change(folder, lambda tensors: tensors.update(extra))
    build(folder)


def test_another_shape_is_refused(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    change(folder, lambda tensors: tensors.update({"model.norm.weight": torch.zeros(31)}))
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' has shape \(31,\)"):
        build(folder)


@pytest.mark.parametrize(
    ("changes", "ranks", "message"),
    [
        ({"num_heads": 6}, 4, r"num_attention_heads \(6\)"),
        ({"num_heads": 12, "num_kv_heads": 3}, 2, "neither cut"),
        ({"intermediate_size": 3}, 4, r"intermediate_size \(3\) is less than tensor_parallel"),
    ],
)
def test_sizes_that_the_ranks_cannot_share(
    tmp_path: Path, changes: dict[str, Any], ranks: int, message: str
) -> None:
    config = load_architecture(write_llama(tmp_path)).model_copy(update=changes)
    with pytest.raises(ValueError, match=message):
        dummy(config, LoneRank(0, ranks))


def test_an_architecture_without_a_class(tmp_path: Path) -> None:
    config = load_architecture(write_llama(tmp_path))
    other = config.model_copy(update={"architecture": "OtherForCausalLM"})
    weights = Weights(DummySource(CPU, torch.float32), SingleRank(), torch.float32, CPU)
    with pytest.raises(ArchitectureError, match=r"OtherForCausalLM is not supported; .*Llama"):
        build_model(other, weights)


def test_mistral_without_a_window_is_llama(tmp_path: Path) -> None:
    folder = write_llama(tmp_path)
    path = folder / "config.json"
    raw = json.loads(path.read_text())
    names = {"architectures": ["MistralForCausalLM"], "model_type": "mistral"}
    path.write_text(json.dumps({**raw, **names, "sliding_window": None}))
    assert isinstance(build(folder)[0], FlashLlamaForCausalLM)


def test_every_architecture_is_in_every_table() -> None:
    assert MODELS.keys() == FAMILIES.keys() == MODEL_TYPES.keys()


def test_dummy_weights_need_no_files(tmp_path: Path) -> None:
    config = load_architecture(write_llama(tmp_path))
    logits: Tensor = Stepper(dummy(config, SingleRank())).step([(0, [1, 2, 3])])[0]
    assert logits.shape == (3, config.vocab_size)
    assert logits.isfinite().all()
    assert resident_bytes(dummy(config, LoneRank(1, 2))) < 0.6 * resident_bytes(
        dummy(config, SingleRank())
    )


def test_what_the_runner_asks_of_a_model(tmp_path: Path) -> None:
    model, _ = build(write_llama(tmp_path, "wide_heads"), 1, 2)
    (spec,) = attention_specs(model, kv_layout(model, 128))
    assert (spec.num_heads, spec.num_kv_heads, spec.head_dim, spec.page_size) == (2, 1, 16, 128)
    assert spec.scale == 0.25
    assert spec.dtype == torch.float32
    layout = kv_layout(model, 128, dtype=torch.bfloat16)
    assert layout.bytes_per_block == 2 * 2 * 128 * 1 * 16 * 2
    assert kv_layout(model, 16).groups[0].spec.dtype == torch.float32
