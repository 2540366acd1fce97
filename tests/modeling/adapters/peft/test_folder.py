import os
from dataclasses import replace
from math import nan
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.wire.adapters import AdapterError, AdapterRefusal
from modeling.adapters.peft import adapter as peft_adapter
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import ModulePosition
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

PROJECTIONS = (UP, DOWN)


def refusal(folder: Path, max_rank: int = 64) -> AdapterError:
    with pytest.raises(AdapterError) as caught:
        for _ in open_adapter(folder, PROJECTIONS, max_rank).read():
            pass
    return caught.value


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_factors_come_with_the_scaling_in_b(tmp_path: Path, dtype: torch.dtype) -> None:
    tensors = factors(UP, [4, 4, 4], dtype=dtype)
    adapter = open_adapter(write_lora(tmp_path, tensors), PROJECTIONS, 64)
    modules = list(adapter.read())
    assert [m.position for m in modules] == [
        ModulePosition(0, 0),
        ModulePosition(0, 1),
        ModulePosition(0, 2),
    ]
    for layer, module in enumerate(modules):
        name = f"base_model.model.model.layers.{layer}.up.lora_"
        assert torch.equal(module.a, tensors[f"{name}A.weight"].float())
        assert torch.equal(module.b, tensors[f"{name}B.weight"].float() * 2)


def test_each_module_has_its_own_rank_and_scaling(tmp_path: Path) -> None:
    tensors = {**factors(UP, [4, 9, 0]), **factors(DOWN, [0, 0, 2])}
    fields = {
        "rank_pattern": {"layers.1.up": 9, "down": 2},
        "alpha_pattern": {"down": 3},
        "use_rslora": True,
    }
    adapter = open_adapter(write_lora(tmp_path, tensors, **fields), PROJECTIONS, 64)
    assert adapter.ranks == {
        ModulePosition(0, 0): 4,
        ModulePosition(0, 1): 9,
        ModulePosition(1, 2): 2,
    }
    scales = {
        module.position: float((module.b / tensors[key]).mean())
        for module, key in zip(
            adapter.read(), [k for k in tensors if k.endswith("B.weight")], strict=True
        )
    }
    expected = {
        ModulePosition(0, 0): 8 / 2,
        ModulePosition(0, 1): 8 / 3,
        ModulePosition(1, 2): 3 / 2**0.5,
    }
    assert scales == pytest.approx(expected, rel=1e-6)


def test_factors_of_maps_that_are_computed_without_them_are_left_out(tmp_path: Path) -> None:
    """With their scales, and whatever they are; the same map's bias is refused, as it counts."""
    idle = {f"base_model.model.model.layers.0.dt_proj.lora_{part}": torch.full((2, 2), nan)
            for part in ("A.weight", "B.weight", "magnitude_vector")}  # fmt: skip
    own = [replace(each, idle_modules=("dt_proj",)) for each in PROJECTIONS]
    tensors = factors(UP, [4, 4, 4])
    adapter = open_adapter(write_lora(tmp_path / "one", {**tensors, **idle}), own, 64)
    assert len(list(adapter.read())) == 3
    bias = {"base_model.model.model.layers.0.dt_proj.bias": torch.ones(2)}
    folder = write_lora(tmp_path / "two", {**tensors, **idle, **bias}, bias="lora_only")
    with pytest.raises(AdapterError, match=r"dt_proj\.bias is the bias of no adaptable"):
        open_adapter(folder, own, 64)
    with pytest.raises(AdapterError, match=r"holds no LoRA tensor: it adapts nothing"):
        open_adapter(write_lora(tmp_path / "three", idle), own, 64)


def test_stacks_of_any_size_are_equal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = {**factors(UP, [4, 4, 9]), **factors(DOWN, [4, 4, 4])}
    folder = write_lora(tmp_path, tensors, rank_pattern={"layers.2.up": 9})
    found = []
    for most in (1, 768, 2**19):
        monkeypatch.setattr(peft_adapter, "PART_BYTES", most)
        adapter = open_adapter(folder, PROJECTIONS, 64)
        found.append([len(stack.layers) for stack in adapter.stacks()])
        read = sorted(adapter.read(), key=lambda m: (m.position.projection, m.position.layer))
        for module, (key_a, key_b) in zip(read, pairs(tensors), strict=True):
            assert torch.equal(module.a, tensors[key_a])
            assert torch.allclose(module.b, tensors[key_b] * 8 / len(module.a))
    assert found == [[1, 1, 1, 1, 1, 1], [2, 1, 1, 1, 1], [2, 3, 1]]


def pairs(tensors: dict[str, Tensor]) -> list[tuple[str, str]]:
    """The names of A and B of each module."""
    names = [key.removesuffix("A.weight") for key in tensors if key.endswith("A.weight")]
    return [(f"{name}A.weight", f"{name}B.weight") for name in names]


def test_an_unknown_tensor_is_refused_by_name(tmp_path: Path) -> None:
    for key in (
        "base_model.model.model.layers.3.up.lora_A.weight",
        "base_model.model.model.layers.0.gate.lora_A.weight",
        "model.layers.0.up.lora_A.weight",
        "base_model.model.model.layers.0.up.lora_A.default.weight",
        "base_model.model.model.layers.0.up.lora_magnitude_vector",
        "base_model.model.model.layers.0.up.lora_B.bias",
        "base_model.model.model.layers.0.up.weight",
    ):
        folder = write_lora(tmp_path, {**factors(UP, [4, 4, 4]), key: torch.ones(4, 6)})
        error = refusal(folder)
        assert error.refusal is AdapterRefusal.UNSUPPORTED
        assert key in error.message


@pytest.mark.parametrize(
    "key",
    [
        "base_model.model.lm_head.lora_A.weight",
        "base_model.model.model.embed_tokens.lora_embedding_A",
        "base_model.model.lm_head.weight",
    ],
)
def test_the_vocabulary_is_refused_with_its_own_reason(tmp_path: Path, key: str) -> None:
    error = refusal(write_lora(tmp_path, {**factors(UP, [4]), key: torch.ones(4, 6)}))
    assert key in error.message
    assert "vocabulary" in error.message


def test_a_parameter_of_experts_is_refused_with_its_own_reason(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.mlp.experts.base_layer.lora_A.weight"
    saved = {**factors(UP, [4]), key: torch.ones(8, 6)}
    folder = write_lora(tmp_path, saved, target_parameters=["experts.down_proj"])
    with pytest.raises(AdapterError, match=f"target_parameters: {key} adapts neither"):
        open_adapter(folder, PROJECTIONS, 8)


@pytest.mark.parametrize("side", ["A", "B"])
def test_a_factor_without_its_partner_is_refused(tmp_path: Path, side: str) -> None:
    tensors = factors(UP, [4, 4, 4])
    key = f"base_model.model.model.layers.1.up.lora_{side}.weight"
    del tensors[key]
    error = refusal(write_lora(tmp_path, tensors))
    assert f"{key} is missing" in error.message


@pytest.mark.parametrize(("side", "shape"), [("A", (4, 7)), ("B", (9, 4))])
def test_sizes_of_another_model_are_refused(
    tmp_path: Path, side: str, shape: tuple[int, ...]
) -> None:
    key = f"base_model.model.model.layers.2.up.lora_{side}.weight"
    error = refusal(write_lora(tmp_path, {**factors(UP, [4, 4, 4]), key: torch.ones(shape)}))
    assert error.message.startswith("adapter for another base model: ")
    assert key in error.message


def test_a_rank_that_the_config_does_not_say_is_refused(tmp_path: Path) -> None:
    error = refusal(write_lora(tmp_path, factors(UP, [4, 5, 4])))
    assert "has rank 5, but adapter_config.json" in error.message
    assert "says 4" in error.message


def test_a_factor_that_is_no_matrix_is_refused(tmp_path: Path) -> None:
    key = "base_model.model.model.layers.0.up.lora_A.weight"
    error = refusal(write_lora(tmp_path, {**factors(UP, [4]), key: torch.ones(4, 6, 1)}))
    assert "not a matrix" in error.message


def test_a_rank_above_the_limit_is_too_large(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, factors(UP, [9, 9, 9]), r=9)
    open_adapter(folder, PROJECTIONS, 9)
    error = refusal(folder, max_rank=8)
    assert error.refusal is AdapterRefusal.TOO_LARGE
    assert "rank 9" in error.message
    assert "max_rank 8" in error.message


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("side", ["A", "B"])
def test_values_that_are_not_finite_are_refused(tmp_path: Path, side: str, value: float) -> None:
    tensors = factors(UP, [4, 4, 4])
    key = f"base_model.model.model.layers.1.up.lora_{side}.weight"
    tensors[key][1, 2] = value
    error = refusal(write_lora(tmp_path, tensors))
    assert key in error.message
    assert "not finite" in error.message


def test_a_type_that_is_no_float_is_refused(tmp_path: Path) -> None:
    tensors = {key: value.to(torch.int8) for key, value in factors(UP, [4]).items()}
    assert "has type I8" in refusal(write_lora(tmp_path, tensors)).message


def test_no_safetensors_is_refused_with_what_to_do(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, factors(UP, [4]))
    (folder / "adapter_model.safetensors").unlink()
    assert "no adapter_model.safetensors" in refusal(folder).message
    (folder / "adapter_model.bin").write_bytes(b"pickle")
    error = refusal(folder)
    assert "only a .bin" in error.message
    assert "safe_serialization" in error.message


def test_no_tensor_at_all_is_refused(tmp_path: Path) -> None:
    assert "adapts nothing" in refusal(write_lora(tmp_path, {})).message


@pytest.mark.parametrize("keep", [0, 7, 60, -1])
def test_a_truncated_file_is_refused(tmp_path: Path, keep: int) -> None:
    path = write_lora(tmp_path, factors(UP, [4, 4, 4])) / "adapter_model.safetensors"
    size = os.path.getsize(path)
    os.truncate(path, keep if keep >= 0 else size + keep)
    assert "cannot be read" in refusal(tmp_path).message


@pytest.mark.parametrize(
    "fields",
    [
        {"target_modules": ["down"]},
        {"target_modules": []},
        {"target_modules": r".*\.[02]\.up"},
        {"exclude_modules": ["layers.1.up"]},
        {"target_modules": "all-linear", "exclude_modules": ".*up"},
        {"layers_to_transform": [0, 2]},
        {"layers_pattern": ["h"], "layers_to_transform": [1]},
    ],
)
def test_tensors_that_peft_would_leave_out_are_refused(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    error = refusal(write_lora(tmp_path, factors(UP, [0, 4, 0]), **fields))
    assert "adapts model.layers.1.up, which" in error.message
    assert list(fields)[-1] in error.message


def test_targets_beyond_the_file_do_no_harm(tmp_path: Path) -> None:
    fields = {"target_modules": "all-linear", "exclude_modules": ["x"]}
    folder = write_lora(tmp_path, factors(UP, [0, 4, 0]), **fields)
    assert open_adapter(folder, PROJECTIONS, 64).ranks == {ModulePosition(0, 1): 4}


def test_factors_that_peft_would_initialise_are_refused(tmp_path: Path) -> None:
    fields = {"target_modules": "all-linear", "init_lora_weights": False}
    whole = factors(UP, [4, 4, 4]) | factors(DOWN, [4, 4, 4])
    open_adapter(write_lora(tmp_path, whole, **fields), PROJECTIONS, 64)
    error = refusal(write_lora(tmp_path, factors(UP, [4, 4, 4]), **fields))
    assert "nothing for model.layers.0.down" in error.message


def test_all_that_is_wrong_with_both_files_is_named(tmp_path: Path) -> None:
    tensors = {**factors(UP, [4, 5, 6]), **factors(DOWN, [4, 4, 4])}
    del tensors["base_model.model.model.layers.1.down.lora_A.weight"]
    strangers = {f"base_model.model.s{i}.lora_A.weight": torch.ones(1) for i in range(500)}
    folder = write_lora(tmp_path, tensors | strangers, use_dora=True, target_modules=["up"])
    error = refusal(folder)
    assert len(error.reasons) == 6, "those that differ by numbers are reported once"
    words = (
        "use_dora",
        "s0.lora_A",
        "down.lora_A.weight is missing",
        "up.lora_A.weight has rank 5",
    )
    for word in (*words, "up.lora_B.weight has rank 5", "adapts model.layers.0.down, which"):
        assert sum(word in reason for reason in error.reasons) == 1, word
    assert all(reason in error.message for reason in error.reasons)


def test_metadata_in_the_file_does_no_harm(tmp_path: Path) -> None:
    folder = write_lora(tmp_path, factors(UP, [4]))
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, Tensor] = load_file(path)
    save_file(tensors, path, metadata={"format": "pt"})
    assert len(open_adapter(folder, PROJECTIONS, 64).modules) == 1


def test_whole_maps_are_no_matter_of_settings_in_foreign_code(tmp_path: Path) -> None:
    saved = {"base_model.model.model.layers.0.down.weight": torch.zeros(6, 10)}
    folder = write_lora(
        tmp_path, {**factors(UP, [4, 4, 4]), **saved}, target_modules=["up"],
        modules_to_save=["layers.0.down"],
    )  # fmt: skip
    padded = [replace(each, can_adapt_ends=False) for each in PROJECTIONS]
    with pytest.raises(AdapterError, match=r"names model\.layers\.0\.down, .* own code") as caught:
        open_adapter(folder, padded, 64)
    assert "whole_linears" not in str(caught.value)
