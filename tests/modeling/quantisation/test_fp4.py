"""nvfp4 and mxfp4: the tokens of transformers + PEFT over the packages' numbers and roundings.

checkpoints/ has tiny Llamas that NVIDIA's ModelOpt 0.47 exported; numbers.safetensors is what its
own function makes of the codes. (It is not a dependency; its rounding of activations in 4 bits
needs a GPU, so that is compressed-tensors', of the same definition.)
"""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from configs.architectures.select import load_architecture
from configs.model import LoadFormat
from modeling.quantisation.activations import rounded_by_token
from modeling.quantisation.fp4 import MXFP4, NVFP4, Fp4Weight, rounded
from sharding.checkpoint import CheckpointError
from sharding.linear_weight import LinearPart
from tests.checkpoints import AdapterRecipe, load_oracle, write_adapter, write_llama
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import write_compressed
from tests.modeling.quantisation.quantised import answers, as_the_package, compare
from tests.modeling.quantisation.test_packed import CHECKPOINTS, SIZES, read
from tests.sweeps import swept, swept_rows

PRESETS = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16")
WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32,
}  # fmt: skip
"""Four ranks get whole groups of 32 inputs."""

ADAPTER = AdapterRecipe(r=8, std=0.2)


def in_float32(folder: Path) -> Any:
    """transformers' model of a checkpoint; the package's numbers are of bfloat16 in every model."""
    model = load_oracle(folder)
    # Its first step unpacks it, and fails of types that differ.
    with pytest.raises(RuntimeError, match="same dtype"):
        model(torch.tensor([[1]]))
    return nn.Module.float(model)


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_llama(tmp_path_factory.mktemp("fp4") / "dense", **WIDE)


@pytest.mark.parametrize(
    ("preset", "ranks"),
    swept_rows(
        [(preset, ranks) for preset in PRESETS for ranks in (1, 2, 4)],
        lambda *row: row in {("NVFP4", 2), ("MXFP4", 4), ("NVFP4A16", 1)},
    ),
)
def test_tokens(dense: Path, tmp_path: Path, preset: str, ranks: int) -> None:
    """Groups of inputs lie within the ranks' cuts, so the tokens are those of one rank."""
    stored = write_compressed(tmp_path / preset, dense, preset)
    adapter = write_adapter(tmp_path / "adapter", dense, ADAPTER)
    compare(stored, [adapter], in_float32(stored), ranks)


@pytest.mark.parametrize("preset", swept(PRESETS, lambda preset: preset == "NVFP4"))
def test_tokens_of_a_generic_model(tmp_path: Path, preset: str) -> None:
    dense = write_generic(tmp_path / "dense", "gemma2_untied", **WIDE)
    stored = write_compressed(tmp_path / preset, dense, preset)
    adapter = write_adapter(tmp_path / "adapter", dense, ADAPTER)
    compare(stored, [adapter], in_float32(stored), 2)


def as_exported(folder: Path, dense: Path) -> Any:
    """transformers' model of a checkpoint of ModelOpt: its numbers, and its inputs rounded."""
    oracle = load_oracle(dense)
    tensors = load_file(folder / "model.safetensors")
    numbers = CHECKPOINTS / "modelopt_nvfp4" / "numbers.safetensors"
    if "fp8" in folder.name:
        made = {name: tensors[name].float() * tensors[_beside(name, "weight_scale")]
                for name in load_file(numbers)}  # fmt: skip
    else:
        made = load_file(numbers)
    oracle.load_state_dict(
        {name: {**tensors, **made}[name].float() for name in oracle.state_dict()}
    )
    for name in made:
        scale = tensors.get(_beside(name, "input_scale"))
        if scale is None:
            continue
        module = oracle.get_submodule(name.removesuffix(".weight"))
        how = partial(rounded_by_token, scale=scale) if "fp8" in folder.name else partial(
            as_the_package, "NVFP4", 1 / scale.view(1)
        )  # fmt: skip
        module.register_forward_pre_hook(lambda _, given, how=how: how(given[0]))
    return oracle


def _beside(name: str, mark: str) -> str:
    return f"{name.removesuffix('weight')}{mark}"


EXPORTS = ("modelopt_nvfp4", "modelopt_nvfp4_weights", "modelopt_fp8")


@pytest.mark.parametrize(
    ("name", "ranks"),
    swept_rows(
        [(name, ranks) for name in EXPORTS for ranks in (1, 2, 4)],
        lambda name, ranks: ranks == 2,
    ),
)
def test_tokens_of_modelopt(tmp_path: Path, name: str, ranks: int) -> None:
    dense = write_llama(tmp_path / "dense", **SIZES)
    adapter = write_adapter(tmp_path / "adapter", dense, AdapterRecipe(r=4, std=0.2))
    if ranks == 4 and name == "modelopt_nvfp4":
        with pytest.raises(ValueError, match=r"not whole groups of 16.*tensor_parallel"):
            answers(CHECKPOINTS / name, [], ranks, [[1, 2]], dtype="float32")
        return
    oracle = as_exported(CHECKPOINTS / name, dense)
    compare(CHECKPOINTS / name, [adapter], oracle, ranks, dtype="float32")


def test_numbers_are_the_packages_own() -> None:
    """Exactly, and of any rows and columns: of those that begin within a byte or a group too."""
    folder = CHECKPOINTS / "modelopt_nvfp4_weights"
    numbers = load_file(CHECKPOINTS / "modelopt_nvfp4" / "numbers.safetensors")
    for module, whole in numbers.items():
        outputs, inputs = shape = (whole.shape[0], whole.shape[1])
        for rows, columns in (
            (((0, outputs),), ((0, inputs),)),
            (((3, 14), (20, outputs)), ((5, 30), (40, 43), (inputs - 9, inputs))),
        ):
            part = LinearPart(module.removesuffix(".weight"), shape, rows, columns)
            found = read(folder, part)
            assert isinstance(found, Fp4Weight) == (len(rows) == 1)
            wanted = torch.cat([whole[a:b] for a, b in rows])
            wanted = torch.cat([wanted[:, a:b] for a, b in columns], dim=1)
            assert torch.equal(found[:], wanted.half())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4"])
def test_activations_are_rounded_as_the_package_does(preset: str, dtype: torch.dtype) -> None:
    """Numbers between two codes, zeros, numbers that are too large, and very small ones."""
    size = NVFP4 if preset == "NVFP4" else MXFP4
    # The package has scales in the type of the numbers.
    least = -2 if dtype is torch.float16 else -6
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(64, 4 * size, generator=generator) * torch.logspace(least, 3, 64)[:, None]
    between = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0])
    x[5, : len(between)], x[6, : len(between)] = between, -between
    x[7], x[8, :size] = 0, 0
    x = x.to(dtype)
    for whole in (1.0, 437.0, 3e4) if preset == "NVFP4" else (None,):
        number = None if whole is None else torch.tensor([whole])
        found = rounded(x, size, number)
        assert found.dtype is dtype
        assert torch.equal(found, as_the_package(preset, number, x))


def test_a_request_does_not_change_its_neighbours() -> None:
    x = torch.randn(3, 64)
    alone = rounded(x[:1], NVFP4, torch.tensor([300.0]))
    assert torch.equal(rounded(x, NVFP4, torch.tensor([300.0]))[:1], alone)


@pytest.mark.parametrize(
    ("mark", "tensor", "message"),
    [
        ("weight_global_scale", torch.zeros(1), "weight_global_scale is not one positive number"),
        ("input_global_scale", torch.ones(2), "input_global_scale is not one positive number"),
        (
            "weight_scale",
            torch.ones(128, 8),
            r"stored as torch.float32, not as torch.float8_e4m3fn",
        ),
        ("weight_packed", torch.ones(128, 64), r"stored as torch.float32, not as torch.uint8"),
        ("weight_scale", torch.ones(128, 7).to(torch.float8_e4m3fn), r"\(128, 7\)"),
        ("weight_scale", torch.full((128, 8), -1.0).to(torch.float8_e4m3fn), "negative or no"),
    ],
)
def test_tensors_that_do_not_fit(
    dense: Path, tmp_path: Path, mark: str, tensor: Tensor, message: str
) -> None:
    stored = write_compressed(tmp_path / "stored", dense, "NVFP4")
    path = stored / "model.safetensors"
    name = f"model.layers.0.self_attn.q_proj.{mark}"
    save_file({**load_file(path), name: tensor}, path, metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=message):
        answers(stored, [], 1, [[1, 2]])


@pytest.mark.parametrize("preset", PRESETS)
def test_random_weights_are_rounded_too(dense: Path, tmp_path: Path, preset: str) -> None:
    stored = write_compressed(tmp_path / "stored", dense, preset)
    (found,) = answers(stored, [], 2, [[1, 2, 3]], load_format=LoadFormat.DUMMY)
    assert len(found) == 8


def test_older_exports_say_it_in_a_file_beside(tmp_path: Path) -> None:
    shutil.copytree(CHECKPOINTS / "modelopt_nvfp4", tmp_path / "stored")
    path = tmp_path / "stored" / "config.json"
    settings = json.loads(path.read_text())
    given = settings.pop("quantization_config")
    path.write_text(json.dumps(settings))
    assert load_architecture(tmp_path / "stored").quantisation is None
    beside = tmp_path / "stored" / "hf_quant_config.json"
    beside.write_text(json.dumps({"producer": {}}))
    with pytest.raises(ArchitectureError, match="does not say how weights are quantised"):
        load_architecture(tmp_path / "stored")
    own = {"quantization": {"quant_algo": given["quant_algo"], "group_size": 16}}
    beside.write_text(json.dumps(own))
    wanted = load_architecture(CHECKPOINTS / "modelopt_nvfp4").quantisation
    assert load_architecture(tmp_path / "stored").quantisation == wanted
