import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE

from deployments.ingress.detokenize import StopStrings, TextStream
from deployments.ingress.text import Text
from tests.fakes import TALE, byte_level_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
TEXT = Text(TOKENIZER)
ids_of_vocabulary = st.lists(st.integers(0, TOKENIZER.get_vocab_size() + 2), max_size=60)


def _ids(text: str) -> list[int]:
    ids: list[int] = TOKENIZER.encode(text, add_special_tokens=False).ids
    return ids


def _in_batches(ids: list[int], sizes: list[int]) -> list[list[int]]:
    batches, start = [], 0
    for size in sizes:
        batches.append(ids[start : start + size])
        start += size
    return [*batches, ids[start:]]


@settings(deadline=None, max_examples=300)
@given(ids=ids_of_vocabulary, sizes=st.lists(st.integers(0, 4), max_size=40))
def test_pieces_of_any_tokens_add_up_to_the_whole_decoding(
    ids: list[int], sizes: list[int]
) -> None:
    stream = TEXT.stream()
    pieces = [stream.push(batch) for batch in _in_batches(ids, sizes)]
    assert "".join(pieces) + stream.flush() == TEXT.decode(ids)


@settings(deadline=None, max_examples=200)
@given(text=st.text(max_size=40))
def test_unicode_comes_out_whole(text: str) -> None:
    stream = TEXT.stream()
    pieces = [stream.push([id]) for id in _ids(text)]
    assert "".join(pieces) + stream.flush() == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_an_unfinished_character_waits_and_comes_with_the_end() -> None:
    first, *others = _ids("\u4e2d")
    stream = TEXT.stream()
    assert stream.push([first]) == ""
    assert "".join(stream.push([id]) for id in others) == "\u4e2d"
    stream = TEXT.stream()
    stream.push([first])
    assert stream.flush() == "\ufffd"
    assert stream.flush() == ""


def test_the_window_stays_small_over_broken_bytes() -> None:
    sizes: list[int] = []

    def decode(ids: object) -> str:
        assert isinstance(ids, list)
        sizes.append(len(ids))
        return TEXT.decode(ids)

    lone_continuation = _ids("\u4e2d")[-1]
    stream = TextStream(decode)
    pieces = [stream.push([lone_continuation]) for _ in range(500)]
    assert "".join(pieces) + stream.flush() == "\ufffd" * 500
    assert max(sizes) <= 12


def test_the_window_stays_small_over_plain_text() -> None:
    sizes: list[int] = []

    def decode(ids: object) -> str:
        assert isinstance(ids, list)
        sizes.append(len(ids))
        return TEXT.decode(ids)

    stream = TextStream(decode)
    pieces = [stream.push([id]) for id in _ids(TALE * 20)]
    assert "".join(pieces) + stream.flush() == TALE * 20
    assert max(sizes) <= 12


def test_special_and_silent_tokens_have_no_text() -> None:
    end = token_id(TOKENIZER, "</s>")
    thought = token_id(TOKENIZER, "<think>")
    ids = [*_ids("fox"), end, thought, *_ids("dog")]
    loud, quiet = TEXT.stream(), TEXT.stream(frozenset([thought]))
    assert loud.push(ids) == "fox<think>dog"
    assert quiet.push(ids) == "foxdog"


def test_a_sentencepiece_decoder_keeps_its_spaces() -> None:
    tokens = ["▁the", "▁fox", "<0xC3>", "<0xA9>", "▁", "s"]
    tokenizer = Tokenizer(BPE({token: id for id, token in enumerate(tokens)}, []))
    tokenizer.decoder = DecoderSequence(
        [Replace("▁", " "), ByteFallback(), Fuse(), Strip(" ", 1, 0)]
    )
    text = Text(tokenizer)
    stream = text.stream()
    pieces = [stream.push([id]) for id in [0, 1, 2, 3, 1, 5, 4]]
    assert pieces == ["the", " fox", "", "é", " fox", "s", " "]
    assert [text.token_bytes(id) for id in range(4)] == [b" the", b" fox", b"\xc3", b"\xa9"]


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
def test_stop_strings_do_not_see_how_text_was_cut(
    pieces: list[str], stops: list[str], keep: bool
) -> None:
    matcher = StopStrings(stops, keep)
    shown = "".join([matcher.push(piece) for piece in pieces]) + matcher.flush()
    assert (shown, matcher.matched) == _by_character("".join(pieces), stops, keep)


@settings(deadline=None, max_examples=300)
@given(text=few_letters, stop=st.text("ab", min_size=1, max_size=4))
def test_only_what_may_begin_a_stop_string_is_held_back(text: str, stop: str) -> None:
    matcher = StopStrings([stop], keep=False)
    shown = "".join(matcher.push(char) for char in text)
    if not matcher.matched:
        held = text[len(shown) :]
        assert stop.startswith(held)
        assert not any(
            stop.startswith(text[start:]) for start in range(len(text)) if start < len(shown)
        )


def test_kept_text_is_not_held_back() -> None:
    matcher = StopStrings(["END"], keep=True)
    assert [matcher.push(piece) for piece in ("the E", "N", "D!", "more")] == [
        "the E", "N", "D", "",
    ]  # fmt: skip
    assert matcher.flush() == ""


def test_without_stop_strings_text_passes() -> None:
    matcher = StopStrings([], keep=False)
    assert matcher.push("anything") == "anything"
    assert not matcher.matched


def test_an_empty_stop_string_is_our_mistake() -> None:
    with pytest.raises(AssertionError, match=re.escape("an empty stop string")):
        StopStrings([""], keep=False)
