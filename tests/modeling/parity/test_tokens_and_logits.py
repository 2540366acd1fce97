"""The proof of the house: transformers + PEFT and the runner give the same tokens and logits."""

import pytest

from tests.modeling.parity.comparison import ADAPTERS, BASE, RANKS, WHOLE, Setting, World, compare
from tests.ranks import run_ranks
from tests.sweeps import swept, swept_rows

MODELS = [
    ("llama", "gqa"),
    ("llama", "mha"),
    ("llama", "tied"),
    ("llama", "llama3_rope"),
    ("llama", "odd_vocab"),
]
OTHER_SHAPES = [
    ("llama", "mqa"),
    ("llama", "biases"),
    ("llama", "wide_heads"),
    ("llama", "linear_rope"),
]
"""(family, variant): a new family joins here and in parity.FAMILIES."""

EVERYONE = [BASE, *ADAPTERS]


def is_first(family: str, variant: str, last: object) -> bool:
    """Whether the suite has time for a cell: of one model all, of another one on two ranks."""
    return variant == "gqa" or (variant, last) == ("odd_vocab", 2)


@pytest.mark.parametrize(
    ("family", "variant", "name"),
    swept_rows(((*model, name) for model in MODELS for name in EVERYONE), is_first),
)
def test_alone(world: World, family: str, variant: str, name: str) -> None:
    compare(world, Setting(family, variant, 1, [name], chunk=WHOLE))


@pytest.mark.parametrize("name", [BASE, "columns", "rows"])
@pytest.mark.parametrize("ranks", swept([2, 4], lambda ranks: ranks == 2))
def test_alone_on_ranks(world: World, ranks: int, name: str) -> None:
    """Over gloo, as a server's ranks are."""
    compare(world, Setting("llama", "gqa", ranks, [name], chunk=WHOLE), run=run_ranks)


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(((*model, ranks) for model in MODELS for ranks in (1, 2, 4)), is_first),
)
def test_together(world: World, family: str, variant: str, ranks: int) -> None:
    """All adapters and the base in one batch, prompts in chunks beside rows that decode."""
    compare(world, Setting(family, variant, ranks, EVERYONE))


@pytest.mark.parametrize(
    ("family", "variant"), swept_rows(OTHER_SHAPES, lambda _, variant: variant == "biases")
)
def test_other_shapes(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 2, [BASE, "r8", "rows", "patterns"]))


@pytest.mark.parametrize("name", RANKS)
@pytest.mark.parametrize("ranks", [1, 2])
def test_adapter_ranks_alone(world: World, ranks: int, name: str) -> None:
    compare(world, Setting("llama", "gqa", ranks, [name], chunk=WHOLE), run=run_ranks)


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_adapter_ranks_together(world: World, ranks: int) -> None:
    """From one row of a page to eight pages, in one batch."""
    compare(world, Setting("llama", "gqa", ranks, [BASE, "r8", *RANKS, "r24"]))
