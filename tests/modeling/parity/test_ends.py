"""Embedding and head of every family: factors there or whole matrices, against PEFT."""

import pytest
from torch import Tensor

from modeling.adapters import vocabulary
from modeling.adapters.token_rows import groups_of
from sharding.embedding import VocabParallelEmbedding
from tests.modeling.parity.comparison import (
    BASE,
    FAMILIES,
    Setting,
    World,
    compare,
    expect_mismatch,
)
from tests.sweeps import swept_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

FIRST = [
    ("llama_ends", "tied"),
    ("gpt2_ends", "untied"),
    ("opt_ends", "projected"),
    ("gpt_neox_ends", "parallel"),
]
OTHERS = [
    ("llama_ends", "gqa"),
    ("llama_ends", "odd_vocab_tied"),
    ("gpt2_ends", "odd_vocab"),
    ("opt_ends", "plain"),
    ("opt_ends", "bare_names"),
    ("gpt_neox_ends", "tied"),
]


def setting(family: str, variant: str, ranks: int, names: list[str] | None = None) -> Setting:
    """Every adapter that the variant can have, and the base, in one batch."""
    left_out = "layers" if variant == "projected" else "between"
    found = names or [BASE, *(n for n in FAMILIES[family].adapters if n != left_out)]
    return Setting(family, variant, ranks, found, vocabulary=True, copies=5)


SUITE = {("llama_ends", 2), ("gpt2_ends", 1)}


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(
        ((*first, ranks) for first in FIRST for ranks in (1, 2, 4)),
        lambda family, _, ranks: (family, ranks) in SUITE,
    ),
)
def test_together(world: World, family: str, variant: str, ranks: int) -> None:
    compare(world, setting(family, variant, ranks))


@pytest.mark.sweep
@pytest.mark.parametrize(("family", "variant"), OTHERS)
def test_other_shapes(world: World, family: str, variant: str) -> None:
    compare(world, setting(family, variant, 2))


@pytest.mark.parametrize("name", ["whole_head", "whole_embedding"])
def test_preempted(world: World, name: str) -> None:
    again = Setting("gpt2_ends", "odd_vocab", 2, [BASE, name], 5, True, rejoins_at=3, copies=1)
    compare(world, again)


def test_a_matrix_left_out_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vocabulary, "_matrices", lambda *args: [])
    expect_mismatch(world, setting("gpt2_ends", "untied", 1, ["whole_head"]))


def test_a_matrix_for_the_whole_batch_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = groups_of

    def for_all(bank: object, slots: Tensor, projection: int) -> object:
        return [type(g)(slice(None), g.adapter) for g in real(bank, slots, projection)]  # type: ignore[arg-type]

    monkeypatch.setattr(vocabulary, "groups_of", for_all)
    expect_mismatch(world, setting("gpt_neox_ends", "parallel", 1, [BASE, "whole_embedding"]))


def test_another_ranks_tokens_from_a_matrix_are_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank must leave out the ids that it does not hold: they would be counted twice."""
    real = VocabParallelEmbedding.local_ids
    monkeypatch.setattr(
        VocabParallelEmbedding, "local_ids", lambda self, ids: (real(self, ids)[0], None)
    )
    expect_mismatch(world, setting("opt_ends", "plain", 2, ["whole_embedding"]))


def test_a_head_without_adapters_is_noticed(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("modeling.models.paged_base.logits_adapted", lambda head, x, data: head(x))
    expect_mismatch(world, setting("opt_ends", "plain", 1, ["head"]))
