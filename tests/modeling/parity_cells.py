"""Kinds of adapters in every way: alone, together, preempted, with prefix hits, on 1 to 4 ranks.

`make parity` runs it; tests of each kind try some of these cells, and faults on purpose.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from tests.checkpoints_generic import GENERIC_ADAPTERS, GENERIC_ENDS
from tests.checkpoints_others import GPT2_ADAPTERS
from tests.modeling import test_parity_activated as activated
from tests.modeling import test_parity_scores as scores
from tests.modeling.parity import (
    ADAPTERS,
    BASE,
    VOCABULARY_ADAPTERS,
    WHOLE,
    Setting,
    World,
    compare,
)
from tests.modeling.test_parity_whole import NAMES as WHOLE_LINEARS

pytestmark = pytest.mark.filterwarnings("ignore")  # PEFT's, of what it trains

Model = tuple[str, str]
RANKS = (1, 2, 4)


@dataclass(frozen=True)
class Kind:
    """Adapters of a kind, by family and variant of the model; more: of `Setting`."""

    names: Mapping[Model, tuple[str, ...]]
    more: Mapping[str, Any] = field(default_factory=dict)


def _kind(suffix: str, *names: str, **more: Any) -> Kind:
    models = {"llama": "gqa", "gpt2": "plain", "generic": "olmo2"}
    return Kind({(f"{f}_{suffix}", variant): names for f, variant in models.items()}, more)


KINDS: Mapping[str, Kind] = {
    "LoRA, rsLoRA, patterns, some layers": Kind(
        {
            ("llama", "gqa"): tuple(ADAPTERS),
            ("gpt2", "plain"): tuple(GPT2_ADAPTERS),
            ("generic", "olmo2"): tuple(GENERIC_ADAPTERS),
        }
    ),
    "DoRA": _kind("dora", "dora", "some"),
    "a bias of B": _kind("dora", "biased"),
    "trained biases": _kind("dora", "trained"),
    "bare parameters": _kind("parameters", "parameters", "some"),
    "trained tokens": Kind(
        {
            ("llama_tokens", "odd_vocab_tied"): ("tokens", "embedding", "both", "head"),
            ("gpt2_tokens", "plain"): ("tokens", "embedding", "both", "head"),
            ("generic_tokens", "olmo2"): ("tokens", "embedding", "both", "head"),
        }
    ),
    "norms": _kind("norms", "norms", "last", "scarce"),
    "whole linear maps": _kind("whole", "whole", "one"),
    "LoRA on embedding and head": Kind(
        {
            ("vocabulary", "gqa"): tuple(VOCABULARY_ADAPTERS)[1:],
            ("gpt2_ends", "untied"): ("head", "embedding", "everything"),
            ("generic_ends", "gemma2_untied"): ("everything",),
        },
        {"vocabulary": True},
    ),
    "whole embedding or head": Kind(
        {
            ("llama_ends", "gqa"): ("whole_head", "whole_embedding", "whole_both"),
            ("gpt2_ends", "untied"): ("whole_head", "whole_embedding", "whole_both"),
            ("generic_ends", "gemma2_untied"): tuple(GENERIC_ENDS)[1:],
        },
        {"vocabulary": True, "copies": 5},
    ),
}

CELLS = [(kind, model, ranks) for kind in KINDS for model in KINDS[kind].names for ranks in RANKS]
MODELS = [("llama", "gqa"), ("gpt2", "plain"), ("generic", "olmo2")]


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
