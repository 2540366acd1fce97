"""Kinds of adapters in every way: alone, together, preempted, with prefix hits, on 1 to 4 ranks.

`make parity` runs it; tests of each kind try some of these cells, and faults on purpose.
"""

from typing import Any

import pytest

from tests.checkpoints_stacks import STACKS
from tests.modeling.kinds import KINDS, MODELS, WHOLE_LINEARS, Model
from tests.modeling.parity import test_activated as activated
from tests.modeling.parity import test_experts as experts
from tests.modeling.parity import test_generic as generic
from tests.modeling.parity import test_scores as scores
from tests.modeling.parity.comparison import BASE, WHOLE, Setting, World, compare

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, of what it trains

RANKS = (1, 2, 4)
CELLS = [(kind, model, ranks) for kind in KINDS for model in KINDS[kind].names for ranks in RANKS]


def setting(kind: str, model: Model, ranks: int, names: list[str], **more: Any) -> Setting:
    linears = WHOLE_LINEARS.get(model, ())
    return Setting(*model, ranks, names, linears=linears, **{**KINDS[kind].more, **more})


@pytest.mark.parametrize(("kind", "model", "ranks"), CELLS)
def test_alone(world: World, kind: str, model: Model, ranks: int) -> None:
    for name in KINDS[kind].names[model]:
        compare(world, setting(kind, model, ranks, [name], chunk=WHOLE))


@pytest.mark.parametrize(("kind", "model", "ranks"), CELLS)
def test_together(world: World, kind: str, model: Model, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    names = [BASE, *KINDS[kind].names[model]]
    compare(world, setting(kind, model, ranks, names, rejoins_at=3))


@pytest.mark.parametrize(("kind", "model", "ranks"), CELLS)
def test_prefix_hits(world: World, kind: str, model: Model, ranks: int) -> None:
    """Each prompt comes twice, and the base model has the same."""
    names = [*KINDS[kind].names[model][:4], BASE]
    asked = setting(
        kind, model, ranks, names * 2, lengths=[35] * 2 * len(names), hits=len(names), chunk=WHOLE
    )
    compare(world, asked)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_activated(world: World, model: Model, ranks: int) -> None:
    """By the base model before the invocation, so that its blocks are hit by all."""
    activated.compare_cases(world, model, ranks, activated.CASES[:1], chunk=WHOLE)
    activated.compare_cases(world, model, ranks, activated.CASES, rejoins_at=3)
    twice = [*activated.CASES[:3], *activated.CASES[:3]]
    activated.compare_cases(world, model, ranks, twice, lengths=[8], hits=2)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("model", MODELS)
def test_heads_of_classification(world: World, model: Model, ranks: int) -> None:
    """Alone, and in chunks beside generation."""
    scores.compare_heads(world, model, ranks)


@pytest.mark.parametrize("ranks", RANKS)
@pytest.mark.parametrize("variant", ["phimoe", "deepseek_v2"])
def test_experts(world: World, variant: str, ranks: int) -> None:
    """Of more types than the suite has time for."""
    compare(world, Setting("mixture", variant, ranks, experts.NAMES))


@pytest.mark.parametrize("ranks", RANKS[1:])
@pytest.mark.parametrize("variant", [*experts.VARIANTS, "phimoe", "deepseek_v2", "six_experts"])
def test_whole_experts(world: World, variant: str, ranks: int) -> None:
    names = [*experts.NAMES, *experts.MORE.get(variant, [])]
    compare(world, Setting("mixture", variant, ranks, names, spread=True))


def test_what_peft_converts_over_whole_experts(world: World) -> None:
    names = [BASE, "trained", "modules", "joined", "shared", "few"]
    compare(world, Setting("converted", "qwen3_moe", 2, names, spread=True))


SUITE = {str(each.values[0]) for each in generic.LARGER}


@pytest.mark.parametrize("variant", [variant for variant in STACKS if variant not in SUITE])
def test_text_of_larger_models(world: World, variant: str) -> None:
    """Of those that the suite has no time for."""
    generic.compare_stack(world, variant)
