"""Maps in 4 bits of bitsandbytes of which a block holds parts of several rows, as they are read."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from bitsandbytes.functional import dequantize_4bit, quantize_4bit
from safetensors.torch import save_file

from configs.architectures.quantisation import parse_quantisation
from configs.model import Quantize
from configs.quantisation import Quantisation, WeightFormat
from modeling.quantisation.formats import StoredFormat, linear_format
from sharding.checkpoint import SafetensorsCheckpoint
from sharding.group import SingleRank
from sharding.linear_weight import LinearPart, LinearWeight
from sharding.loader import Weights

HOW = Quantisation(method="bitsandbytes", format=WeightFormat.NF4, bits=4)
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _eager() -> Iterator[None]:
    """The package compiles its formula for CPUs, which takes half a minute."""
    with torch.compiler.set_stance("force_eager"):
        yield


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


@pytest.mark.parametrize("storage", [torch.bfloat16, torch.float32])
def test_codes_may_be_stored_as_floats(tmp_path: Path, storage: torch.dtype) -> None:
    """bnb_4bit_quant_storage, as FSDP needs it to shard them beside other weights."""
    packed, state = quantize_4bit(torch.randn(6, 128), quant_type="nf4", quant_storage=storage)
    assert packed.dtype is storage
    own = {f"map.weight.{name}": each for name, each in state.as_dict(packed=True).items()}
    save_file({"map.weight": packed, **own}, tmp_path / "model.safetensors")
    weights = Weights(SafetensorsCheckpoint(tmp_path), SingleRank(), torch.float32, CPU)
    given = {"quant_method": "bitsandbytes", "load_in_4bit": True}
    storage_name = str(storage).removeprefix("torch.")
    how = parse_quantisation(
        {"quantization_config": {**given, "bnb_4bit_quant_storage": storage_name}}
    )
    assert how is not None
    part = LinearPart("map", (6, 128), ((0, 6),), ((64, 128),))
    assert torch.equal(
        StoredFormat(how).read(weights, [part])[:], dequantize_4bit(packed, state)[:, 64:]
    )


@pytest.mark.parametrize("shape", [(4, 4), (9, 33)])
def test_rows_within_blocks_at_load(tmp_path: Path, shape: tuple[int, int]) -> None:
    matrices = {f"{name}.weight": torch.randn(shape) for name in "ab"}
    save_file(matrices, tmp_path / "model.safetensors")
    form = linear_format(None, Quantize.BITSANDBYTES_NF4)
    assert form is not None

    def read(columns: int) -> LinearWeight:
        weights = Weights(SafetensorsCheckpoint(tmp_path), SingleRank(), torch.float32, CPU)
        own = ((0, shape[0]),), ((0, columns),)
        return form.read(weights, [LinearPart(name, shape, *own) for name in "ab"])

    wanted = [dequantize_4bit(*quantize_4bit(each, quant_type="nf4")) for each in matrices.values()]
    assert torch.equal(read(shape[1])[:], torch.cat(wanted))
    with pytest.raises(ValueError, match="not whole blocks of 64"):
        read(shape[1] - 1)
