"""Tiny mixtures of experts, and adapters of routed experts, routers and shared experts, in every
form that files have."""

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from tests.checkpoints import AdapterRecipe
from tests.checkpoints_generic import randomise, write_generic
from tests.modeling.models.tiny_causal import tiny_config

_BY_MOE = {"moe_intermediate_size": 64}
_BY_MLP = {"intermediate_size": 64}

WIDER: dict[str, dict[str, Any]] = {
    **dict.fromkeys(
        (
            "afmoe", "axk1", "deepseek_v2", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe_lite",
            "hy_v3", "kimi_linear", "lfm2_moe", "mellum", "mimo_v2_flash", "nemotron_h",
            "qwen2_moe", "qwen3_5_moe_text", "qwen3_next", "sarvam_moe", "solar_open",
        ),
        _BY_MOE,
    ),
    **dict.fromkeys(
        (
            "flex_olmo", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "hunyuan_v1_moe",
            "jamba", "minimax", "minimax_m2", "minimax_m3_vl_text", "olmoe",
        ),
        _BY_MLP,
    ),
    "cohere2_moe": {**_BY_MLP, "logit_scale": 1.0},
    "gemma4_text": {**_BY_MOE, "enable_moe_block": True, "num_experts": 4, "top_k_experts": 2},
}  # fmt: skip
"""Mixtures with experts of a width that a GPU's kernels take: what each changes of a tiny model of
its type."""

SEEDS = {
    "axk1": 10, "dots1": 1, "exaone_moe": 2, "gemma4_text": 2, "glm4_moe_lite": 3,
    "granitemoe_swa": 3, "granitemoehybrid": 1, "granitemoeshared": 7, "kimi_linear": 3,
    "lfm2_moe": 2, "mellum": 3, "mimo_v2_flash": 1, "nemotron_h": 4, "olmoe": 3, "qwen2_moe": 7,
    "qwen3_next": 5, "solar_open": 6,
}  # fmt: skip
"""Of those whose answers for seed 0 rounding could change, to bfloat16 too."""


def write_mixture(folder: Path, variant: str) -> Path:
    """Write a tiny random model into `folder`: one of WIDER, or what `write_generic` writes."""
    if variant not in WIDER:
        return write_generic(folder, variant)
    auto: Any = AutoModelForCausalLM
    with torch.random.fork_rng(devices=[]):
        model = auto.from_config(tiny_config(variant, **WIDER[variant]), dtype=torch.float32)
        # Behind what transformers drew, which depends on its version.
        torch.manual_seed(SEEDS.get(variant, 0))
        for name, parameter in model.named_parameters():
            randomise(name, parameter)
    model.tie_weights()
    model.save_pretrained(folder)
    return folder


ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "kv_b_proj", "self_attn.out_proj",
)  # fmt: skip
EXPERTS = ("experts.gate_up_proj", "experts.down_proj", "experts.up_proj")
ROUTERS = ("gate.weight", "router.weight", "gate.wg.weight", "router.proj.weight")
SHARED = tuple(
    f"shared_expert{end}.{name}_proj.weight" for end in ("", "s") for name in ("gate", "down")
)


def _bare(*names: str, r: int, seed: int, **fields: Any) -> AdapterRecipe:
    fields = {"target_modules": (), "std": 0.15, **fields}
    extra = {"target_parameters": [*names], **fields.pop("extra", {})}
    return AdapterRecipe(r=r, seed=seed, extra=extra, **fields)


EXPERT_ADAPTERS: dict[str, AdapterRecipe] = {
    "r8": AdapterRecipe(r=8, alpha=16.0, seed=12, std=0.1, target_modules=ATTENTION),
    "parameters": _bare(*EXPERTS, r=4, seed=91),
    "down": _bare(EXPERTS[1], r=9, seed=92, target_modules=("o_proj", "self_attn.out_proj")),
    "ranks": _bare(
        *EXPERTS, r=5, seed=93, use_rslora=True,
        extra={"rank_pattern": {EXPERTS[1]: 11}, "alpha_pattern": {EXPERTS[0]: 3}},
    ),
    "router": _bare(*ROUTERS, r=4, seed=94, std=0.8),
    "shared": _bare(*SHARED, r=4, seed=95),
    "everything": _bare(*EXPERTS, *ROUTERS, *SHARED, r=8, seed=96, target_modules=ATTENTION),
}  # fmt: skip
"""r8: of none of them. parameters, down, ranks: of the tensors of all experts, both or one."""


def _targets(old: bool) -> tuple[str, ...]:
    return ("o_proj", *(("w1", "w2", "w3") if old else ("gate_proj", "up_proj", "down_proj")))


def converted(variant: str) -> dict[str, AdapterRecipe]:
    """Adapters whose target_modules PEFT converts to parameters of three dimensions.

    trained: by today's PEFT. modules: a module for each expert. joined: those, saved again.
    shared: modules of which all experts share a factor, served from tensors of three dimensions.
    few: modules of some experts; PEFT reads zeros for the others.
    """
    targets = _targets(variant in ("mixtral", "minimax_m2"))

    def recipe(seed: int, **fields: Any) -> AdapterRecipe:
        return AdapterRecipe(r=4, seed=seed, std=0.15, target_modules=targets, **fields)

    return {
        "trained": recipe(97),
        "modules": recipe(98, modules="single"),
        "joined": recipe(99, modules="joined"),
        "shared": recipe(100, modules="shared"),
        "few": recipe(101, modules="few"),
    }
