"""Adapters of routed experts, routers and shared experts, in every form that files have."""

from typing import Any

from tests.checkpoints import AdapterRecipe

ATTENTION = (
    "q_proj", "k_proj", "v_proj", "o_proj", "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa",
    "kv_b_proj",
)  # fmt: skip
EXPERTS = ("experts.gate_up_proj", "experts.down_proj")
ROUTERS = ("gate.weight", "router.weight")
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
    "down": _bare(EXPERTS[1], r=9, seed=92, target_modules=("o_proj",)),
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
