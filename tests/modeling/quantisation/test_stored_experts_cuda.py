"""Quantised experts on a GPU: a layer against the equation, whole models against float32.

The truth of a model is the reference of float32 on a CPU, whose tokens are those of transformers
over the numbers (test_mxfp4.py, test_fp8_experts.py). Each test prints its figures.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from configs.adapters import AdaptersConfig
from configs.architectures.base import ArchitectureError
from configs.engine import CacheConfig, Device, EngineConfig, LimitsConfig
from configs.model import DType, ModelConfig
from modeling.models.generic import experts
from modeling.models.generic.fp4_experts import Fp4Matrices
from modeling.models.generic.integer_experts import IntegerMatrices
from modeling.models.generic.scaled_experts import ScaledMatrices
from modeling.models.generic.stored_experts import StoredMatrices
from modeling.runner.loading import load_model
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.checkpoints_generic import SHAPE, VOCAB_SIZE
from tests.modeling.parity.comparison import NUM_BLOCKS, engine_config
from tests.modeling.quantisation.stored_layers import (
    LAYERS,
    NO_DELTAS,
    SCALED,
    Deltas,
    Layer,
    dtype_of,
)
from tests.modeling.quantisation.test_models_cuda import FORMS
from tests.modeling.quantisation.whole_models import Task, compare
from tests.modeling.teacher import TOGETHER

pytestmark = pytest.mark.gpu

ROUNDED = ("fp8", "nvfp4", "mxfp4", *(form for form in SCALED if "alone" not in form))
"""Forms that round activations too."""

BOUND = dict.fromkeys(LAYERS, 5e-3) | dict.fromkeys(ROUNDED, 2.5e-2)
"""Of the difference's norm: inner columns and each pair's part are rounded to bfloat16. fp8's
tensor cores add with fewer bits than float32 has, and of inner columns that are off by 1e-3 some
round to the next number of fp8: 1.3e-2 in the equation. The largest on an H200 were 2.5e-3 of
gpt-oss and 1.35e-2 in fp8 blocks."""

SIZES = [(2880, 2880, 8, 4), (192, 96, 5, 3), (256, 384, 16, 2), (64, 32, 3, 1)]
"""Hidden size, inner size, experts, experts of a token."""

OFTEN = (
    *("gpt-oss", "fp8", "nvfp4", "mxfp4", "4 bits", "4 bits, groups of 32"),
    *("fp8 by output", "fp8 by output, static", "8 bits"),
)

CASES = [(form, sizes) for form in LAYERS for sizes in (SIZES if form in OFTEN else SIZES[2:3])]
"""Each case takes a compiler some seconds."""

TOKENS = (1, 2, 7, 16, 64, 65, 200, 300, 1030)


def worst_error(form: str, sizes: tuple[int, int, int, int], tokens: int, made: Layer) -> float:
    """The largest of a few steps; equal inputs must give equal bits, and counts stay zeros."""
    from modeling.layers.kernels.stored_experts import stored_experts

    hidden, _, count, active = sizes
    up, down, gate, expert = made
    counts = torch.zeros(count, dtype=torch.int32, device="cuda")
    worst = 0.0
    for skewed in (False, True):
        x = torch.randn(tokens, hidden, device="cuda").to(dtype_of(form))
        chances = torch.rand(tokens, count, device="cuda")
        if skewed:  # Most pairs are one expert's.
            chances[:, 0] += 1
        shares, ids = chances.softmax(-1).topk(active)
        shares = shares.bfloat16()
        wanted = torch.zeros(tokens, hidden, device="cuda")
        for number in range(count):
            token, place = torch.where(ids == number)
            if not len(token):
                continue
            part = expert(x[token].float(), number) * shares[token, place].float()[:, None]
            wanted.index_add_(0, token, part)
        found = [stored_experts(x, up, down, gate, ids, shares, counts) for _ in range(3)]
        assert torch.equal(found[0], found[1])
        assert torch.equal(found[0], found[2])
        assert not counts.any()
        worst = max(worst, float((found[0].float() - wanted).norm() / wanted.norm()))
    return worst


@pytest.mark.parametrize(("form", "sizes"), CASES, ids=str)
def test_layers(
    form: str, sizes: tuple[int, int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    hidden, inner, count, _ = sizes
    if form == "fp8" and (hidden % 128 or inner % 128):
        pytest.skip("blocks are whole")
    torch.manual_seed(7)
    made = LAYERS[form](hidden, inner, count)
    worst = {tokens: worst_error(form, sizes, tokens, made) for tokens in TOKENS}
    with capfd.disabled():
        print(f"\n{form} {sizes} " + " ".join(f"{t}:{e:.1e}" for t, e in worst.items()))
    assert max(worst.values()) < BOUND[form], worst


PAGES = ((), (2,), (0, 4), (1, 3))
"""Of the slots' adapters: 8 rank rows of each expert that `has_factors` names."""


def has_factors(slot: int, expert: int) -> bool:
    """Whether an adapter adapts an expert: two of three."""
    return (slot + expert) % 3 > 0


@dataclass(frozen=True)
class Factors:
    """Factors of gate and up, or of both at once, and of down: (A, Bt) [layers, pages, 8, side].

    There are two layers; the second is looked at. Each `count` pages are of all experts.
    """

    pools: tuple[tuple[Tensor, Tensor], ...]
    count: int

    @classmethod
    def random(cls, maps: Sequence[tuple[int, int]], count: int) -> "Factors":
        """Make them for maps (inputs, outputs)."""

        def factors(side: int) -> Tensor:
            return torch.randn(2, 5 * count, 8, side, device="cuda").mul(0.05).bfloat16()

        return cls(tuple((factors(inputs), factors(out)) for inputs, out in maps), count)

    def layer(self, slots: Tensor) -> Any:
        """Return them as kernels take them; slots: of tokens, -1 for none."""
        from modeling.kernels.pairs import PairDeltas
        from modeling.layers.kernels.expert_deltas import LayerDeltas

        maps, last = tuple(range(len(self.pools))), len(self.pools) - 1
        rows = torch.full((len(PAGES), len(maps), self.count, 2), -1, dtype=torch.int32)
        for slot, own in enumerate(PAGES):
            for expert in range(self.count):
                if has_factors(slot, expert):
                    pages = [page * self.count + expert for page in own]
                    rows[slot, :, expert, : len(own)] = torch.tensor(pages, dtype=torch.int32)
        deltas = PairDeltas(slots.int(), rows.cuda(), self.pools, maps)
        return LayerDeltas(deltas, maps[:last], last, 1)

    def added(self, slot: int, number: int) -> Deltas:
        """Return what an adapter adds to one expert's products."""

        def delta(x: Tensor, projection: int) -> Tensor:
            own = PAGES[slot] if has_factors(slot, number) else ()
            pages = [page * self.count + number for page in own]
            a, bt = (part[1, pages] for part in self.pools[projection])
            return x @ a.flatten(0, 1).float().T @ bt.flatten(0, 1).float()

        last = len(self.pools) - 1
        return (
            lambda x: torch.cat([delta(x, each) for each in range(last)], -1),
            lambda x: delta(x, last),
        )


@pytest.mark.parametrize("form", OFTEN)
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[2]], ids=str)
def test_layers_adapted(
    form: str, sizes: tuple[int, int, int, int], capfd: pytest.CaptureFixture[str]
) -> None:
    """Tokens of adapters of any rank beside tokens without."""
    from modeling.layers.kernels.stored_experts import stored_experts

    hidden, inner, count, active = sizes
    if form == "fp8" and (hidden % 128 or inner % 128):
        pytest.skip("blocks are whole")
    torch.manual_seed(8)
    up, down, gate, expert = LAYERS[form](hidden, inner, count)
    maps = [(hidden, 2 * inner)] if gate.interleaved else [(hidden, inner)] * 2
    factors = Factors.random([*maps, (inner, hidden)], count)
    counts = torch.zeros(count, dtype=torch.int32, device="cuda")
    worst = {}
    for tokens in (1, 3, 64, 200, 1030):
        x = torch.randn(tokens, hidden, device="cuda").bfloat16()
        shares, ids = torch.rand(tokens, count, device="cuda").softmax(-1).topk(active)
        slots = torch.randint(-1, len(PAGES), (tokens,), device="cuda")
        wanted = torch.zeros(tokens, hidden, device="cuda")
        for number, slot in product(range(count), range(-1, len(PAGES))):
            token, place = torch.where((ids == number) & (slots == slot)[:, None])
            if not len(token):
                continue
            own = NO_DELTAS if slot < 0 else factors.added(slot, number)
            part = expert(x[token].float(), number, own) * shares[token, place][:, None]
            wanted.index_add_(0, token, part)
        layer = factors.layer(slots)
        found = stored_experts(x, up, down, gate, ids, shares.bfloat16(), counts, layer)
        assert not counts.any()
        worst[tokens] = float((found.float() - wanted).norm() / wanted.norm())
    with capfd.disabled():
        print(f"\n{form} {sizes} adapted " + " ".join(f"{t}:{e:.1e}" for t, e in worst.items()))
    assert max(worst.values()) < BOUND[form], worst


SIZES_OF: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "hidden_size": 192,
        "intermediate_size": 128,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 64,
    },
    "qwen3_moe": {
        "hidden_size": 256,
        "moe_intermediate_size": 256,
        "num_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 64,
    },
    "mixtral": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 64,
    },
    "minimax_m2": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_local_experts": 8,
        "num_experts_per_tok": 3,
        "head_dim": 64,
    },
    "glm4_moe": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "head_dim": 64,
    },
    "deepseek_v3": {
        "hidden_size": 256,
        "intermediate_size": 256,
        "moe_intermediate_size": 256,
        "n_routed_experts": 8,
        "num_experts_per_tok": 3,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 128,
        "kv_lora_rank": 128,
        "qk_rope_head_dim": 32,
        "head_dim": 32,
        "qk_nope_head_dim": 64,
        "v_head_dim": 64,
    },
}
"""What they change of SHAPE; a type alone is in fp8 blocks, but for gpt-oss."""


KINDS = (
    *SIZES_OF,
    *("qwen3_moe in 4 bits", "mixtral in 4 bits", "glm4_moe in 4 bits", "deepseek_v3 in 4 bits"),
    *("qwen3_moe in nvfp4", "qwen3_moe in mxfp4", "qwen3_moe in weights in mxfp4"),
    "deepseek_v3 in nvfp4",
    *("qwen3_moe in stored fp8", "mixtral in stored fp8", "minimax_m2 in stored fp8"),
    *("glm4_moe in stored fp8", "deepseek_v3 in stored fp8"),
    *("qwen3_moe in static fp8", "mixtral in static fp8", "qwen3_moe in activations as they are"),
    *("qwen3_moe in 8 bits and activations", "deepseek_v3 in 8 bits and activations"),
)
"""A type alone is in fp8 blocks, but for gpt-oss, which is in mxfp4."""

ALL_ACTIVE = {
    name: {"num_experts_per_tok": 8, **({"topk_group": 2} if "n_group" in sizes else {})}
    for name, sizes in SIZES_OF.items()
}
"""Every expert computes every token, so no rounding chooses others: an adapter of experts moves
these tiny models by so much that one choice is farther than all else."""


def type_of(kind: str) -> str:
    """The model type."""
    return kind.partition(" ")[0]


def matrices_of(kind: str) -> type[StoredMatrices]:
    """What keeps the experts."""
    is_fp4 = kind == "gpt_oss" or "fp4" in kind
    return Fp4Matrices if is_fp4 else IntegerMatrices if "4 bits" in kind else ScaledMatrices


def write(folder: Path, kind: str, **changes: Any) -> tuple[Path, list[Path]]:
    """Write a tiny mixture as it is published, and adapters: of attention, and of experts too."""
    config = CONFIG_MAPPING[type_of(kind)](**{**SHAPE, **SIZES_OF[type_of(kind)], **changes})
    auto: Any = AutoModelForCausalLM
    torch.manual_seed(3)
    model = auto.from_config(config, dtype=torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(std=0.05)
    dense, stored = folder / "dense", folder / "stored"
    model.save_pretrained(dense)
    targets = ("q_proj", "o_proj", "q_b_proj")
    recipe = AdapterRecipe(r=8, alpha=16.0, std=0.02, target_modules=targets)
    adapters = [write_adapter(folder / "adapter", dense, recipe)]
    experts = {"target_parameters": ["experts.gate_up_proj", "experts.down_proj"]}
    recipe = replace(recipe, std=0.05, seed=5, extra=experts)
    adapters.append(write_adapter(folder / "experts", dense, recipe))
    tensors: dict[str, Tensor] = {}
    pack, method = FORMS[kind.partition(" in ")[2] or "fp8 in blocks"]
    assert pack is not None
    for name, tensor in load_file(dense / "model.safetensors").items():
        if kind == "gpt_oss" and name.endswith(("gate_up_proj", "down_proj")):
            count, inputs, outputs = tensor.shape
            codes = torch.randint(0, 256, (count, outputs, inputs // 32, 16), dtype=torch.uint8)
            scales = torch.randint(120, 122, codes.shape[:3], dtype=torch.uint8)
            tensors |= {f"{name}_blocks": codes, f"{name}_scales": scales}
        elif kind != "gpt_oss" and re.search(r"_proj\.weight$|\.w[123]\.weight$", name):
            tensors |= pack(name.removesuffix(".weight"), tensor)
        else:
            tensors[name] = tensor
    if kind == "gpt_oss":
        method = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    stored.mkdir()
    made = {n: t.contiguous() for n, t in tensors.items()}
    save_file(made, stored / "model.safetensors", {"format": "pt"})
    fields = json.loads((dense / "config.json").read_text())
    (stored / "config.json").write_text(json.dumps(fields | {"quantization_config": method}))
    return stored, adapters


COMPARED = (
    (Device.CPU, DType.FLOAT32),
    (Device.CPU, DType.BFLOAT16),
    (Device.CUDA, DType.BFLOAT16),
)
"""The truth, the reference, and what is compared with them."""


def config_of(model: Path, device: Device, dtype: DType) -> EngineConfig:
    return engine_config(
        model,
        model=ModelConfig(id=str(model), dtype=dtype),
        device=device,
        cache=CacheConfig(num_blocks=NUM_BLOCKS, block_size=16),
        limits=LimitsConfig(max_running=TOGETHER, max_step_tokens=512),
        adapters=AdaptersConfig(device_pages=4, expert_pages=4, max_device_adapters=2),
    )


def task(folder: Path, kind: str, adapts_experts: bool) -> Task:
    """The base and an adapter of attention; adapts_experts: and one of attention and experts."""
    changes = ALL_ACTIVE[type_of(kind)] if adapts_experts else {}
    model, adapters = write(folder, kind, **changes)
    configs = [config_of(model, *each) for each in COMPARED]
    adapters = adapters[: 1 + adapts_experts]
    return Task.of(kind, VOCAB_SIZE, configs, adapters, routed=not adapts_experts)


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures(kind: str, tmp_path: Path) -> None:
    compare([task(tmp_path, kind, adapts_experts=False)], SingleRank(), torch.device("cuda"))


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_adapted(kind: str, tmp_path: Path) -> None:
    taken = experts.DELTAS_OF_STORED[matrices_of(kind)]
    assert type_of(kind) in taken, "not compared, though GPUs take such adapters"
    compare([task(tmp_path, kind, adapts_experts=True)], SingleRank(), torch.device("cuda"))


def test_scales_that_kernels_do_not_make_are_refused(tmp_path: Path) -> None:
    model, _ = write(tmp_path, "gpt_oss")
    with pytest.raises(ArchitectureError, match="GPUs multiply them in bfloat16"):
        load_model(
            engine_config(model, model=ModelConfig(id=str(model), dtype=DType.FLOAT32)),
            SingleRank(),
            torch.device("cuda"),
        )
