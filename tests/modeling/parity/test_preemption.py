"""Requests that are preempted amid their answers and join anew with all their tokens."""

import pytest

from tests.modeling.parity.comparison import BASE, RANKS, Setting, World, compare
from tests.modeling.parity.test_vocabulary import NAMES
from tests.sweeps import swept, swept_rows

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")

SYSTEMS = [("llama", "gqa"), ("gpt2", "plain"), ("opt", "plain"), ("gpt_neox", "parallel")]

MODELS = [
    ("llama", "gqa"),
    ("relative", "mistral"),
    ("relative", "qwen2"),
    ("relative", "qwen3"),
    ("relative", "granite"),
    ("relative", "solar"),
    ("fused", "phi3"),
    ("gpt2", "plain"),
    ("opt", "plain"),
    ("gpt_neox", "parallel"),
]
"""(family, variant): the first variant of each paged architecture."""


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(
        ((*model, ranks) for model in MODELS for ranks in (1, 2)),
        lambda family, _, ranks: (family, ranks) in {("llama", 1), ("gpt_neox", 2)},
    ),
)
def test_preempted(world: World, family: str, variant: str, ranks: int) -> None:
    """Adapters of all sizes and the base, each preempted at another token of its answer."""
    names = [BASE, *RANKS, "columns", "rows"]
    compare(world, Setting(family, variant, ranks, names, rejoins_at=4))


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "variant"), SYSTEMS)
def test_preempted_on_four_ranks(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 4, [BASE, *RANKS, "rows"], rejoins_at=4))


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_preempted_with_an_adapted_vocabulary(world: World, ranks: int) -> None:
    compare(world, Setting("vocabulary", "gqa", ranks, NAMES, vocabulary=True, rejoins_at=4))


def test_preempted_after_the_first_token_and_before_the_last(world: World) -> None:
    compare(world, Setting("llama", "gqa", 1, ["r8"], rejoins_at=1))
    compare(world, Setting("llama", "gqa", 1, ["r8"], rejoins_at=23))
