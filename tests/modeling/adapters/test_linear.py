"""Adapter layers on 1, 2, 4 ranks: the delta of the whole, with no collective of its own."""

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from modeling.adapters.linear import AdapterColumnLinear, AdapterRowLinear
from modeling.adapters.product import AdapterData, OutputSlice
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import Summand, TensorParallel
from sharding.linear import ColumnParallelLinear, ColumnPart, RowParallelLinear
from sharding.loader import Weights
from sharding.slicing import even_cut
from sharding.symmetric import DoubleBuffer, PeerBuffers, SizeTable, SymmetricRanks, peer_bytes
from tests.ranks import run_ranks

CPU = torch.device("cpu")


@dataclass
class DenseDeltas(AdapterData):
    """Adapter data of one adapter for all tokens: a dense (A, B) slice for each projection."""

    slices: dict[int, tuple[Tensor, Tensor]]
    layer: int

    def add(self, y: Tensor, x: Tensor, layer: int, targets: tuple[OutputSlice, ...]) -> None:
        assert layer == self.layer
        for target in targets:
            a, b = self.slices[target.projection]
            y[:, target.offset : target.offset + len(b)] += x @ a.T @ b.T


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_fused_columns(tmp_path: Path, ranks: int) -> None:
    base = {"a.weight": torch.randn(8, 6), "b.weight": torch.randn(4, 6)}
    save_file(base, tmp_path / "model.safetensors")
    lora = {3: (torch.randn(2, 6), torch.randn(8, 2)), 5: (torch.randn(2, 6), torch.randn(4, 2))}
    x = torch.randn(3, 6)

    def on_rank(group: TensorParallel) -> Tensor:
        cuts = [even_cut(out, group.rank, group.size, "out") for out in (8, 4)]
        weights = Weights(SafetensorsCheckpoint(tmp_path), group, torch.float32, CPU)
        parts = (ColumnPart("a", 8, cuts[0]), ColumnPart("b", 4, cuts[1]))
        layer = AdapterColumnLinear(ColumnParallelLinear(6, parts, False, weights), 7, (3, 5))
        slices = {
            index: (lora[index][0], lora[index][1][slice(*cut[0])])
            for index, cut in zip((3, 5), cuts, strict=True)
        }
        out: Tensor = layer(x, DenseDeltas(slices, 7))
        assert not torch.allclose(out, layer(x, None))
        return out

    outs = run_ranks(ranks, on_rank)
    for index, (a, b), weight in zip((0, 1), lora.values(), base.values(), strict=True):
        pieces = [out[:, 8 // ranks :] if index else out[:, : 8 // ranks] for out in outs]
        torch.testing.assert_close(torch.cat(pieces, dim=1), x @ (weight + b @ a).T)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_rows_join_the_partial_product(tmp_path: Path, ranks: int) -> None:
    weight, bias = torch.randn(5, 8), torch.randn(5)
    save_file({"o.weight": weight, "o.bias": bias}, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 8), torch.randn(5, 2)
    x = torch.randn(3, 8)

    def on_rank(group: TensorParallel) -> Tensor:
        columns = even_cut(8, group.rank, group.size, "in")
        mine = slice(*columns[0])
        weights = Weights(SafetensorsCheckpoint(tmp_path), group, torch.float32, CPU)
        layer = AdapterRowLinear(RowParallelLinear("o", (5, 8), columns, True, weights), 0, 2)
        out: Tensor = layer(x[:, mine], DenseDeltas({2: (a[:, mine], b)}, 0))
        return out

    for out in run_ranks(ranks, on_rank):
        torch.testing.assert_close(out, x @ (weight + b @ a).T + bias)


@pytest.mark.parametrize("has_bias", [False, True])
def test_deltas_join_a_summand_that_a_norm_sums(tmp_path: Path, has_bias: bool) -> None:
    tensors = {"o.weight": torch.randn(8, 8), "o.bias": torch.randn(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    a, b = torch.randn(2, 8), torch.randn(8, 2)
    x = torch.randn(3, 8)

    def on_rank(group: TensorParallel) -> Tensor:
        memory = torch.zeros(peer_bytes(2), dtype=torch.uint8)
        buffers = PeerBuffers(memory, [memory.data_ptr()] * 2)
        ranks = SymmetricRanks(group, DoubleBuffer(memory), {}, SizeTable([]), buffers)
        ranks.serve_norms(torch.float32, 3, "")
        columns = even_cut(8, group.rank, 2, "in")
        mine = slice(*columns[0])
        weights = Weights(SafetensorsCheckpoint(tmp_path), ranks, torch.float32, CPU)
        base = RowParallelLinear("o", (8, 8), columns, has_bias, weights)
        layer = AdapterRowLinear(base, 0, 2)
        found = layer.unsummed(x[:, mine], DenseDeltas({2: (a[:, mine], b)}, 0))
        assert isinstance(found, Summand)
        return group.all_reduce(found.partial.clone())

    for out in run_ranks(2, on_rank):
        expected = x @ (tensors["o.weight"] + b @ a).T + (tensors["o.bias"] if has_bias else 0)
        torch.testing.assert_close(out, expected)
