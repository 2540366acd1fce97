"""Adapters of routed experts, routers and shared experts against transformers + PEFT."""

from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.architectures.base import ArchitectureError
from modeling.adapters import experts as products
from modeling.adapters.device_adapter import ExpertStacks
from modeling.adapters.experts import RoutedAdapter
from modeling.adapters.peft import experts as peft_experts
from modeling.adapters.peft.experts import ExpertParameter
from modeling.adapters.peft.shared_experts import SharedFactors
from modeling.models.generic import experts, reading, routed_projections
from modeling.models.generic.cuts import CutPlan
from modeling.models.generic.experts import RoutedLayers
from modeling.runner.loading import load_model
from sharding.group import LoneRank, SingleRank
from sharding.tensor_file import TensorFile
from tests.checkpoints import load_oracle, oracle_logits
from tests.checkpoints_experts import WIDER
from tests.checkpoints_generic import MIXTURES, write_generic
from tests.modeling.parity.comparison import (
    BASE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)
from tests.sweeps import swept, swept_rows

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

NAMES = [BASE, "parameters", "everything"]
VARIANTS = (*MIXTURES, "olmoe", "qwen2_moe")
FEW_SPREAD = (("mixtral", 2), *((each, 4) for each in ("qwen3_moe", "deepseek_v3", "gpt_oss")))
"""Over whole experts; `parity_cells.py` has all variants, on 2 ranks and on 4."""

TOKENS = (5, 6, 7, 8)

MORE = {"qwen3_moe": ["r8", "router", "down", "ranks"], "deepseek_v3": ["r8", "shared"]}
QWEN3 = Setting("mixture", "qwen3_moe", 1, ["parameters", BASE, "ranks"])
QWEN3_CUT = Setting("mixture", "qwen3_moe", 2, ["parameters", BASE])
QWEN3_SPREAD = replace(QWEN3_CUT, spread=True)
ROUTER = Setting("mixture", "qwen3_moe", 1, ["router"])
JOINED = Setting("converted", "qwen3_moe", 1, ["joined"])
SHARED = Setting("converted", "qwen3_moe", 1, ["shared"])
MODULES = Setting("converted", "qwen3_moe", 1, ["modules"])
FEW = Setting("converted", "qwen3_moe", 1, ["few", BASE])


@pytest.mark.parametrize("variant", swept(MIXTURES, lambda variant: variant == "mixtral"))
def test_checkpoints_of_the_decoder_alone(world: World, variant: str) -> None:
    """Tensors without `model.`, in some layers or in all, as transformers loads them."""
    compare(world, Setting("headless", variant, 2, [BASE, "parameters"]))


def test_convolutions_of_the_decoder_alone(world: World) -> None:
    """Those of queries, keys and values, which the module has as one tensor."""
    compare(world, Setting("headless", "kimi_linear", 1, [BASE]))


def test_experts_of_which_some_are_named_in_full_are_refused(tmp_path: Path) -> None:
    """transformers puts those that are into one order, and then the others."""
    folder = write_generic(tmp_path, "qwen3_moe")
    own = oracle_logits(load_oracle(folder), TOKENS)
    path = folder / "model.safetensors"
    named = {
        name.removeprefix("model.") if ".experts.2." in name else name: tensor
        for name, tensor in load_file(path).items()
    }
    save_file(named, path, metadata={"format": "pt"})
    assert not torch.allclose(oracle_logits(load_oracle(folder), TOKENS), own, atol=0.1)
    with pytest.raises(ArchitectureError, match=r"experts\.\w+: some experts' tensors are named"):
        load_model(engine_config(folder), SingleRank(), torch.device("cpu"))


SUITE = {("qwen3_moe", 1), ("qwen3_moe", 2), ("deepseek_v3", 2), ("gpt_oss", 2), ("mixtral", 4)}


@pytest.mark.parametrize(
    ("variant", "ranks"), swept_rows(product(VARIANTS, (1, 2, 4)), lambda *row: row in SUITE)
)
def test_experts(world: World, variant: str, ranks: int) -> None:
    """Base and adapters in one batch; everything: attention, experts, shared ones and router."""
    compare(world, Setting("mixture", variant, ranks, [*NAMES, *MORE.get(variant, [])]))


@pytest.mark.sweep
@pytest.mark.parametrize("variant", WIDER)
def test_more_types(world: World, variant: str) -> None:
    compare(world, Setting("mixture", variant, 2, [*NAMES, "router", "down", "r8"]))


@pytest.mark.parametrize("spread", swept([False, True], lambda spread: not spread))
def test_beside_an_expert_that_computes_nothing(world: World, spread: bool) -> None:
    """ZAYA's routers choose it by a number behind the last."""
    names = [*NAMES, "down", "ranks"]
    compare(world, Setting("mixture", "zaya", 2, names, spread=spread))


def test_layers_with_heads_of_their_own(world: World) -> None:
    """Over more ranks than some layers have KV heads."""
    compare(world, Setting("mixture", "mimo_v2_flash", 4, [BASE, "r8", "parameters"]))


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows([*FEW_SPREAD, ("six_experts", 4)], lambda variant, _: variant == "qwen3_moe"),
)
def test_whole_experts_on_each_rank(world: World, variant: str, ranks: int) -> None:
    """Six over four ranks: two of them have two, two have one."""
    names = [*NAMES, *MORE.get(variant, [])]
    compare(world, Setting("mixture", variant, ranks, names, spread=True))


def test_what_peft_converts_over_whole_experts(world: World) -> None:
    names = [BASE, "trained", "modules", "joined", "shared", "few"]
    compare(world, Setting("converted", "qwen3_moe", 4, names, spread=True))


def test_a_model_without_experts(world: World) -> None:
    for family, variant, name in (("generic", "olmo2", "Olmo2"), ("llama", "gqa", "Llama")):
        config = engine_config(world.model(family, variant), expert_parallel=True)
        with pytest.raises(ArchitectureError, match=f"{name}ForCausalLM has no routed experts"):
            load_model(config, SingleRank(), torch.device("cpu"))


def test_where_whole_experts_were_not_compared(world: World) -> None:
    causal = load_oracle(world.model("mixture", "granitemoe"))
    two = LoneRank(0, 2)
    plan = CutPlan(causal.config, "model", two)
    with pytest.raises(ArchitectureError, match="not compared on GPUs for granitemoe: remove it"):
        RoutedLayers(causal, plan, 0, on_gpu=True, over=two)
    assert RoutedLayers(causal, plan, 0, over=two).own


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(product(("qwen3_moe", "mixtral"), (1, 2, 4)), lambda *row: row == ("qwen3_moe", 2)),
)
def test_what_peft_converts(world: World, variant: str, ranks: int) -> None:
    """Modules of single experts, as they are and as PEFT saves them again.

    shared: PEFT reads a module for each expert, the runner the same factors written once. few: PEFT
    reads zeros for most experts, the runner nothing.
    """
    family = "converted_mixtral" if variant == "mixtral" else "converted"
    names = [BASE, "trained", "modules", "joined", "few"]
    names += ["shared"] if variant == "qwen3_moe" else []
    compare(world, Setting(family, variant, ranks, names))


def test_scheduled(world: World) -> None:
    """With prefix hits, and after a loss of the ranks."""
    names, lengths = ["everything", BASE, "everything"], (35, 35, 35)
    compare(world, Setting("mixture", "deepseek_v3", 2, names, lengths=lengths, lost_at=9))


Patch = pytest.MonkeyPatch


def test_columns_of_b_by_expert(world: World, monkeypatch: Patch) -> None:
    def read(self: ExpertParameter, file: TensorFile) -> tuple[Tensor, Tensor]:
        a, b = (file.get_tensor(name) for name in self.names)
        own = b.view(len(b), self.count, self.rank).permute(1, 0, 2)
        return a.view(self.count, self.rank, -1), own

    monkeypatch.setattr(ExpertParameter, "read", read)
    expect_mismatch(world, QWEN3)


def test_rows_of_a_by_rank(world: World, monkeypatch: Patch) -> None:
    def read(self: ExpertParameter, file: TensorFile) -> tuple[Tensor, Tensor]:
        a, b = (file.get_tensor(name) for name in self.names)
        own = a.view(self.rank, self.count, -1).transpose(0, 1)
        return own, b.view(len(b), self.rank, self.count).permute(2, 0, 1)

    monkeypatch.setattr(ExpertParameter, "read", read)
    expect_mismatch(world, QWEN3)


def test_halves_of_the_rank_exchanged(world: World, monkeypatch: Patch) -> None:
    real = peft_experts.ExpertMap

    def exchanged(projection: int, layer: int, rows: slice, ranks: slice) -> Any:
        size = ranks.stop - ranks.start
        is_part = size == 4 and rows.stop - rows.start == 24
        return real(projection, layer, rows, slice(4 - ranks.start, 8 - ranks.start) if is_part
                    else ranks)  # fmt: skip

    monkeypatch.setattr(peft_experts, "ExpertMap", exchanged)
    expect_mismatch(world, JOINED)


def test_the_first_expert_s_factors_for_all(world: World, monkeypatch: Patch) -> None:
    def read(self: SharedFactors, file: TensorFile, names: Sequence[str]) -> Tensor:
        return file.get_tensor(names[0])[:1].float().expand(self.count, -1, -1)

    monkeypatch.setattr(SharedFactors, "_read", read)
    expect_mismatch(world, SHARED)


def test_experts_without_factors_take_another_s(world: World, monkeypatch: Patch) -> None:
    real = ExpertStacks.numbers
    monkeypatch.setattr(ExpertStacks, "numbers", lambda *given: real(*given).clamp(max=0))
    expect_mismatch(world, FEW)


def test_rows_of_up_are_those_of_gate(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(peft_experts, "_rows", lambda each: slice(0, each.out_features))
    expect_mismatch(world, QWEN3)


def test_scaling_of_modules_ignored(world: World, monkeypatch: Patch) -> None:
    real = peft_experts.ExpertModules

    def unscaled(modules: Any, scalings: Any) -> Any:
        return real(modules, dict.fromkeys(scalings, 1.0))

    monkeypatch.setattr(peft_experts, "ExpertModules", unscaled)
    expect_mismatch(world, MODULES)


def test_another_expert_s_factors(world: World, monkeypatch: Patch) -> None:
    real = products.RoutedPairs.of

    def of(ids: Tensor, count: int) -> products.RoutedPairs:
        found = real(ids, count)
        ends = found.ends.roll(1)
        ends[0] = 0
        ends[-1] = len(ids)
        return products.RoutedPairs(found.rows, ends)

    monkeypatch.setattr(products.RoutedPairs, "of", of)
    expect_mismatch(world, QWEN3)


def test_factors_of_the_first_layer_in_all(world: World, monkeypatch: Patch) -> None:
    real = RoutedAdapter.add

    def add(
        self: RoutedAdapter, y: Tensor, x: Tensor, projection: int, layer: int, offset: int
    ) -> None:
        real(self, y, x, projection, 0, offset)

    monkeypatch.setattr(RoutedAdapter, "add", add)
    expect_mismatch(world, QWEN3)


def test_deltas_of_up_added_to_gate(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(experts, "Target", lambda projection, offset: _Target(projection))
    expect_mismatch(world, QWEN3)


class _Target:
    offset = 0

    def __init__(self, projection: int) -> None:
        self.projection = projection


def test_tokens_of_the_base_adapted_too(world: World, monkeypatch: Patch) -> None:
    real = products.route

    def route(groups: Any, ids: Tensor, pairs: Any) -> Any:
        all_rows = torch.arange(len(ids))
        return real([type(each)(all_rows, each.adapter) for each in groups[:1]], ids, pairs)

    monkeypatch.setattr(experts, "route", route)
    expect_mismatch(world, QWEN3)


def test_every_rank_has_the_first_cut(world: World, monkeypatch: Patch) -> None:
    real = routed_projections._maps

    def maps(*given: Any) -> Any:
        for each in real(*given):
            is_up = each.name != "down_proj"
            first = tuple((0, b - a) for a, b in each.outputs) if is_up else each.outputs
            yield replace(each, outputs=first)

    monkeypatch.setattr(routed_projections, "_maps", maps)
    expect_mismatch(world, QWEN3_CUT)


def test_every_rank_has_the_first_experts(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(experts, "spread_experts", lambda count, _, ranks: range(count // ranks))
    expect_mismatch(world, QWEN3_SPREAD)


def test_every_rank_has_the_first_experts_factors(world: World, monkeypatch: Patch) -> None:
    real = ExpertParameter.stacks

    def stacks(self: ExpertParameter, file: TensorFile) -> Any:
        return real(replace(self, own=range(len(self.own))), file)

    monkeypatch.setattr(ExpertParameter, "stacks", stacks)
    expect_mismatch(world, QWEN3_SPREAD)


def test_pairs_of_other_ranks_computed_by_the_last_expert(world: World, monkeypatch: Patch) -> None:
    def local(self: experts.RoutedModule, ids: Tensor) -> Tensor:
        return (ids - self.own.start).clamp(0, len(self.own) - 1)

    monkeypatch.setattr(experts.RoutedModule, "local", local)
    expect_mismatch(world, QWEN3_SPREAD)


def test_whole_experts_not_summed(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(reading, "_summed", lambda _group, _module, _inputs, output: output)
    expect_mismatch(world, QWEN3_SPREAD)


def test_routers_left_as_they_are(world: World, monkeypatch: Patch) -> None:
    monkeypatch.setattr(experts, "add_routing", lambda y, *_: y)
    expect_mismatch(world, ROUTER)


def test_without_a_fault_nothing_differs(world: World) -> None:
    for setting in (QWEN3, QWEN3_CUT, QWEN3_SPREAD, ROUTER, JOINED, MODULES, SHARED, FEW):
        compare(world, setting)
