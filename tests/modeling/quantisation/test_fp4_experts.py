"""Mixtures of experts in nvfp4 and mxfp4, beside transformers + PEFT over the packages' numbers.

The oracle rounds what enters each quantised map as compressed-tensors does, by the checkpoint's
own scale of that map. checkpoints/modelopt_nvfp4_experts is what NVIDIA's ModelOpt 0.47 exported of
a tiny Qwen3-MoE, with the numbers that its own function makes of it.
"""

import json
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.quantization import preset_name_to_scheme
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from configs.architectures.base import ArchitectureError
from configs.model import LoadFormat, ModelConfig
from modeling.adapters.experts import RoutedAdapter
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.quantisation import fp4
from modeling.quantisation.fp4 import NVFP4, rounded
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from tests.checkpoints import load_oracle, write_adapter
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import write_generic
from tests.checkpoints_quantised import write_fp4
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import (
    as_the_package,
    check_steps_on_gpus,
    check_whole_experts,
    compare,
    experts_of,
    round_experts,
)
from tests.modeling.quantisation.test_packed import CHECKPOINTS
from tests.sweeps import swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

CPU = torch.device("cpu")
PRESETS = ("NVFP4", "NVFP4A16", "MXFP4", "MXFP4A16")

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 128, "num_experts": 6, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "moe_intermediate_size": 128,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": 64,
        "kv_lora_rank": 64,
        "qk_rope_head_dim": 32,
        "qk_nope_head_dim": 16,
        "v_head_dim": 32,
    },
    "mixtral": {"intermediate_size": 128},
}
WIDE: dict[str, Any] = {
    "hidden_size": 128, "intermediate_size": 128, "num_key_value_heads": 4, "head_dim": 32,
    "num_hidden_layers": 2,
}  # fmt: skip
"""Four ranks get whole groups of 32 inputs."""


class World:
    """Tiny mixtures, quantised, and adapters on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def dense(self, kind: str) -> Path:
        folder = self.root / kind
        if not folder.exists():
            write_generic(folder, kind, **{**WIDE, **SIZES[kind]})
        return folder

    def stored(self, kind: str, preset: str, apart: bool = False) -> tuple[Path, Path]:
        """The checkpoint, and that of the numbers."""
        folder = self.root / f"{kind}-{preset}-{apart}"
        if not folder.exists():
            write_fp4(folder, self.dense(kind), preset, apart)
        return folder, folder.with_name(f"{folder.name}-numbers")

    def adapters(self, kind: str) -> list[Path]:
        names = ("r8", "parameters")
        folders = [self.root / f"{kind}-{name}" for name in names]
        for name, folder in zip(names, folders, strict=True):
            if not folder.exists():
                write_adapter(folder, self.dense(kind), EXPERT_ADAPTERS[name])
        return folders


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("fp4-experts"))


MAPS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}


def rounding_oracle(stored: Path, numbers: Path, preset: str) -> Any:
    """transformers' model of the numbers, whose quantised maps and experts round their inputs."""
    model = load_oracle(numbers)
    if preset.endswith("A16"):
        return model
    tensors = load_file(stored / "model.safetensors")
    model.set_experts_implementation("eager")

    def rounded(path: str, x: Tensor) -> Tensor:
        # Each map's own; mxfp4 has none.
        whole = tensors.get(f"{path}.input_global_scale")
        if f"{path}.input_scale" in tensors:
            whole = 1 / tensors[f"{path}.input_scale"].view(1)
        assert (whole is None) == (preset == "MXFP4")
        return as_the_package(preset, whole, x)

    def of_experts(path: str, name: str, expert: int, x: Tensor) -> list[Tensor]:
        return [rounded(f"{path}.{expert}.{each}", x) for each in MAPS[name]]

    for name, module in model.named_modules():
        if name.endswith(".experts"):
            round_experts(module, partial(of_experts, name))
        elif isinstance(module, nn.Linear) and f"{name}.weight_scale" in tensors:
            module.register_forward_pre_hook(lambda _, given, own=name: rounded(own, given[0]))
    return model


@pytest.mark.parametrize(
    ("kind", "preset", "ranks"),
    swept_rows(
        [
            ("qwen3_moe", "NVFP4", 1),
            ("qwen3_moe", "NVFP4", 4),
            ("qwen3_moe", "NVFP4A16", 2),
            ("qwen3_moe", "MXFP4", 2),
            ("qwen3_moe", "MXFP4A16", 4),
            ("deepseek_v3", "NVFP4", 2),
            ("deepseek_v3", "MXFP4", 1),
            ("mixtral", "NVFP4A16", 4),
            ("mixtral", "MXFP4", 2),
        ],
        lambda kind, preset, ranks: (kind, ranks) in {("qwen3_moe", 2), ("deepseek_v3", 2)},
    ),
)
def test_tokens_with_adapters_of_experts(made: World, kind: str, preset: str, ranks: int) -> None:
    """Ranks cut between groups, so the tokens are those of one rank."""
    stored, numbers = made.stored(kind, preset)
    oracle = rounding_oracle(stored, numbers, preset)
    compare(stored, made.adapters(kind), oracle, ranks, dtype="float32")


def test_tokens_of_gate_and_up_whose_inputs_have_scales_apart(made: World) -> None:
    stored, numbers = made.stored("qwen3_moe", "NVFP4", apart=True)
    oracle = rounding_oracle(stored, numbers, "NVFP4")
    compare(stored, made.adapters("qwen3_moe"), oracle, 2, dtype="float32")


@pytest.mark.parametrize(("preset", "ranks"), [("NVFP4", 4), ("MXFP4A16", 2)])
def test_tokens_of_ranks_with_whole_experts(made: World, preset: str, ranks: int) -> None:
    stored, numbers = made.stored("qwen3_moe", preset)
    how: dict[str, Any] = {"expert_parallel": True, "dtype": "float32"}
    oracle = rounding_oracle(stored, numbers, preset)
    compare(stored, made.adapters("qwen3_moe"), oracle, ranks, **how)


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_modelopt(tmp_path: Path, ranks: int) -> None:
    stored = CHECKPOINTS / "modelopt_nvfp4_experts"
    settings = json.loads((stored / "config.json").read_text())
    assert settings.pop("quantization_config")["quant_algo"] == "NVFP4"
    made_numbers = load_file(stored / "numbers.safetensors")
    own = load_file(stored / "model.safetensors")
    left = {name: tensor for name, tensor in own.items() if "_scale" not in name}
    dense = tmp_path / "dense"
    dense.mkdir()
    (dense / "config.json").write_text(json.dumps(settings))
    save_file(left | made_numbers, dense / "model.safetensors", {"format": "pt"})
    adapters = [tmp_path / name for name in ("r8", "parameters")]
    for folder in adapters:
        write_adapter(folder, dense, EXPERT_ADAPTERS[folder.name])
    oracle = rounding_oracle(stored, dense, "NVFP4")
    compare(stored, adapters, oracle, ranks, dtype="float32")
    model: Any = load_model(engine_config(stored), SingleRank(), CPU).model
    for name, module in experts_of(load_oracle(dense)):
        made_own = model.causal.get_submodule(name)
        assert torch.equal(made_own.gate_up_proj, module.gate_up_proj)
        assert torch.equal(made_own.down_proj, module.down_proj)


@pytest.mark.parametrize("preset", PRESETS)
def test_numbers_are_the_package_s_own(made: World, preset: str) -> None:
    """A rank keeps codes and scales packed, and what it makes of them is what the package does."""
    stored, numbers = made.stored("qwen3_moe", preset)
    loaded = load_model(engine_config(stored), SingleRank(), CPU)
    model: Any = loaded.model
    kept = 0
    for name, module in experts_of(load_oracle(numbers)):
        own = model.causal.get_submodule(name)
        for each in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(own, each), getattr(module, each))
            matrices = getattr(own, f"{each}_stored")
            bits = 8 * (matrices.codes.nbytes + matrices.scales.nbytes)
            assert bits == getattr(module, each).numel() * (4.5 if "NV" in preset else 4.25)
            kept += bits // 8
    assert 0 < kept < loaded.weight_forms[preset.removesuffix("A16").lower()]


@pytest.mark.parametrize("preset", ["NVFP4", "MXFP4"])
def test_a_rank_with_whole_experts_keeps_its_own(made: World, preset: str) -> None:
    check_whole_experts(*made.stored("qwen3_moe", preset))


@pytest.mark.parametrize("preset", ["NVFP4A16", "MXFP4"])
def test_steps_on_gpus_are_captured_and_adapters_of_experts_taken_where_compared(
    made: World, preset: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_steps_on_gpus(made.stored("qwen3_moe", preset)[0], Fp4Matrices, monkeypatch)


@pytest.mark.parametrize(("preset", "ranks", "size"), [("NVFP4A16", 4, 16), ("MXFP4A16", 2, 32)])
def test_ranks_that_cut_groups_are_refused(
    tmp_path: Path, preset: str, ranks: int, size: int
) -> None:
    sizes = {**WIDE, **SIZES["qwen3_moe"], "moe_intermediate_size": 32}
    stored = tmp_path / "stored"
    write_fp4(stored, write_generic(tmp_path / "dense", "qwen3_moe", **sizes), preset)
    message = rf"experts.0.down_proj.*not whole groups of {size}.*tensor_parallel"
    with pytest.raises(ValueError, match=message):
        load_model(engine_config(stored), LoneRank(1, ranks), CPU)
    config = engine_config(stored, expert_parallel=True)
    assert load_model(config, LoneRank(1, 2), CPU).weight_forms[preset[:5].lower()] > 0


def rewritten(stored: Path, folder: Path, change: Callable[[dict[str, Tensor]], None]) -> Path:
    """Write a checkpoint again with other tensors."""
    shutil.copytree(stored, folder)
    tensors = load_file(stored / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_experts_in_several_forms_are_refused(made: World, tmp_path: Path) -> None:
    """Some in mxfp4, or with inputs as they are."""
    stored, _ = made.stored("qwen3_moe", "NVFP4")
    other = {"NVFP4A16": made.stored("qwen3_moe", "NVFP4A16")[0]}
    other["MXFP4"] = made.stored("qwen3_moe", "MXFP4")[0]
    for preset, folder in other.items():
        own = load_file(folder / "model.safetensors")

        def change(tensors: dict[str, Tensor], own: dict[str, Tensor] = own) -> None:
            path = "model.layers.0.mlp.experts.2.up_proj."
            for name in [name for name in tensors if name.startswith(path)]:
                del tensors[name]
            tensors |= {name: own[name] for name in own if name.startswith(path)}

        made_so = rewritten(stored, tmp_path / preset, change)
        file = made_so / "config.json"
        settings = json.loads(file.read_text())
        groups = settings["quantization_config"]["config_groups"]
        scheme = preset_name_to_scheme(preset, [r"re:.*experts\.2\.up_proj"])
        groups["group_1"] = scheme.model_dump(mode="json")
        file.write_text(json.dumps(settings))
        with pytest.raises(ArchitectureError, match=r"all of a layer alike: take such"):
            load_model(engine_config(made_so), SingleRank(), CPU)


@pytest.mark.parametrize(("preset", "ranks"), [("NVFP4", 1), ("MXFP4A16", 2)])
def test_random_weights_are_kept_as_the_checkpoint_s_would_be(
    made: World, preset: str, ranks: int
) -> None:
    stored, _ = made.stored("qwen3_moe", preset)
    settings = ModelConfig(id=str(stored), load_format=LoadFormat.DUMMY)
    group = LoneRank(0, ranks) if ranks > 1 else SingleRank()
    model: Any = load_model(engine_config(stored, model=settings), group, CPU).model
    for _, own in experts_of(model.causal):
        assert own.gate_up_proj_stored.codes.shape == (6, 1, 256 // ranks, 32)
        assert own.down_proj_stored.codes.shape == (6, 1, 128, 32)
        assert own.down_proj_stored.rounds == (preset == "NVFP4")
        assert 0 < own.down_proj.abs().mean() < 0.1


def inputs_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Fp4Matrices, "inputs", lambda own, x, experts: (x,))


def every_expert_has_the_scale_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fp4Matrices.inputs
    monkeypatch.setattr(
        Fp4Matrices, "inputs", lambda own, x, experts: real(own, x, torch.zeros_like(experts))
    )


def up_has_the_scale_of_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fp4Matrices._rows

    def rows(self: Fp4Matrices, of_maps: Tensor) -> Tensor:
        return real(self, of_maps[..., :1])

    monkeypatch.setattr(Fp4Matrices, "_rows", rows)


def inputs_of_up_have_the_scale_of_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = Fp4Matrices.inputs

    def inputs(self: Fp4Matrices, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        found = real(self, x, experts)
        return [found[0]] * len(found)

    monkeypatch.setattr(Fp4Matrices, "inputs", inputs)


def scales_of_two_groups_are_swapped(monkeypatch: pytest.MonkeyPatch) -> None:
    real = fp4.unpack_scales

    def swapped(words: Tensor, groups: int) -> Tensor:
        return real(words, groups).view(len(real(words, groups)), -1, 2).flip(2).flatten(1)

    monkeypatch.setattr(fp4, "unpack_scales", swapped)


def an_adapter_reads_rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RoutedAdapter.add

    def add(self: RoutedAdapter, y: Tensor, x: Tensor, *more: int) -> None:
        real(self, y, rounded(x, NVFP4, torch.tensor([400.0])), *more)

    monkeypatch.setattr(RoutedAdapter, "add", add)


FAULTS = (
    inputs_are_left_as_they_are,
    every_expert_has_the_scale_of_the_first,
    up_has_the_scale_of_gate,
    inputs_of_up_have_the_scale_of_gate,
    scales_of_two_groups_are_swapped,
    an_adapter_reads_rounded_inputs,
)


@pytest.mark.parametrize("plant", FAULTS)
def test_faults_are_found(
    made: World, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the checkpoint whose gate and up have scales apart, which is served without a fault."""
    stored, numbers = made.stored("qwen3_moe", "NVFP4", apart=True)
    oracle = rounding_oracle(stored, numbers, "NVFP4")
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(stored, made.adapters("qwen3_moe"), oracle, 1, dtype="float32")
