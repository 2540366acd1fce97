"""Adapters of routed experts, routers and shared experts against transformers + PEFT."""

import pytest

from tests.modeling.parity import BASE, Setting, World, compare

# PEFT looks for patterns of parameters among modules, and warns that it found none.
pytestmark = pytest.mark.filterwarnings("ignore:The following .*_pattern keys:RuntimeWarning")

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral", "olmoe", "deepseek_v3", "glm4_moe", "gpt_oss")
NAMES = [BASE, "attention", "parameters", "down", "ranks", "router", "everything"]


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("variant", FAMILIES)
def test_experts(world: World, variant: str, ranks: int) -> None:
    """Base and adapters in one batch."""
    shared = ["shared"] if variant in ("qwen2_moe", "deepseek_v3", "glm4_moe") else []
    compare(world, Setting("experts", variant, ranks, [*NAMES, *shared]))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("variant", ["qwen3_moe", "mixtral", "olmoe", "deepseek_v3"])
def test_what_peft_converts(world: World, variant: str, ranks: int) -> None:
    """Modules of single experts, as they are and as PEFT saves them again."""
    family = "converted_mixtral" if variant == "mixtral" else "converted"
    compare(world, Setting(family, variant, ranks, [BASE, "trained", "modules", "joined"]))
