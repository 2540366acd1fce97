"""Maps in 4 bits of bitsandbytes of which a block holds parts of several rows, as they are read."""

from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file

from configs.quantisation import Quantisation, WeightFormat
from modeling.quantisation.formats import StoredFormat
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import SingleRank
from sharding.linear_weight import LinearPart
from sharding.loader import Weights

HOW = Quantisation(method="bitsandbytes", format=WeightFormat.NF4, bits=4)
CPU = torch.device("cpu")


@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("nested", [False, True])
# Of even rows that are no whole blocks the package's CPU kernel reads the scales of other blocks.
@pytest.mark.parametrize("shape", [(4, 4), (9, 33), (7, 65)])
def test_rows_within_blocks_are_the_packages_numbers(
    tmp_path: Path, kind: str, nested: bool, shape: tuple[int, int]
) -> None:
    matrix = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    packed, state = quantize_4bit(matrix, quant_type=kind, compress_statistics=nested, blocksize=64)
    own = {f"map.weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    save_file({"map.weight": packed, **own}, tmp_path / "model.safetensors")
    rows, columns = ((1, shape[0]),), ((0, 2), (3, shape[1]))
    weights = Weights(SafetensorsCheckpoint(tmp_path), SingleRank(), torch.float32, CPU)
    found = StoredFormat(HOW).read(weights, [LinearPart("map", shape, rows, columns)])
    wanted = dequantize_4bit(packed, state)[1:]
    assert torch.equal(found[:], torch.cat([wanted[:, :2], wanted[:, 3:]], dim=1))
