"""Drafts of answers that copy a text and change some of it."""

import random

import pytest

from benchmarks.copying import num_steps
from scheduler.drafts import NEAR, Drafter


def text(count: int, seed: int = 0) -> list[int]:
    """No token occurs twice."""
    return random.Random(seed).sample(range(10_000), count)


SOURCE = text(200)
AT = 100
"""Where the copy is not the source."""

NEW = 20_000
"""A token that occurs nowhere."""


@pytest.mark.parametrize(
    "copy",
    [
        [*SOURCE[:AT], NEW, *SOURCE[AT + 1 :]],
        [*SOURCE[:AT], NEW, *SOURCE[AT:]],
        [*SOURCE[:AT], *SOURCE[AT + 1 :]],
        [*SOURCE[:AT], NEW, NEW + 1, NEW + 2, *SOURCE[AT + NEAR :]],
    ],
    ids=["changed", "added", "left out", "several"],
)
def test_a_change_costs_few_steps(copy: list[int]) -> None:
    """Without it, the first three tokens have no draft, and then each step brings nine."""
    plain = 3 + -(-(len(SOURCE) - 3) // 9)
    assert num_steps(SOURCE, SOURCE) == plain
    assert num_steps(SOURCE, copy) <= plain + 4


def test_one_change_in_twenty() -> None:
    chance, others = random.Random(3), iter(range(NEW, 30_000))
    copy = [next(others) if chance.random() < 0.05 else token for token in SOURCE]
    assert len(copy) / num_steps(SOURCE, copy) > 5


def test_a_copy_stays_with_its_source() -> None:
    """Its tokens occur again later, where another text follows."""
    prompt = [*SOURCE[:50], *SOURCE[20:30], *text(10, seed=1), NEW]
    drafter = Drafter()
    known = [*prompt, *SOURCE[:10]]
    assert drafter.find(known, 4) == tuple(SOURCE[10:14])
    assert drafter.find([*known, *SOURCE[10:26]], 8) == tuple(SOURCE[26:34])


def test_a_text_that_is_no_copy_has_no_drafts() -> None:
    drafter = Drafter()
    known = [*SOURCE, NEW, *SOURCE[:5]]
    assert drafter.find(known, 4) == tuple(SOURCE[5:9])
    drafter.verified(4, 0)
    assert drafter.find([*known, NEW + 1], 4) == ()
    assert drafter.find([*known, NEW + 1, NEW + 2, NEW + 3], 4) == ()


def test_what_was_guessed_and_was_wrong_leaves_no_place_before_the_text() -> None:
    drafter = Drafter()
    known = [1, 2, 3, 4, 5]
    assert drafter.find(known, 3, guessed=(1, 2, 3, 4)) == (5, 1, 2)
    for count in range(4, 9):
        drafter.verified(3, count % 2)
        drafter.find(SOURCE[:count], 4)
