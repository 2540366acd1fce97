"""GPT-2, OPT and GPT-NeoX: transformers + PEFT and the runner give the same tokens and logits."""

import pytest

from modeling.models import gpt2
from sharding.slicing import Segments
from tests.checkpoints_others import (
    GPT2_ADAPTERS,
    GPT2_VARIANTS,
    GPT_NEOX_ADAPTERS,
    GPT_NEOX_VARIANTS,
    OPT_ADAPTERS,
    OPT_VARIANTS,
)
from tests.modeling.parity import BASE, Setting, World, compare, expect_mismatch

FIRST = {"gpt2": "plain", "opt": "plain", "gpt_neox": "parallel"}
"""The variant that each family is tried with in every way."""

ADAPTERS = {"gpt2": GPT2_ADAPTERS, "opt": OPT_ADAPTERS, "gpt_neox": GPT_NEOX_ADAPTERS}
VARIANTS = {"gpt2": GPT2_VARIANTS, "opt": OPT_VARIANTS, "gpt_neox": GPT_NEOX_VARIANTS}
OTHERS = [
    (family, variant)
    for family in FIRST
    for variant in VARIANTS[family]
    if variant != FIRST[family]
]
MIXED = [BASE, "r4", "r16", "rows"]


@pytest.mark.parametrize("name", [BASE, *GPT2_ADAPTERS])
@pytest.mark.parametrize("family", FIRST)
def test_alone(world: World, family: str, name: str) -> None:
    compare(world, Setting(family, FIRST[family], 1, [name], chunk=10**6))


@pytest.mark.parametrize("name", [BASE, "columns", "rows"])
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FIRST)
def test_alone_on_ranks(world: World, family: str, ranks: int, name: str) -> None:
    compare(world, Setting(family, FIRST[family], ranks, [name], chunk=10**6))


@pytest.mark.parametrize("ranks", [1, 2, 4])
@pytest.mark.parametrize("family", FIRST)
def test_together(world: World, family: str, ranks: int) -> None:
    """All adapters and the base in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting(family, FIRST[family], ranks, [BASE, *ADAPTERS[family]]))


@pytest.mark.parametrize(("family", "variant"), OTHERS)
def test_other_shapes(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 2, MIXED))


GPT2_ALONE = Setting("gpt2", "plain", 2, ["columns"])
GPT2_BY_LAYER = Setting("gpt2", "by_layer", 1, [BASE])
OPT_ALONE = Setting("opt", "plain", 1, [BASE])
NEOX_ALONE = Setting("gpt_neox", "parallel", 2, ["columns"])
NEOX_ROWS = Setting("gpt_neox", "parallel", 2, ["rows"])
