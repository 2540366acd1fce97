"""Llama's relatives on the engine: windows, biases, head norms, multipliers, fused maps, ropes.

Every model is judged on 1, 2 and 4 ranks, alone and with adapters in one batch. Continuations
are longer than the windows, and prompts come in chunks that are shorter.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from configs.architectures.llama import Architecture, Blend
from configs.architectures.select import load_architecture
from configs.model import ModelConfig
from modeling.attention.sdpa import SdpaAttention, SdpaStep
from modeling.layers.head_norms import HeadNorms
from modeling.models import llama, llama_projections
from modeling.runner import loading
from modeling.runner.load_paged import load_paged
from sharding.checkpoint import CheckpointError
from sharding.group import TensorParallel
from sharding.slicing import Segments
from tests.checkpoints import WINDOW, load_oracle, oracle_greedy, write_relative
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)
from tests.modeling.stepping import Asked, generate
from tests.ranks import run_ranks
from tests.sweeps import swept, swept_rows

SEPARATE = ["mistral", "qwen2", "qwen2_window", "qwen3", "qwen3_window", "granite", "solar"]
ROPES = ["yarn", "mistral_full"]
FUSED = ["phi3", "phi3_partial"]
MODELS = [("relative", variant) for variant in SEPARATE] + [("fused", v) for v in FUSED]
ADAPTERS = ["r8", "columns", "rows", "patterns"]


SUITE = {
    *(("relative", name) for name in ("mistral", "qwen2", "qwen3", "granite", "solar")),
    ("fused", "phi3"),
}
"""The first variant of each class."""

CUT = {"mistral", "phi3"}
"""Those that the suite has on two ranks too."""


@pytest.mark.sweep
@pytest.mark.parametrize("name", [BASE, "r8"])
@pytest.mark.parametrize(("family", "variant"), MODELS)
def test_alone(world: World, family: str, variant: str, name: str) -> None:
    compare(world, Setting(family, variant, 1, [name], chunk=WHOLE))


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(
        ((*model, ranks) for model in MODELS for ranks in (1, 2, 4)),
        lambda *row: row[:2] in SUITE and row[2] <= (2 if row[1] in CUT else 1),
    ),
)
def test_together(world: World, family: str, variant: str, ranks: int) -> None:
    """All adapters and the base in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting(family, variant, ranks, [BASE, *ADAPTERS]))


@pytest.mark.parametrize("variant", swept(ROPES, lambda variant: variant == "yarn"))
def test_ropes(world: World, variant: str) -> None:
    compare(world, Setting("relative", variant, 2, [BASE, "r8"]))


@pytest.mark.parametrize("shards", [1, 3])
def test_pickled_weights_give_the_same_model(tmp_path: Path, shards: int) -> None:
    folder = write_relative(tmp_path, "phi3")
    oracle = load_oracle(folder)
    path = folder / "model.safetensors"
    tensors = sorted(load_file(path).items())
    path.unlink()
    with pytest.raises(CheckpointError, match=r"model\.allow_pickle"):
        run_ranks(1, partial(_pickled, folder, False))
    names = (
        [f"pytorch_model-{i}.bin" for i in range(shards)] if shards > 1 else ["pytorch_model.bin"]
    )
    for i, name in enumerate(names):
        torch.save(dict(tensors[i::shards]), folder / name)
    if shards > 1:
        weight_map = {key: names[i % shards] for i, (key, _) in enumerate(tensors)}
        index = json.dumps({"weight_map": weight_map})
        (folder / "pytorch_model.bin.index.json").write_text(index)
    expected = oracle_greedy(oracle, [1, 5, 9], 12)
    assert run_ranks(2, partial(_pickled, folder, True)) == [expected] * 2


def _pickled(folder: Path, allow_pickle: bool, group: TensorParallel) -> list[int]:
    model = ModelConfig(id=str(folder), allow_pickle=allow_pickle)
    runner = load_paged(engine_config(folder, model=model), group, torch.device("cpu")).allocate()
    return generate(runner, [Asked([1, 5, 9], 12)], NUM_BLOCKS, BLOCK_SIZE)[0].tokens


WINDOWED = Setting("relative", "mistral", 1, [BASE])


@pytest.mark.parametrize("change", [-1, 1, 10**6])
def test_another_window_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, change: int
) -> None:
    plan = SdpaAttention._plan
    monkeypatch.setattr(
        SdpaAttention, "_plan", lambda self, q, k, tables, w: plan(self, q, k, tables, w + change)
    )
    expect_mismatch(world, WINDOWED)


def test_a_window_on_the_other_layer_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = SdpaAttention.prepare

    def swapped(
        self: SdpaAttention, queries: Sequence[int], keys: Sequence[int], tables: Tensor
    ) -> SdpaStep:
        step = prepare(self, queries, keys, tables)
        (window,) = step.plans
        seen = WINDOW if window is None else max(keys)
        return replace(step, plans={window: self._plan(tuple(queries), tuple(keys), tables, seen)})

    monkeypatch.setattr(SdpaAttention, "prepare", swapped)
    expect_mismatch(world, Setting("relative", "qwen2_window", 1, [BASE]))


def test_a_fused_map_cut_as_one_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def one_run(parts: tuple[Segments, ...], sizes: tuple[int, ...]) -> Segments:
        ((start, _),) = parts[0]
        share = sum(b - a for segments in parts for a, b in segments)
        first = start * sum(sizes) // sizes[0]
        return ((first, first + share),)

    monkeypatch.setattr(llama_projections, "_stacked", one_run)
    expect_mismatch(world, Setting("fused", "phi3", 2, [BASE]))


def test_head_norms_left_out_are_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    left_out = HeadNorms((), ())
    monkeypatch.setattr(llama, "head_norms", lambda q_norm, k_norm: left_out)
    expect_mismatch(world, Setting("relative", "qwen3", 1, [BASE]))


SKIPS: dict[str, dict[str, Any]] = {"layer": {"layer": 3}, "weight": {"weight": 0.9}, "none": {}}


@pytest.mark.parametrize("fault", SKIPS)
def test_another_skip_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Into the layer before, by the weight of training, or left out."""

    def other(folder: Path) -> Architecture:
        config = load_architecture(folder)
        assert isinstance(config, Architecture)
        *others, last = config.blends
        assert last == Blend(layer=4, source=1, weight=0.7)
        found = [last.model_copy(update=SKIPS[fault])] if SKIPS[fault] else []
        return config.model_copy(update={"blends": (*others, *found)})

    monkeypatch.setattr(loading, "load_architecture", other)
    expect_mismatch(world, Setting("relative", "solar", 1, [BASE]))


def test_granites_scores_scaled_as_llamas_are_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    prepare = SdpaAttention.prepare

    def scaled(self: SdpaAttention, *lengths: Any) -> SdpaStep:
        self.spec = replace(self.spec, scale=self.spec.head_dim**-0.5)
        return prepare(self, *lengths)

    monkeypatch.setattr(SdpaAttention, "prepare", scaled)
    expect_mismatch(world, Setting("relative", "granite", 1, [BASE]))
