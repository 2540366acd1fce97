"""Mixtures of experts in fp8 and integers of 8 bits with scales of outputs, beside transformers.

The oracle computes transformers + PEFT over the numbers of compressed-tensors, and rounds what
enters each quantised map by the package's function: with a scale for each token, or with the
checkpoint's own of that map. checkpoints/modelopt_fp8_experts is what NVIDIA's ModelOpt 0.47
exported of a tiny Qwen3-MoE.
"""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from benchmarks.stored import mark_stored
from configs.architectures.base import ArchitectureError
from configs.model import LoadFormat, ModelConfig
from configs.quantisation import Activations
from modeling.adapters.experts import RoutedAdapter
from modeling.models.generic import scaled_experts
from modeling.models.generic.scaled_experts import ScaledMatrices
from modeling.quantisation import scaled
from modeling.quantisation.activations import FP8, rounded_by_token, to_codes
from modeling.quantisation.fp8 import BlockFp8Weight
from modeling.quantisation.scaled import RowScaledWeight, ScaledWeight
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from tests.checkpoints import load_oracle, write_adapter
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_quantised import scheme_of, write_8_bits
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import (
    ROW_PARALLEL,
    check_steps_on_gpus,
    check_whole_experts,
    compare,
    experts_of,
    in_the_scheme,
    round_experts,
)
from tests.modeling.quantisation.test_fp4_experts import World, rewritten
from tests.modeling.quantisation.test_packed import CHECKPOINTS
from tests.sweeps import swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

CPU = torch.device("cpu")
MARGIN = 0.2
"""One number of 8 bits that is rounded otherwise may choose another expert."""

STATIC = {"dynamic": False, "strategy": "tensor"}

SCHEMES = {
    "fp8": scheme_of("FP8_DYNAMIC"),
    "fp8, static": scheme_of("FP8"),
    "fp8, weights alone": scheme_of("FP8_DYNAMIC", None),
    "8 bits": scheme_of("W8A8"),
    "8 bits, static": scheme_of("W8A8", STATIC),
}

OTHERS: dict[str, tuple[str, dict[str, Any]]] = {
    "fp8 of transformers": ("fp8, static", {"quant_method": "fp8", "activation_scheme": "static"}),
    "ModelOpt's tokens": (
        "fp8",
        {"quant_method": "modelopt", "quant_algo": "FP8_PER_CHANNEL_PER_TOKEN"},
    ),
}
"""The same tensors as others publish them: a scheme, and what config.json says."""

MAPS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
MIXTRAL = {"gate_up_proj": ("w1", "w3"), "down_proj": ("w2",)}


class Mixtures(World):
    """Tiny mixtures in 8 bits, and adapters on disk."""

    def stored(self, kind: str, preset: str, apart: bool = False) -> tuple[Path, Path]:
        folder = self.root / f"{kind}-{preset}-{apart}"
        if not folder.exists():
            name, settings = OTHERS.get(preset, (preset, None))
            write_8_bits(folder, self.dense(kind), SCHEMES[name], apart, settings)
        return folder, folder.with_name(f"{folder.name}-numbers")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Mixtures:
    return Mixtures(tmp_path_factory.mktemp("scaled-experts"))


def rounding_oracle(
    stored: Path, numbers: Path, name: str, ranks: int, whole_experts: bool = False
) -> Any:
    """transformers' model of the numbers, whose quantised maps and experts round their inputs.

    Where inputs are cut over ranks, and have scales of their own, each rank's part is rounded by
    itself.
    """
    model, scheme = load_oracle(numbers), SCHEMES[name]
    if scheme.input_activations is None:
        return model
    tensors = load_file(stored / "model.safetensors")
    model.set_experts_implementation("eager")
    is_latent = model.config.model_type == "deepseek_v3"
    is_mixtral = any(".w1.weight" in each for each in tensors)

    def rounded(path: str, parts: int, x: Tensor) -> Tensor:
        scale = tensors.get(f"{path}.input_scale")
        # The package takes the last of three dimensions for a token's inputs.
        own = x.view(1, -1, x.shape[-1]).chunk(parts, -1)
        made = [in_the_scheme(scheme, part, input_scale=scale) for part in own]
        return torch.cat(made, -1).view(x.shape)

    def of_experts(path: str, name: str, expert: int, x: Tensor) -> list[Tensor]:
        own = path.replace("mlp", "block_sparse_moe") if is_mixtral else path
        parts = ranks if name == "down_proj" and not whole_experts else 1
        maps = (MIXTRAL if is_mixtral else MAPS)[name]
        return [rounded(f"{own}.{expert}.{each}", parts, x) for each in maps]

    for path, module in model.named_modules():
        if path.endswith(".experts"):
            round_experts(module, partial(of_experts, path))
        elif isinstance(module, nn.Linear) and f"{path}.weight_scale" in tensors:
            # DeepSeek's attention is not cut.
            is_cut = path.endswith(ROW_PARALLEL) and not (is_latent and "o_proj" in path)
            parts = ranks if is_cut else 1
            how = partial(rounded, path, parts)
            module.register_forward_pre_hook(lambda _, given, how=how: how(given[0]))
    return model


@pytest.mark.parametrize(
    ("kind", "form", "ranks"),
    swept_rows(
        [
            ("qwen3_moe", "fp8", 1),
            ("qwen3_moe", "fp8", 2),
            ("qwen3_moe", "fp8", 4),
            ("qwen3_moe", "fp8, static", 4),
            ("qwen3_moe", "fp8, weights alone", 2),
            ("qwen3_moe", "8 bits", 1),
            ("qwen3_moe", "8 bits", 4),
            ("qwen3_moe", "8 bits, static", 2),
            ("mixtral", "fp8", 4),
            ("mixtral", "fp8, static", 2),
            ("mixtral", "8 bits", 2),
            ("deepseek_v3", "fp8", 2),
            ("deepseek_v3", "fp8, static", 1),
            ("deepseek_v3", "8 bits", 1),
        ],
        lambda kind, form, ranks: (
            (kind, form, ranks)
            in {
                ("qwen3_moe", "fp8", 2),
                ("qwen3_moe", "fp8, static", 4),
                ("qwen3_moe", "8 bits", 1),
                ("mixtral", "fp8, static", 2),
                ("deepseek_v3", "fp8", 2),
            }
        ),
    ),
)
def test_tokens_with_adapters_of_experts(made: Mixtures, kind: str, form: str, ranks: int) -> None:
    stored, numbers = made.stored(kind, form)
    oracle = rounding_oracle(stored, numbers, form, ranks)
    compare(stored, made.adapters(kind), oracle, ranks, margin=MARGIN, dtype="float32")


@pytest.mark.parametrize(("kind", "form"), [("mixtral", form) for form in OTHERS])
def test_tokens_of_what_others_publish(made: Mixtures, kind: str, form: str) -> None:
    stored, numbers = made.stored(kind, form)
    oracle = rounding_oracle(stored, numbers, OTHERS[form][0], 2)
    compare(stored, made.adapters(kind), oracle, 2, margin=MARGIN, dtype="float32")


@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_modelopt(tmp_path: Path, ranks: int) -> None:
    stored, numbers = CHECKPOINTS / "modelopt_fp8_experts", tmp_path / "numbers"
    settings = json.loads((stored / "config.json").read_text())
    assert settings.pop("quantization_config")["quant_algo"] == "FP8"
    own = load_file(stored / "model.safetensors")
    left = {name: tensor.float() for name, tensor in own.items() if "_scale" not in name}
    for name in [name for name in own if name.endswith("weight_scale")]:
        left[name.removesuffix("_scale")] *= own[name]
    numbers.mkdir()
    (numbers / "config.json").write_text(json.dumps(settings))
    save_file(left, numbers / "model.safetensors", {"format": "pt"})
    adapters = [tmp_path / name for name in ("r8", "parameters")]
    for folder in adapters:
        write_adapter(folder, numbers, EXPERT_ADAPTERS[folder.name])
    oracle = rounding_oracle(stored, numbers, "fp8, static", ranks)
    compare(stored, adapters, oracle, ranks, margin=MARGIN, dtype="float32")


@pytest.mark.parametrize(("form", "ranks"), [("fp8, static", 1), ("8 bits, static", 2)])
def test_tokens_of_gate_and_up_whose_inputs_have_scales_apart(
    made: Mixtures, form: str, ranks: int
) -> None:
    stored, numbers = made.stored("qwen3_moe", form, apart=True)
    oracle = rounding_oracle(stored, numbers, form, ranks)
    compare(stored, made.adapters("qwen3_moe"), oracle, ranks, margin=MARGIN, dtype="float32")


@pytest.mark.parametrize(
    ("form", "ranks"),
    [("fp8", 2), pytest.param("8 bits, static", 4, marks=pytest.mark.sweep)],
)
def test_tokens_of_ranks_with_whole_experts(made: Mixtures, form: str, ranks: int) -> None:
    stored, numbers = made.stored("qwen3_moe", form)
    oracle = rounding_oracle(stored, numbers, form, ranks, whole_experts=True)
    how: dict[str, Any] = {"expert_parallel": True, "dtype": "float32", "margin": MARGIN}
    compare(stored, made.adapters("qwen3_moe"), oracle, ranks, **how)


@pytest.mark.parametrize("form", SCHEMES)
def test_numbers_are_the_package_s_own(made: Mixtures, form: str) -> None:
    """A rank keeps codes and scales, and what it makes of them is what the package does."""
    stored, numbers = made.stored("qwen3_moe", form)
    loaded = load_model(engine_config(stored), SingleRank(), CPU)
    model: Any = loaded.model
    kept = 0
    for name, module in experts_of(load_oracle(numbers)):
        own = model.causal.get_submodule(name)
        for each in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(own, each), getattr(module, each))
            matrices = getattr(own, f"{each}_stored")
            assert matrices.codes.nbytes == getattr(module, each).numel()
            kept += matrices.codes.nbytes
    of_form = "fp8" if "fp8" in form else "integers of 8 bits"
    assert 0 < kept < loaded.weight_forms[of_form]


@pytest.mark.parametrize("kind", [FP8, torch.int8])
@pytest.mark.parametrize("activations", Activations)
def test_an_expert_is_its_linear_maps(kind: torch.dtype, activations: Activations) -> None:
    """Bit by bit, in blocks too where those have static scales or scales of groups."""
    group = 16 if kind is FP8 and activations in (Activations.GROUP, Activations.STATIC) else 0
    if activations is Activations.GROUP and not group:
        pytest.skip("integers have no groups")

    def weight(index: int) -> ScaledWeight:
        codes = to_codes(torch.randn(32, 64).mul(40), torch.ones(()), kind)
        scale = torch.tensor([0.01 + 0.01 * index]) if activations is Activations.STATIC else None
        if not group:
            return RowScaledWeight(codes, torch.rand(32, 1), activations, torch.bfloat16, scale)
        of = torch.arange(64) // group
        how = (group, activations, torch.bfloat16, scale)
        return BlockFp8Weight(codes, torch.rand(32, 64 // group), of, *how)

    maps = [[weight(2 * expert + own) for own in range(2)] for expert in range(3)]
    made, x = ScaledMatrices(maps), torch.randn(5, 64).bfloat16()
    for expert, parts in enumerate(maps):
        assert torch.equal(made.numbers()[expert], torch.cat([part[:] for part in parts]))
        found = made.inputs(x, torch.full((5,), expert))
        for own, part in zip(list(found) * (2 // len(found)), parts, strict=True):
            assert torch.equal(own, part.inputs(x))


@pytest.mark.parametrize("form", ["fp8 of transformers", "8 bits"])
def test_a_rank_with_whole_experts_keeps_its_own(made: Mixtures, form: str) -> None:
    check_whole_experts(*made.stored("qwen3_moe", form))


@pytest.mark.parametrize("form", ["fp8", "8 bits, static"])
def test_steps_on_gpus_are_captured_and_adapters_of_experts_taken_where_compared(
    made: Mixtures, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_steps_on_gpus(made.stored("qwen3_moe", form)[0], ScaledMatrices, monkeypatch)


def test_experts_in_several_forms_are_refused(made: Mixtures, tmp_path: Path) -> None:
    """One's inputs stay as they are, or one is in integers."""
    stored, _ = made.stored("qwen3_moe", "fp8")
    path = "model.layers.0.mlp.experts.2.up_proj."
    for form in ("fp8, weights alone", "8 bits"):
        own = load_file(made.stored("qwen3_moe", form)[0] / "model.safetensors")

        def change(tensors: dict[str, Tensor], own: dict[str, Tensor] = own) -> None:
            tensors |= {name: own[name] for name in own if name.startswith(path)}

        changed = rewritten(stored, tmp_path / form, change)
        file = changed / "config.json"
        settings = json.loads(file.read_text())
        scheme = SCHEMES[form].model_copy(update={"targets": [r"re:.*experts\.2\.up_proj"]})
        groups = settings["quantization_config"]["config_groups"]
        groups["group_1"] = scheme.model_dump(mode="json")
        file.write_text(json.dumps(settings))
        with pytest.raises(ArchitectureError, match=r"all of a layer alike: take such"):
            load_model(engine_config(changed), SingleRank(), CPU)


@pytest.mark.parametrize(("method", "ranks"), [("w8a8", 1), ("w8a8", 2), ("fp8-blocks", 1)])
def test_random_weights_are_kept_as_the_checkpoint_s_would_be(
    made: Mixtures, tmp_path: Path, method: str, ranks: int
) -> None:
    (tmp_path / "config.json").write_bytes((made.dense("qwen3_moe") / "config.json").read_bytes())
    mark_stored(tmp_path, method)
    settings = ModelConfig(id=str(tmp_path), load_format=LoadFormat.DUMMY)
    group = LoneRank(0, ranks) if ranks > 1 else SingleRank()
    model: Any = load_model(engine_config(tmp_path, model=settings), group, CPU).model
    for _, own in experts_of(model.causal):
        stored = own.gate_up_proj_stored, own.down_proj_stored
        assert [each.codes.shape for each in stored] == [
            (6, 256 // ranks, 128),
            (6, 128, 128 // ranks),
        ]
        assert {each.codes.dtype for each in stored} == {torch.int8 if method == "w8a8" else FP8}
        assert 0 < own.down_proj.abs().mean() < 0.1


def inputs_are_left_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ScaledMatrices, "inputs", lambda own, x, experts: (x,))


def every_expert_has_the_scale_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ScaledMatrices.inputs
    monkeypatch.setattr(
        ScaledMatrices, "inputs", lambda own, x, experts: real(own, x, torch.zeros_like(experts))
    )


def inputs_of_up_have_the_scale_of_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    real = ScaledMatrices.inputs

    def inputs(self: ScaledMatrices, x: Tensor, experts: Tensor) -> Sequence[Tensor]:
        found = real(self, x, experts)
        return [found[0]] * len(found)

    monkeypatch.setattr(ScaledMatrices, "inputs", inputs)


def up_has_the_scales_of_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    def below(parts: Sequence[ScaledWeight]) -> tuple[Tensor, Tensor]:
        codes, _ = scaled.below(parts)
        return codes, torch.cat([parts[0].scales] * len(parts))

    monkeypatch.setattr(scaled_experts, "below", below)


def an_adapter_reads_rounded_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    real = RoutedAdapter.add

    def add(self: RoutedAdapter, y: Tensor, x: Tensor, *more: int) -> None:
        real(self, y, rounded_by_token(x, torch.tensor([0.002])), *more)

    monkeypatch.setattr(RoutedAdapter, "add", add)


FAULTS = (
    inputs_are_left_as_they_are,
    every_expert_has_the_scale_of_the_first,
    inputs_of_up_have_the_scale_of_gate,
    up_has_the_scales_of_gate,
    an_adapter_reads_rounded_inputs,
)


@pytest.mark.parametrize("plant", FAULTS)
def test_faults_are_found(
    made: Mixtures, plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the checkpoint whose gate and up have scales apart, which is served without a fault."""
    stored, numbers = made.stored("qwen3_moe", "fp8, static", apart=True)
    oracle = rounding_oracle(stored, numbers, "fp8, static", 1)
    plant(monkeypatch)
    with pytest.raises(AssertionError):
        compare(stored, made.adapters("qwen3_moe"), oracle, 1, margin=MARGIN, dtype="float32")
