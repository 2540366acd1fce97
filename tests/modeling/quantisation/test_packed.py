"""GPTQ's and AWQ's files, written by the package gptqmodel 7.7 and read by us.

checkpoints/ has one tiny Llama for each: model.safetensors is what the package packed, and
numbers.safetensors what its own function makes of it again, in float16. (It is not a dependency:
it would change the version of torch.)
"""

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.architectures.select import load_architecture
from configs.model import LoadFormat, ModelConfig
from modeling.quantisation.formats import StoredFormat
from modeling.quantisation.integers import IntegerWeight
from modeling.runner.loading import load_model
from sharding.checkpoint import CheckpointError, SafetensorsCheckpoint
from sharding.group import SingleRank
from sharding.linear_weight import LinearPart, LinearWeight
from sharding.loader import Weights
from tests.checkpoints import AdapterRecipe, load_oracle, write_adapter, write_llama
from tests.checkpoints_generic import write_generic
from tests.checkpoints_integers import write_gptq
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import compare

CHECKPOINTS = Path(__file__).parent / "checkpoints"
NAMES = ("gptq", "gptq_act_order", "awq")


def read(folder: Path, *parts: LinearPart) -> LinearWeight:
    how = load_architecture(folder).quantisation
    assert how is not None
    source = SafetensorsCheckpoint(folder)
    weights = Weights(source, SingleRank(), torch.float16, torch.device("cpu"))
    return StoredFormat(how).read(weights, parts)


@pytest.mark.parametrize("name", NAMES)
def test_numbers_are_the_packages_own(name: str) -> None:
    """Exactly, and of any rows and columns: of those that begin within a word or a group too."""
    folder = CHECKPOINTS / name
    for module, numbers in load_file(folder / "numbers.safetensors").items():
        outputs, inputs = shape = (numbers.shape[0], numbers.shape[1])
        for rows, columns in (
            (((0, outputs),), ((0, inputs),)),
            (((3, 14), (20, outputs)), ((0, inputs),)),
            (((0, outputs),), ((5, 30), (40, 43), (inputs - 9, inputs))),
            (((8, 16),), ((inputs // 2, inputs),)),
        ):
            part = LinearPart(module.removesuffix(".weight"), shape, rows, columns)
            found = read(folder, part)
            assert isinstance(found, IntegerWeight)
            assert (found.zeros is None) == (name == "gptq"), "symmetric"
            wanted = torch.cat([numbers[a:b] for a, b in rows])
            wanted = torch.cat([wanted[:, a:b] for a, b in columns], dim=1)
            assert torch.equal(found[:], wanted)
            x = torch.randn(3, wanted.shape[1]).half()
            assert torch.equal(found(x, None), x @ wanted.t())


def test_maps_of_one_input_are_one_weight_where_they_share_their_order() -> None:
    def part(name: str, outputs: int) -> LinearPart:
        path = f"model.layers.0.self_attn.{name}"
        return LinearPart(path, (outputs, 64), ((0, outputs),), ((0, 64),))

    for name in NAMES:
        found = read(CHECKPOINTS / name, part("q_proj", 64), part("k_proj", 32))
        assert isinstance(found, IntegerWeight)
        assert found.shape == (96, 64)
        numbers = load_file(CHECKPOINTS / name / "numbers.safetensors")
        wanted = [
            numbers[f"model.layers.0.self_attn.{each}.weight"] for each in ("q_proj", "k_proj")
        ]
        assert torch.equal(found[:], torch.cat(wanted))


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"g_idx": torch.full((64,), 99, dtype=torch.int32)}, "g_idx names groups beyond the 2"),
        ({"qweight": torch.zeros(1, 64, dtype=torch.int32)}, r"qweight' has shape \(1, 64\)"),
    ],
)
def test_tensors_that_do_not_fit(tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    shutil.copytree(CHECKPOINTS / "gptq", tmp_path, dirs_exist_ok=True)
    module = "model.layers.0.self_attn.q_proj"
    path = tmp_path / "model.safetensors"
    own = {f"{module}.{name}": tensor for name, tensor in changed.items()}
    save_file(load_file(path) | own, path)
    part = LinearPart(module, (64, 64), ((0, 64),), ((0, 64),))
    with pytest.raises(CheckpointError, match=message):
        read(tmp_path, part)


SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}
"""Of the packed models."""


def compare_tokens(root: Path, stored: Path, name: str, dense: Path, ranks: int) -> None:
    """Compare with transformers, whose weights are the package's numbers."""
    oracle = load_oracle(dense)
    folder = CHECKPOINTS / name
    tensors = load_file(folder / "model.safetensors") | load_file(folder / "numbers.safetensors")
    oracle.load_state_dict({key: tensors[key].float() for key in oracle.state_dict()})
    adapter = write_adapter(root / "adapter", dense, AdapterRecipe(r=4, std=0.2))
    compare(stored, [adapter], oracle, ranks, dtype="float32")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_tokens(tmp_path: Path, name: str, ranks: int) -> None:
    dense = write_llama(tmp_path / "dense", **SIZES)
    compare_tokens(tmp_path, CHECKPOINTS / name, name, dense, ranks)


@pytest.mark.parametrize("name", NAMES)
def test_tokens_of_a_generic_model(tmp_path: Path, name: str) -> None:
    """Helium has Llama's tensors, and turns neighbouring numbers."""
    dense = write_generic(tmp_path / "dense", "helium", **SIZES, head_dim=16)
    stored = tmp_path / "stored"
    shutil.copytree(CHECKPOINTS / name, stored)
    how = json.loads((stored / "config.json").read_text())["quantization_config"]
    own = json.loads((dense / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps({**own, "quantization_config": how}))
    compare_tokens(tmp_path, stored, name, dense, 2)


@pytest.mark.parametrize("how", [{"symmetric": True}, {}, {"act_order": True}])
@pytest.mark.parametrize("ranks", [1, 2])
def test_gptq_in_8_bits(tmp_path: Path, ranks: int, how: dict[str, Any]) -> None:
    """By the rule of the files: the package packs 8 bits as it packs 4."""
    dense = write_llama(tmp_path / "dense", **SIZES)
    numbers = write_gptq(tmp_path / "stored", dense, 32, bits=8, **how)
    adapter = write_adapter(tmp_path / "adapter", dense, AdapterRecipe(r=4, std=0.2))
    compare(tmp_path / "stored", [adapter], load_oracle(numbers), ranks, dtype="float32")


DYNAMIC = {
    r"-:.*layers\.1\..*down_proj": {},
    r"+:.*layers\.0\..*k_proj": {"bits": 8, "group_size": -1},
    r".*\.[kv]_proj": {"group_size": 16},
    r"+:.*(gate|down)_proj": {"bits": 8},
}
"""Maps of one input have other bits, other groups or both; one stays as it was."""


@pytest.mark.parametrize("ranks", [1, 2])
def test_modules_with_settings_of_their_own(tmp_path: Path, ranks: int) -> None:
    dense = write_llama(tmp_path / "dense", hidden_size=64, intermediate_size=64)
    left = re.compile(r"layers\.1\..*down_proj")
    numbers = write_gptq(tmp_path / "stored", dense, 32, dynamic=DYNAMIC, left=left)
    shapes = {
        name: tuple(tensor.shape)
        for name, tensor in load_file(tmp_path / "stored" / "model.safetensors").items()
    }
    path = "model.layers.{}.self_attn.{}_proj.scales"
    # Groups of 32 of q, one of k, and of 16 of v and of the next layer's k.
    counts = [shapes[path.format(*each)][0] for each in ((0, "q"), (0, "k"), (0, "v"), (1, "k"))]
    assert counts == [2, 1, 4, 4]
    assert "model.layers.1.mlp.down_proj.weight" in shapes
    adapter = write_adapter(tmp_path / "adapter", dense, AdapterRecipe(r=8, std=0.2))
    compare(tmp_path / "stored", [adapter], load_oracle(numbers), ranks)


def test_random_weights_are_not_made_in_several_schemes(tmp_path: Path) -> None:
    dense = write_llama(tmp_path / "dense", hidden_size=64, intermediate_size=64)
    write_gptq(tmp_path / "stored", dense, 32, dynamic={"+:.*k_proj": {"bits": 8}})
    dummy = ModelConfig(id=str(tmp_path / "stored"), load_format=LoadFormat.DUMMY)
    config = engine_config(tmp_path / "stored", model=dummy)
    with pytest.raises(ValueError, match=r"several \(gptq\): remove all but one"):
        load_model(config, SingleRank(), torch.device("cpu"))
