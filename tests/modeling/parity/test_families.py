"""GPT-2, OPT and GPT-NeoX: transformers + PEFT and the runner give the same tokens and logits."""

from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from configs.architectures.rope import Rope
from configs.engine import LimitsConfig
from modeling.adapters.linear import AdapterRowLinear
from modeling.adapters.product import AdapterData
from modeling.adapters.projection import Projection
from modeling.models import gpt2, gpt_neox, opt
from modeling.runner.load_paged import load_paged
from sharding.group import TensorParallel
from sharding.linear import RowParallelLinear
from sharding.slicing import Segments
from tests.checkpoints_others import (
    GPT2_ADAPTERS,
    GPT2_VARIANTS,
    GPT_NEOX_ADAPTERS,
    GPT_NEOX_VARIANTS,
    OPT_ADAPTERS,
    OPT_VARIANTS,
    write_gpt_neox,
)
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
from tests.oracle import prompt_truth
from tests.ranks import run_ranks
from tests.sweeps import swept

FIRST = {"gpt2": "plain", "opt": "plain", "gpt_neox": "parallel"}
"""The variant that each family is tried with in every way."""

ADAPTERS = {"gpt2": GPT2_ADAPTERS, "opt": OPT_ADAPTERS, "gpt_neox": GPT_NEOX_ADAPTERS}
VARIANTS = {"gpt2": GPT2_VARIANTS, "opt": OPT_VARIANTS, "gpt_neox": GPT_NEOX_VARIANTS}
OTHERS = [
    (family, variant)
    for family in FIRST
    for variant in VARIANTS[family]
    if variant != FIRST[family]
    # Hand-made batches name no rope set: the scheduler's do, in test_parity_ropes.py.
    if variant != "longrope"
]
Cut = Callable[[Segments, int], Segments]
MIXED = [BASE, "r4", "r16", "rows"]


@pytest.mark.parametrize("name", swept([BASE, *GPT2_ADAPTERS], lambda name: name in (BASE, "rows")))
@pytest.mark.parametrize("family", FIRST)
def test_alone(world: World, family: str, name: str) -> None:
    compare(world, Setting(family, FIRST[family], 1, [name], chunk=WHOLE))


@pytest.mark.parametrize("name", swept([BASE, "columns", "rows"], lambda name: name != "columns"))
@pytest.mark.parametrize("ranks", swept([2, 4], lambda ranks: ranks == 2))
@pytest.mark.parametrize("family", FIRST)
def test_alone_on_ranks(world: World, family: str, ranks: int, name: str) -> None:
    """Over gloo, as a server's ranks are."""
    compare(world, Setting(family, FIRST[family], ranks, [name], chunk=WHOLE), run=run_ranks)


@pytest.mark.parametrize("ranks", swept([1, 2, 4], lambda ranks: ranks < 4))
@pytest.mark.parametrize("family", FIRST)
def test_together(world: World, family: str, ranks: int) -> None:
    """All adapters and the base in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting(family, FIRST[family], ranks, [BASE, *ADAPTERS[family]]))


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "variant"), OTHERS)
def test_other_shapes(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 2, MIXED))


def test_neox_goes_beyond_its_trained_length_where_it_is_asked_to(tmp_path: Path) -> None:
    folder = write_gpt_neox(tmp_path, max_position_embeddings=32)
    prompt, told = prompt_truth(folder, None, 20)
    limits = LimitsConfig(max_running=4, max_step_tokens=64, max_total_tokens=64)
    config = engine_config(folder, limits=limits)

    def on_rank(group: TensorParallel) -> list[int]:
        runner = load_paged(config, group, torch.device("cpu")).allocate()
        return generate(runner, [Asked(prompt, 24, chunk=7)], NUM_BLOCKS, BLOCK_SIZE)[0].tokens

    assert run_ranks(2, on_rank) == [told.tokens] * 2


GPT2_COLUMNS = Setting("gpt2", "plain", 2, ["columns"])
GPT2_BY_LAYER = Setting("gpt2", "by_layer", 1, [BASE])
OPT_BASE = Setting("opt", "plain", 1, [BASE])
NEOX_COLUMNS = Setting("gpt_neox", "parallel", 2, ["columns"])
NEOX_BASE = Setting("gpt_neox", "parallel", 2, [BASE])
NEOX_ROWS = Setting("gpt_neox", "parallel", 2, ["rows"])


def one_block(heads: Segments, size: int) -> Segments:
    """The rank's run of a [q | k | v] matrix as if it were one map. heads: its columns of q."""
    ((start, stop),) = heads
    return ((3 * start, 3 * stop),)


def plain_parts(heads: Segments, size: int) -> Segments:
    """GPT-2's cut: [q | k | v] one behind the other."""
    return gpt2.fused_qkv(heads, 64)


def in_projections_only(
    monkeypatch: pytest.MonkeyPatch, family: ModuleType, builder: str, cut: Cut
) -> None:
    """Cut adapters' fused matrix by another rule than the base weight's."""
    real = getattr(family, builder)

    def projections(config: Any, group: TensorParallel) -> tuple[Projection, ...]:
        with pytest.MonkeyPatch.context() as inside:
            inside.setattr(family, "fused_qkv", cut)
            found: tuple[Projection, ...] = real(config, group)
            return found

    monkeypatch.setattr(family, builder, projections)


def test_gpt2_adapter_cut_as_one_block(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    in_projections_only(monkeypatch, gpt2, "gpt2_projections", one_block)
    expect_mismatch(world, GPT2_COLUMNS)


def test_gpt2_weight_cut_as_one_block(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt2, "fused_qkv", one_block)
    expect_mismatch(world, Setting("gpt2", "plain", 2, [BASE]))


def test_gpt2_layer_scaling_dropped(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = gpt2.FlashGPT2Attention.__init__

    def unscaled(self: gpt2.FlashGPT2Attention, *args: Any) -> None:
        real(self, *args)
        self.query_scale = 1.0

    monkeypatch.setattr(gpt2.FlashGPT2Attention, "__init__", unscaled)
    expect_mismatch(world, GPT2_BY_LAYER)


def test_opt_positions_from_zero(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def lookup(self: opt.OPTLearnedPositionalEmbedding, position_ids: Tensor) -> Tensor:
        return F.embedding(position_ids, self.weight)

    monkeypatch.setattr(opt.OPTLearnedPositionalEmbedding, "forward", lookup)
    expect_mismatch(world, OPT_BASE)


@pytest.mark.parametrize("cut", [plain_parts, one_block])
def test_neox_adapter_cut_as_if_not_per_head(
    world: World, monkeypatch: pytest.MonkeyPatch, cut: Cut
) -> None:
    in_projections_only(monkeypatch, gpt_neox, "gpt_neox_projections", cut)
    expect_mismatch(world, NEOX_COLUMNS)


def test_neox_weight_read_as_plain_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpt_neox, "fused_qkv", plain_parts)
    expect_mismatch(world, NEOX_BASE)


def test_neox_whole_head_rotated(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Rope, "width", lambda self, head_dim: head_dim)
    expect_mismatch(world, NEOX_BASE)


def test_neox_second_bias_on_every_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Biases join once, in rank 0's summand."""
    real = RowParallelLinear.__init__

    def biased(self: RowParallelLinear, name: str, shape: Any, cut: Any, *rest: Any) -> None:
        real(self, name, shape, cut, *rest)
        self.bias = rest[1].parameter(f"{name}.bias", shape[:1])

    monkeypatch.setattr(RowParallelLinear, "__init__", biased)
    expect_mismatch(world, NEOX_BASE)


def test_neox_row_deltas_dropped_from_the_shared_sum(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def partial(self: AdapterRowLinear, x: Tensor, adapter_data: AdapterData | None) -> Tensor:
        return self.base.partial(x)

    monkeypatch.setattr(AdapterRowLinear, "partial", partial)
    expect_mismatch(world, NEOX_ROWS)


@pytest.mark.parametrize(
    "setting", [GPT2_COLUMNS, GPT2_BY_LAYER, OPT_BASE, NEOX_COLUMNS, NEOX_BASE, NEOX_ROWS]
)
def test_without_a_fault_nothing_differs(world: World, setting: Setting) -> None:
    compare(world, setting)
