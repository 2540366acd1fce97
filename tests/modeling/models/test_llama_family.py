"""Llama's relatives as models: whole logits, what each rank reads, and how maps are named."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.architectures.llama import Architecture
from configs.architectures.select import load_architecture
from modeling.models.kv_groups import attention_specs, kv_layout
from modeling.models.llama import FlashLlamaForCausalLM
from modeling.models.llama_projections import llama_projections
from modeling.models.select import build_model
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import SingleRank, TensorParallel
from sharding.loader import Weights
from sharding.slicing import width
from tests.checkpoints import RELATIVES, WINDOW, load_oracle, oracle_logits, write_relative
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks
from tests.sharding.views import LoneRank

SEQUENCE = [(7 * i + i * i) % 96 for i in range(30)]
CUTS = [(30,), (4, 9, 10, 20, 29, 30)]


@pytest.fixture(scope="module", params=RELATIVES)
def relative(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    name: str = request.param
    return write_relative(tmp_path_factory.mktemp(name), name)


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("cuts", CUTS)
def test_logits_equal_transformers(relative: Path, cuts: tuple[int, ...], ranks: int) -> None:
    """Whole, and in chunks shorter and longer than the window."""
    expected = oracle_logits(load_oracle(relative), SEQUENCE)

    def on_rank(group: TensorParallel) -> Tensor:
        stepper = Stepper(load(relative, group))
        spans = zip((0, *cuts), cuts, strict=False)
        return torch.cat([stepper.step([(0, SEQUENCE[a:b])])[0] for a, b in spans])

    for logits in run_ranks(ranks, on_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_each_rank_reads_only_its_share(relative: Path, ranks: int) -> None:
    """Fused tensors included: their rows are picked from each part, never read whole."""
    config = load_architecture(relative)
    assert isinstance(config, Architecture)
    tensors = load_file(relative / "model.safetensors")
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    local_keys = max(keys // ranks, config.head_dim)

    def local(name: str, tensor: Tensor) -> float:
        if "norm" in name or name.endswith("o_proj.bias"):
            return tensor.numel()
        if "qkv_proj" in name:
            rows = queries / ranks + 2 * local_keys
            return tensor.numel() * rows / (queries + 2 * keys)
        if "k_proj" in name or "v_proj" in name:
            return tensor.numel() * local_keys / keys
        return tensor.numel() / ranks

    expected = sum(4 * local(name, tensor) for name, tensor in tensors.items())
    for rank in range(ranks):
        source = SafetensorsCheckpoint(relative)
        weights = Weights(source, LoneRank(rank, ranks), torch.float32, torch.device("cpu"))
        build_model(config, weights)
        assert source.bytes_read == expected


def test_projections_are_named_as_in_the_checkpoint(relative: Path) -> None:
    config = load_architecture(relative)
    assert isinstance(config, Architecture)
    shapes = {n: tuple(t.shape) for n, t in load_file(relative / "model.safetensors").items()}
    projections = llama_projections("model", config, SingleRank())
    assert len(projections) == (4 if config.fused else 7)
    for projection in projections:
        shape = shapes[projection.module.format(layer=1) + ".weight"]
        assert shape == (projection.out_features, projection.in_features)
        assert projection.module.endswith(f".{projection.name}")
        assert width(projection.outputs) == projection.out_features


def test_the_ranks_outputs_of_a_fused_map_are_all_of_it_once(tmp_path: Path) -> None:
    config = load_architecture(write_relative(tmp_path, "phi3"))
    assert isinstance(config, Architecture)
    for index, size in ((0, 32 + 16 + 16), (2, 96)):
        rows: list[int] = []
        for rank in range(2):
            projection = llama_projections("model", config, LoneRank(rank, 2))[index]
            assert width(projection.outputs) == size // 2
            rows += [i for start, stop in projection.outputs for i in range(start, stop)]
        assert sorted(rows) == list(range(size))


def test_what_the_attention_backend_is_told(tmp_path: Path) -> None:
    def spec(name: str) -> Any:
        model = load(write_relative(tmp_path / name, name), SingleRank())
        assert isinstance(model, FlashLlamaForCausalLM)
        (found,) = attention_specs(model, kv_layout(model, 16))
        return found

    assert spec("mistral").windows == (WINDOW,)
    assert spec("mistral_full").windows == (None,)
    assert spec("qwen2_window").windows == (None, WINDOW)
    assert spec("granite").scale == 0.2
