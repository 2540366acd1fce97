"""Factors of experts in files: what each form of them means, and what is refused."""

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft.utils import transformers_weight_conversion as conversion
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError
from modeling.adapters.peft import experts as peft_experts
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.projection import ExpertMatrices, Projection, ProjectionKind
from modeling.models.generic.routed_projections import CONVERTED
from modeling.runner.adapter_check import judge
from tests.modeling.adapters.lora_files import UP, write_lora

COUNT, HIDDEN, INNER = 3, 6, 4
NUMBERS = (1, 3)
EXPERTS = "base_model.model.model.layers.{}.mlp.experts"


def _map(name: str, sizes: tuple[int, int], start: int, total: int, parameter: str) -> Projection:
    inputs, outputs = sizes
    return Projection(
        f"experts.{name}",
        "model.layers.{layer}.mlp.experts",
        inputs,
        outputs,
        ((0, inputs),),
        ((0, outputs),),
        len(NUMBERS) * COUNT,
        kind=ProjectionKind.EXPERTS,
        numbers=NUMBERS,
        experts=ExpertMatrices(
            COUNT,
            range(COUNT),
            2,
            parameter,
            ("gate_up_proj", "gate_up_proj_bias", "down_proj"),
            start,
            total,
            (f"model.layers.{{layer}}.mlp.experts.{{expert}}.{name}",),
        ),
    )


MAPS = (
    UP,
    _map("gate_proj", (HIDDEN, INNER), 0, 2 * INNER, "gate_up_proj"),
    _map("up_proj", (HIDDEN, INNER), INNER, 2 * INNER, "gate_up_proj"),
    _map("down_proj", (INNER, HIDDEN), 0, HIDDEN, "down_proj"),
)
BARE = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
FIRST = EXPERTS.format(1)


def both(rank: int, blocks: bool = False, number: int = 1) -> dict[str, Tensor]:
    """Random factors of both parameters of a layer; blocks: those of gate and up are apart."""
    path = EXPERTS.format(number)
    b = torch.randn(2 * INNER, rank, COUNT)
    if blocks:
        b[:INNER, rank // 2 :] = b[INNER:, : rank // 2] = 0
    return {
        f"{path}.base_layer.lora_A.weight": torch.randn(COUNT * rank, HIDDEN),
        f"{path}.base_layer.lora_B.weight": b.flatten(1),
        f"{path}.lora_A.weight": torch.randn(COUNT * rank, INNER),
        f"{path}.lora_B.weight": torch.randn(HIDDEN, rank * COUNT),
    }


def single(rank: int, expert: int, name: str, sizes: tuple[int, int]) -> dict[str, Tensor]:
    path = f"{FIRST}.{expert}.{name}"
    return {
        f"{path}.lora_A.weight": torch.randn(rank, sizes[0]),
        f"{path}.lora_B.weight": torch.randn(sizes[1], rank),
    }


GATE = single(4, 2, "gate_proj", (HIDDEN, INNER))


@pytest.mark.parametrize("blocks", [False, True])
def test_gate_and_up_share_a_rank_or_halve_it(tmp_path: Path, blocks: bool) -> None:
    tensors = both(4, blocks, 1) | both(4, blocks, 3)
    adapter = open_adapter(write_lora(tmp_path, tensors, **BARE), MAPS, 8)
    ranks = {(at.projection, at.layer): rank for at, rank in adapter.ranks.items()}
    gates = {ranks[index, layer] for index in (1, 2) for layer in range(6)}
    assert gates == {2 if blocks else 4}
    assert {ranks[3, layer] for layer in range(6)} == {4}
    read = {(at.projection, at.layer): m for m in adapter.read() for at in [m.position]}
    b = tensors[f"{EXPERTS.format(3)}.base_layer.lora_B.weight"].view(2 * INNER, 4, COUNT)
    a = tensors[f"{EXPERTS.format(3)}.base_layer.lora_A.weight"].view(COUNT, 4, HIDDEN)
    whole = torch.einsum("ork,kri->koi", b, a) * 2
    for expert in range(COUNT):
        own = [read[index, COUNT + expert] for index in (1, 2)]
        found = torch.cat([each.b @ each.a for each in own])
        torch.testing.assert_close(found, whole[expert])


def test_what_it_costs(tmp_path: Path) -> None:
    """One page of each map and expert, with both layers, in 16 bits."""
    folder = write_lora(tmp_path, both(4), **BARE)
    cost = judge(folder, MAPS, AdaptersConfig(), lambda done, total: None).cost
    assert cost is not None
    assert (cost.pages, cost.expert_pages) == (3 * COUNT, 1)
    assert cost.page_bytes == 3 * 8 * len(NUMBERS) * COUNT * (HIDDEN + INNER) * 2
    assert cost.expert_bytes == cost.page_bytes
    few = judge(write_lora(tmp_path / "few", GATE), MAPS, AdaptersConfig(), lambda *_: None).cost
    assert few is not None
    assert (few.pages, few.expert_pages) == (1, 1)
    assert few.expert_bytes == 8 * len(NUMBERS) * (HIDDEN + INNER) * 2


def test_one_expert_alone(tmp_path: Path) -> None:
    adapter = open_adapter(write_lora(tmp_path, GATE), MAPS, 8)
    ((at, rank),) = adapter.ranks.items()
    assert (at.projection, at.layer, rank) == (1, 2, 4)


def test_a_file_s_names_are_not_made_for_each_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An adapter of all experts has tens of thousands."""
    real: Any = peft_experts.ExpertTensors.names
    calls: list[Any] = []

    def names(self: Any) -> Any:
        calls.append(self)
        return real.__get__(self)

    monkeypatch.setattr(peft_experts.ExpertTensors, "names", property(names))
    for count in (1, COUNT):
        own = [single(4, expert, "gate_proj", (HIDDEN, INNER)) for expert in range(count)]
        before = len(calls)
        tensors = {key: tensor for each in own for key, tensor in each.items()}
        open_adapter(write_lora(tmp_path / str(count), tensors), MAPS, 8)
        assert len(calls) - before == 1


SHARES = (range(2), range(2, 3))


def spread(own: range) -> tuple[Projection, ...]:
    """The maps of a rank that has some of the experts whole."""
    return (UP, *(_of_rank(each, own) for each in MAPS[1:]))


def _of_rank(projection: Projection, own: range) -> Projection:
    assert projection.experts is not None
    experts = replace(projection.experts, own=own, shares=SHARES if own in SHARES else ())
    return replace(projection, num_layers=len(NUMBERS) * len(own), experts=experts)


@pytest.mark.parametrize("own", [range(1), range(1, 3)])
def test_a_rank_s_own_experts(tmp_path: Path, own: range) -> None:
    folder = write_lora(tmp_path, both(4) | both(4, number=3), **BARE)
    all_of = {m.position: m for m in open_adapter(folder, MAPS, 8).read()}
    found = list(open_adapter(folder, spread(own), 8).read())
    assert len(found) == 3 * len(NUMBERS) * len(own)
    for each in found:
        layer, expert = divmod(each.position.layer, len(own))
        at = replace(each.position, layer=layer * COUNT + expert + own.start)
        assert torch.equal(each.a, all_of[at].a)
        assert torch.equal(each.b, all_of[at].b)


def test_every_rank_takes_as_many_pages(tmp_path: Path) -> None:
    """Modules of experts of both ranks, of gate on one alone; the ranks differ."""
    other = single(2, 0, "down_proj", (INNER, HIDDEN)) | single(5, 2, "down_proj", (INNER, HIDDEN))
    ranks = {"rank_pattern": {"experts.0.down_proj": 2, "experts.2.down_proj": 5}}
    targets = ["gate_proj", "down_proj"]
    folder = write_lora(tmp_path, GATE | other, target_modules=targets, **ranks)
    for own in SHARES:
        adapter = open_adapter(folder, spread(own), 8)
        found = {i: (each.own, each.count, each.rank) for i, each in adapter.expert_pages.items()}
        assert found == {1: (() if 0 in own else (0,), 1, 4), 3: ((0,), 1, 5)}
        read = {(m.position.projection, len(m.a)) for m in adapter.read()}
        assert read == ({(3, 2)} if 0 in own else {(1, 4), (3, 5)})


def shared(rank: int, names: tuple[str, str, str], own: bool) -> dict[str, Tensor]:
    """Factors of a layer, A of gate and up and B of down for all experts.

    own: whether the other factor of each map is one tensor too.
    """
    tensors = {}
    for name, sizes in zip(names, ((HIDDEN, INNER), (HIDDEN, INNER), (INNER, HIDDEN)), strict=True):
        a = torch.randn(COUNT if name == names[2] else 1, rank, sizes[0])
        b = torch.randn(1 if name == names[2] else COUNT, sizes[1], rank)
        for end, factor in (("lora_A", a), ("lora_B", b)):
            if own or len(factor) == 1:
                tensors[f"{FIRST}.{name}.{end}.weight"] = factor
            else:
                for expert, each in enumerate(factor):
                    tensors[f"{FIRST}.{expert}.{name}.{end}.weight"] = each.contiguous()
    return tensors


def for_each_expert(tensors: dict[str, Tensor], names: tuple[str, str, str]) -> dict[str, Tensor]:
    """The same factors in a module for each expert, as PEFT reads them."""
    single: dict[str, Tensor] = {}
    for key, factor in tensors.items():
        for new, old in zip(("gate_proj", "up_proj", "down_proj"), names, strict=True):
            key = key.replace(f".{old}.", f".{new}.")
        experts = factor.expand(COUNT, -1, -1) if factor.dim() == 3 else ()
        single |= {key: factor} if factor.dim() == 2 else {}
        single |= {
            key.replace(FIRST, f"{FIRST}.{i}"): each.clone() for i, each in enumerate(experts)
        }
    return single


TARGETS = {"target_modules": ["gate_proj", "up_proj", "down_proj"]}


@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("names", [("w1", "w3", "w2"), ("gate_proj", "up_proj", "down_proj")])
def test_factors_of_all_experts(tmp_path: Path, names: tuple[str, str, str], own: bool) -> None:
    tensors = shared(4, names, own)
    folder = write_lora(tmp_path / "shared", tensors, **TARGETS)
    single = write_lora(tmp_path / "single", for_each_expert(tensors, names), **TARGETS)
    for maps in (MAPS, spread(range(1, 3))):
        found, wanted = (
            {m.position: m for m in open_adapter(each, maps, 8).read()} for each in (folder, single)
        )
        assert found.keys() == wanted.keys()
        assert len(found) == 3 * (COUNT if maps is MAPS else 2)
        for at, module in wanted.items():
            assert torch.equal(found[at].a, module.a)
            assert torch.equal(found[at].b, module.b)


SHARED = shared(4, ("w1", "w3", "w2"), True)

REFUSALS: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "partner": (
        {k: v for k, v in both(4).items() if not k.endswith("experts.lora_B.weight")},
        BARE,
        "missing beside its partner",
    ),
    "experts": (
        {k: v[:8] if "lora_A" in k else v for k, v in both(4).items()},
        BARE,
        "3 experts and rank 4 need",
    ),
    "rank": (both(16), {**BARE, "r": 16}, "above this server's max_rank 8"),
    "bias": (
        both(4),
        {"target_parameters": ["gate_up_proj_bias", "experts.down_proj"]},
        "gate_up_proj_bias is not served",
    ),
    "dora": (GATE, {"use_dora": True}, "use_dora, lora_bias or alora_invocation_tokens"),
    "rslora": (GATE, {"use_rslora": True}, "another scaling"),
    "alpha": (GATE, {"alpha_pattern": {"gate_proj": 3}}, "another scaling"),
    "left out": (GATE, {"target_modules": ["up_proj"]}, "target_modules of adapter_config.json"),
    "unknown": (single(4, COUNT, "gate_proj", (HIDDEN, INNER)), {}, "no adaptable module"),
    "unconverted": (single(4, 0, "w1", (HIDDEN, INNER)), {}, "PEFT does not convert"),
    "twice": (
        both(4) | GATE,
        {**BARE, "target_modules": ["gate_proj"]},
        "by its parameter and by its modules",
    ),
    "shared: partner": (
        {k: v for k, v in SHARED.items() if ".w2.lora_A" not in k},
        TARGETS,
        "0.w2.lora_A.weight is missing beside its partner",
    ),
    "shared: experts": (
        {k: v[:2] if ".w1.lora_B" in k else v for k, v in SHARED.items()},
        TARGETS,
        "has shape [2, 4, 4], this model has 3 experts",
    ),
    "shared: rank": (SHARED, {**TARGETS, "r": 2}, "r, rank_pattern) says 2"),
    "shared: left out": (SHARED, {"target_modules": ["w1", "up_proj"]}, "experts.down_proj, which"),
    "shared: twice": (SHARED | GATE, TARGETS, "of a module that is adapted twice"),
    "shared: nan": (
        {k: v * (float("nan") if "w3.lora_A" in k else 1.0) for k, v in SHARED.items()},
        TARGETS,
        "not finite",
    ),
    "nan": (
        {k: v * (float("nan") if "lora_A" in k else 1.0) for k, v in both(4).items()},
        BARE,
        "not finite",
    ),
}


@pytest.mark.parametrize("name", REFUSALS)
def test_what_is_not_exact_is_refused(tmp_path: Path, name: str) -> None:
    tensors, fields, reason = REFUSALS[name]
    tensors = {key: value.contiguous() for key, value in tensors.items()}
    folder = write_lora(tmp_path, tensors, **fields)
    with pytest.raises(AdapterError, match=re.escape(reason)):
        for _ in open_adapter(folder, MAPS, 8).read():
            pass


def test_a_dense_module_of_the_same_name_is_refused(tmp_path: Path) -> None:
    dense = replace(UP, name="gate_proj", module="model.layers.{layer}.mlp.gate_proj")
    path = "base_model.model.model.layers.0.mlp.gate_proj"
    tensors = {
        f"{path}.lora_A.weight": torch.ones(4, 6),
        f"{path}.lora_B.weight": torch.ones(10, 4),
    }
    folder = write_lora(tmp_path, GATE | tensors)
    with pytest.raises(AdapterError, match="beside modules of single experts"):
        open_adapter(folder, (dense, *MAPS[1:]), 8)


def test_the_types_that_peft_converts() -> None:
    tables: Any = conversion
    known = tables._MODEL_TO_CONVERSION_PATTERN
    converts = {kind for kind, base in known.items() if base in tables._MOE_FUSED_TARGETS}
    assert converts >= CONVERTED
