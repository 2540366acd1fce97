import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deployments.ingress.text.stops import StopStrings


def _by_character(text: str, stops: list[str], keep: bool) -> tuple[str, bool]:
    """The rule itself: look after each character; of matches that end there, the longest."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(len(stop) for stop in ending)
            return text[: end if keep else end - longest], True
    return text, False


few_letters = st.text("ab", max_size=12)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(few_letters, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    keep=st.booleans(),
)
def test_matches_do_not_depend_on_the_pieces(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    matcher = StopStrings(stops, keep)
    shown = "".join([matcher.push(piece) for piece in pieces]) + matcher.flush()
    assert (shown, matcher.matched) == _by_character("".join(pieces), stops, keep)


@settings(deadline=None, max_examples=300)
@given(text=few_letters, stop=st.text("ab", min_size=1, max_size=4))
def test_only_the_start_of_a_stop_string_is_withheld(text: str, stop: str) -> None:
    matcher = StopStrings([stop], keep=False)
    shown = "".join(matcher.push(char) for char in text)
    if not matcher.matched:
        withheld = text[len(shown) :]
        assert stop.startswith(withheld)
        assert not any(
            stop.startswith(text[start:]) for start in range(len(text)) if start < len(shown)
        )


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(few_letters, max_size=8),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=4),
    keep=st.booleans(),
    early=st.integers(0, 4),
)
def test_what_is_complete_too_early_does_not_count(
    pieces: list[str], stops: list[str], keep: bool, early: int
) -> None:
    matcher = StopStrings(stops, keep)
    shown = "".join(matcher.push(p, may_end=at >= early) for at, p in enumerate(pieces))
    text, before = "".join(pieces), len("".join(pieces[:early]))
    ends = [end for end in range(before + 1, len(text) + 1) if text[:end].endswith(tuple(stops))]
    expected = text
    if ends:
        longest = max(len(stop) for stop in stops if text[: ends[0]].endswith(stop))
        expected = text[: ends[0] - (0 if keep else longest)]
    assert (shown + matcher.flush(), matcher.matched) == (expected, bool(ends))


def test_keep_withholds_nothing() -> None:
    matcher = StopStrings(["END"], keep=True)
    assert [matcher.push(piece) for piece in ("the E", "N", "D!", "more")] == [
        "the E", "N", "D", "",
    ]  # fmt: skip
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    matcher = StopStrings([], keep=False)
    assert matcher.push("anything") == "anything"
    assert not matcher.matched


def test_empty_stop_strings_are_a_bug() -> None:
    with pytest.raises(AssertionError, match=re.escape("an empty stop string")):
        StopStrings([""], keep=False)


@settings(deadline=None, max_examples=500)
@given(
    pieces=st.lists(st.one_of(few_letters, st.just("<x>")), max_size=8),
    stops=st.lists(st.sampled_from(["<x>", "a<x>", "<x>b", "ab", "b", "<x>a<x>"]), min_size=1,
                   max_size=3),
    keep=st.booleans(),
)  # fmt: skip
def test_special_tokens_match_but_are_not_visible(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    """The rule, character by character, over the text with special tokens and the one without."""
    matcher = StopStrings(stops, keep, special=["<x>"])
    shown = "".join([matcher.push(piece, hidden=piece == "<x>") for piece in pieces])
    assert (shown + matcher.flush(), matcher.matched) == _by_token(pieces, stops, keep)


def _by_token(pieces: list[str], stops: list[str], keep: bool) -> tuple[str, bool]:
    full, visible = "", []
    for piece in pieces:
        for char in piece:
            full += char
            if piece != "<x>":
                visible.append(len(full) - 1)
            seen = "".join(full[index] for index in visible)
            starts = [
                len(full) - len(stop) for stop in stops if "<" in stop and full.endswith(stop)
            ]
            if piece != "<x>":
                starts += [
                    visible[-len(stop)] for stop in stops if "<" not in stop and seen.endswith(stop)
                ]
            if starts:
                end = len(full) if keep else min(starts)
                return "".join(full[index] for index in visible if index < end), True
    return "".join(full[index] for index in visible), False
