"""Which rows may share a forward: by their lengths, and by what the model's family does."""

from pathlib import Path
from typing import Any

import pytest
import torch

from modeling.models.padded.sharing import Sharing, sharing_of
from tests.modeling.models.sweep_truth import load
from tests.modeling.models.tiny_causal import ORIGINAL, write_tiny

LENGTHS = range(1, 3 * ORIGINAL)


def groups(sharing: Sharing) -> list[list[int]]:
    """Lengths that may be together, in order."""
    found: dict[Any, list[int]] = {}
    for length in LENGTHS:
        found.setdefault(sharing.group(length), []).append(length)
    return list(found.values())


def test_rows_share_unless_something_says_otherwise() -> None:
    assert groups(Sharing()) == [list(LENGTHS)]
    assert groups(Sharing(equal_from=0)) == [[length] for length in LENGTHS]
    assert groups(Sharing(equal_from=45)) == [list(range(1, 45)), [45], [46], [47]]
    assert groups(Sharing(borders=(16, 32))) == [
        list(range(1, 17)), list(range(17, 33)), list(range(33, 48)),
    ]  # fmt: skip


def test_a_row_that_comes_back_is_computed_as_it_first_was() -> None:
    """Its keys were written with the frequencies of their time."""
    keeps = Sharing(borders=(16,))
    assert keeps.cuts(prompt_length=10, length=20) == [16, 20]
    assert keeps.cuts(prompt_length=16, length=17) == [16, 17]
    assert keeps.cuts(prompt_length=17, length=20) == [20], "a longer prompt is of one kind"
    assert keeps.cuts(prompt_length=10, length=16) == [16]
    assert not keeps.begins_anew(17)


def test_a_row_that_passes_a_border_is_computed_anew_where_its_family_does() -> None:
    anew = Sharing(borders=(16,), recomputes=True)
    assert [length for length in LENGTHS if anew.begins_anew(length)] == [17]
    assert anew.cuts(prompt_length=10, length=20) == [20]


def test_tokens_are_replayed_where_their_number_at_once_decides() -> None:
    one_by_one = Sharing(equal_from=9, replays=True)
    assert one_by_one.cuts(prompt_length=3, length=8) == [8]
    assert one_by_one.cuts(prompt_length=3, length=11) == [8, 9, 10, 11]
    assert one_by_one.cuts(prompt_length=10, length=12) == [10, 11, 12]
    assert one_by_one.cuts(prompt_length=10, length=10) == [10]


@pytest.mark.parametrize(
    ("kind", "variant", "sharing"),
    [
        ("llama", "plain", Sharing()),
        ("llama", "dynamic", Sharing()),
        ("olmo2", "longrope", Sharing(borders=(ORIGINAL,))),
        ("phi3", "longrope", Sharing(borders=(ORIGINAL,), recomputes=True)),
        ("phimoe", "longrope", Sharing(borders=(ORIGINAL,), recomputes=True)),
        ("llama4_text", "plain", Sharing(equal_from=8)),
        ("doge", "plain", Sharing(equal_from=9, replays=True)),
    ],
)
def test_what_configs_say(tmp_path: Path, kind: str, variant: str, sharing: Sharing) -> None:
    torch.manual_seed(0)
    assert sharing_of(load(write_tiny(tmp_path, kind, variant))) == sharing
