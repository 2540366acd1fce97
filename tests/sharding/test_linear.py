"""Cut layers give what the whole layer gives."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from torch.nn import functional as F

from sharding.checkpoint import SafetensorsCheckpoint
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.group import TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import even_cut
from tests.ranks import run_ranks

RANKS = [1, 2, 4]
CPU = torch.device("cpu")


def random(*shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


def on_ranks(
    folder: Path, size: int, fn: Callable[[Weights], Tensor], dtype: torch.dtype = torch.float32
) -> list[Tensor]:
    def on_rank(group: TensorParallel) -> Tensor:
        return fn(Weights(SafetensorsCheckpoint(folder), group, dtype, CPU))

    return run_ranks(size, on_rank)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_fused_columns(tmp_path: Path, ranks: int, bias: bool) -> None:
    tensors = {
        "a.weight": random(8, 6),
        "b.weight": random(4, 6),
        "a.bias": random(8),
        "b.bias": random(4),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    x = random(3, 6)

    def build(weights: Weights) -> Tensor:
        rank, size = weights.group.rank, weights.group.size
        parts = tuple(
            ColumnPart(name, out, even_cut(out, rank, size, name))
            for name, out in (("a", 8), ("b", 4))
        )
        layer = ColumnParallelLinear(6, parts, bias, weights)
        assert layer.offsets == (0, 8 // size)
        out: Tensor = layer(x)
        assert out.shape == (3, 12 // size)
        return out

    outs = on_ranks(tmp_path, ranks, build)
    for i, name in enumerate("ab"):
        whole = F.linear(x, tensors[f"{name}.weight"], tensors[f"{name}.bias"] if bias else None)
        pieces = [out[:, 8 // ranks :] if i else out[:, : 8 // ranks] for out in outs]
        torch.testing.assert_close(torch.cat(pieces, dim=1), whole)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("ranks", RANKS)
def test_rows_are_summed_once_and_so_is_the_bias(
    tmp_path: Path, ranks: int, bias: bool, dtype: torch.dtype
) -> None:
    tensors = {"a.weight": random(5, 8), "a.bias": random(5)}
    save_file(tensors, tmp_path / "model.safetensors")
    x = random(3, 8).to(dtype)

    def build(weights: Weights) -> Tensor:
        columns = even_cut(8, weights.group.rank, weights.group.size, "a")
        layer = RowParallelLinear("a", (5, 8), columns, bias, weights)
        ((start, stop),) = columns
        out: Tensor = layer(x[:, start:stop])
        return out

    whole = F.linear(x.float(), tensors["a.weight"], tensors["a.bias"] if bias else None)
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    for out in on_ranks(tmp_path, ranks, build, dtype):
        torch.testing.assert_close(out.float(), whole, atol=tolerance, rtol=0)


@pytest.mark.parametrize("vocab", [8, 7, 5, 1])
@pytest.mark.parametrize("ranks", RANKS)
def test_embedding_and_head(tmp_path: Path, ranks: int, vocab: int) -> None:
    tensors = {"e.weight": random(vocab, 6), "h.weight": random(vocab, 6) + 1}
    save_file(tensors, tmp_path / "model.safetensors")
    ids = torch.tensor([0, vocab - 1, vocab // 2, 0])

    def embed(weights: Weights) -> Tensor:
        out: Tensor = VocabParallelEmbedding("e", vocab, 6, weights)(ids)
        return out

    def untied(weights: Weights) -> Tensor:
        out: Tensor = ParallelHead("h", vocab, 6, weights)(random(3, 6))
        return out

    def tied(weights: Weights) -> Tensor:
        embedding = VocabParallelEmbedding("e", vocab, 6, weights)
        head = ParallelHead("not there", vocab, 6, weights, tied=embedding)
        assert head.weight.data_ptr() == embedding.weight.data_ptr()
        out: Tensor = head(random(3, 6))
        return out

    for out in on_ranks(tmp_path, ranks, embed):
        assert torch.equal(out, tensors["e.weight"][ids])
    for name, build in (("h", untied), ("e", tied)):
        for out in on_ranks(tmp_path, ranks, build):
            torch.testing.assert_close(out, random(3, 6) @ tensors[f"{name}.weight"].T)
