"""Mixtures of experts in integers of 4 bits, beside transformers + PEFT over the numbers."""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from benchmarks.stored import mark_stored
from configs.architectures.base import ArchitectureError
from configs.model import LoadFormat, ModelConfig
from modeling.models.generic.integer_experts import IntegerMatrices
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from tests.checkpoints import load_oracle, write_adapter
from tests.checkpoints_experts import EXPERT_ADAPTERS
from tests.checkpoints_generic import write_generic
from tests.checkpoints_integers import write_awq, write_gptq
from tests.checkpoints_quantised import write_packed
from tests.modeling.parity.comparison import engine_config
from tests.modeling.quantisation.quantised import (
    check_steps_on_gpus,
    check_whole_experts,
    compare,
    experts_of,
)
from tests.sweeps import swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

CPU = torch.device("cpu")

FORMS: dict[str, tuple[Callable[..., Path], dict[str, Any]]] = {
    "gptq": (write_gptq, {"group": 16}),
    "symmetric": (write_gptq, {"group": -1, "symmetric": True}),
    "act-order": (write_gptq, {"group": 16, "act_order": True}),
    "attention in 8 bits": (write_gptq, {"group": 16, "dynamic": {"+:.*self_attn": {"bits": 8}}}),
    "awq": (write_awq, {"group": 32}),
    "packed": (write_packed, {"group": 16}),
    "zero points": (write_packed, {"group": -1, "symmetric": False}),
}

SIZES: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"moe_intermediate_size": 64, "num_experts": 6, "num_experts_per_tok": 2},
    "qwen2_moe": {
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 32,
        "num_experts": 6,
        "num_experts_per_tok": 2,
    },
    "mixtral": {"intermediate_size": 64},
    "glm4_moe": {
        "moe_intermediate_size": 32,
        "n_routed_experts": 6,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
}
"""Two ranks cut experts of 64 between groups, four ranks cut groups of 32 through."""


class World:
    """Tiny mixtures, quantised, and adapters on disk."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def dense(self, kind: str) -> Path:
        folder = self.root / kind
        if not folder.exists():
            write_generic(folder, kind, num_hidden_layers=2, **SIZES[kind])
        return folder

    def stored(self, kind: str, form: str) -> tuple[Path, Path]:
        """The checkpoint, and that of the numbers."""
        folder = self.root / f"{kind}-{form}"
        write, how = FORMS[form]
        if not folder.exists():
            write(folder, self.dense(kind), **how)
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
    return World(tmp_path_factory.mktemp("integer-experts"))


@pytest.mark.parametrize(
    ("kind", "form", "ranks"),
    swept_rows(
        [
            ("qwen3_moe", "gptq", 1),
            ("qwen3_moe", "act-order", 2),
            ("qwen3_moe", "awq", 4),
            ("qwen3_moe", "symmetric", 2),
            ("qwen3_moe", "packed", 2),
            ("qwen2_moe", "zero points", 1),
            ("mixtral", "awq", 2),
            ("glm4_moe", "gptq", 2),
        ],
        lambda kind, *_: kind == "qwen3_moe",
    ),
)
def test_tokens_with_adapters_of_experts(made: World, kind: str, form: str, ranks: int) -> None:
    stored, numbers = made.stored(kind, form)
    compare(stored, made.adapters(kind), load_oracle(numbers), ranks, dtype="float32")


@pytest.mark.parametrize(("form", "ranks"), [("awq", 4), ("act-order", 2)])
def test_tokens_of_ranks_with_whole_experts(made: World, form: str, ranks: int) -> None:
    stored, numbers = made.stored("qwen3_moe", form)
    how: dict[str, Any] = {"expert_parallel": True, "dtype": "float32"}
    compare(stored, made.adapters("qwen3_moe"), load_oracle(numbers), ranks, **how)


@pytest.mark.parametrize("form", ["gptq", "symmetric", "packed"])
def test_steps_on_gpus_are_captured_and_adapters_of_experts_taken_where_compared(
    made: World, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A group's scales, whatever their number, are no factors of a product of groups."""
    check_steps_on_gpus(made.stored("qwen3_moe", form)[0], IntegerMatrices, monkeypatch)


@pytest.mark.parametrize("form", FORMS)
def test_numbers_are_the_formats_own(made: World, form: str) -> None:
    """A rank keeps the codes packed, and what it makes of them is what the format's rule does."""
    stored, numbers = made.stored("qwen3_moe", form)
    loaded = load_model(engine_config(stored), SingleRank(), CPU)
    model: Any = loaded.model
    kept = 0
    for name, module in experts_of(load_oracle(numbers)):
        own = model.causal.get_submodule(name)
        for each in ("gate_up_proj", "down_proj"):
            assert torch.equal(getattr(own, each), getattr(module, each))
            matrices = getattr(own, f"{each}_stored")
            experts, outputs, inputs = getattr(module, each).shape
            # Whole chunks of 128 inputs.
            assert matrices.codes.nbytes == experts * outputs * -(-inputs // 128) * 64
            assert (matrices.zeros is None) == (form in ("symmetric", "packed"))
            kept += matrices.codes.nbytes
    assert 0 < kept < loaded.weight_forms["integers of 4 bits"]


@pytest.mark.parametrize("form", ["gptq", "packed"])
def test_a_rank_with_whole_experts_keeps_its_own(made: World, form: str) -> None:
    check_whole_experts(*made.stored("qwen3_moe", form))


def test_experts_that_were_left_out_stay_as_they_are(made: World, tmp_path: Path) -> None:
    left = re.compile(r"\.experts\.")
    numbers = write_gptq(tmp_path / "stored", made.dense("qwen3_moe"), 16, left=left)
    adapters = made.adapters("qwen3_moe")
    compare(tmp_path / "stored", adapters, load_oracle(numbers), 2, dtype="float32")


@pytest.mark.parametrize(
    "left", [r"experts\.3\.down_proj", r"experts\.\d\.gate_proj"], ids=["one", "gates"]
)
def test_maps_that_were_quantised_for_some_are_refused(
    made: World, tmp_path: Path, left: str
) -> None:
    write_gptq(tmp_path / "stored", made.dense("qwen3_moe"), 16, left=re.compile(left))
    with pytest.raises(
        ArchitectureError, match=r"is quantised and .* is not: of a layer's experts"
    ):
        load_model(engine_config(tmp_path / "stored"), SingleRank(), CPU)


def test_orders_of_gate_and_up_that_differ_are_refused(made: World, tmp_path: Path) -> None:
    write_gptq(tmp_path / "stored", made.dense("qwen3_moe"), 16, act_order=True)
    path = tmp_path / "stored" / "model.safetensors"
    name = "model.layers.0.mlp.experts.2.up_proj.g_idx"
    tensors = load_file(path)
    save_file(tensors | {name: tensors[name].flip(0).contiguous()}, path, {"format": "pt"})
    with pytest.raises(ArchitectureError, match="without act-order"):
        load_model(engine_config(tmp_path / "stored"), SingleRank(), CPU)


def test_integers_of_8_bits_are_refused(made: World, tmp_path: Path) -> None:
    write_packed(tmp_path / "stored", made.dense("qwen3_moe"), 16, bits=8)
    with pytest.raises(ArchitectureError, match="experts in integers of 8 bits: those in integers"):
        load_model(engine_config(tmp_path / "stored"), SingleRank(), CPU)


@pytest.mark.parametrize("ranks", [1, 2])
def test_random_weights_are_kept_as_the_checkpoint_s_would_be(
    made: World, tmp_path: Path, ranks: int
) -> None:
    folder = tmp_path / "dummy"
    folder.mkdir()
    fields = json.loads((made.dense("qwen3_moe") / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(fields))
    mark_stored(folder, "gptq")
    settings = ModelConfig(id=str(folder), load_format=LoadFormat.DUMMY)
    group = LoneRank(0, ranks) if ranks > 1 else SingleRank()
    model: Any = load_model(engine_config(folder, model=settings), group, CPU).model
    for _, own in experts_of(model.causal):
        assert own.gate_up_proj_stored.codes.shape == (6, 1, 128 // ranks, 32)
        assert own.down_proj_stored.codes.shape == (6, 1, 32, 32)
        assert 0 < own.down_proj.abs().mean() < 0.1
