import itertools
import json
import re
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.decoders import ByteFallback, Fuse, Replace, Strip
from tokenizers.decoders import Sequence as DecoderSequence
from tokenizers.models import BPE, WordLevel
from transformers import PreTrainedTokenizerFast

from deployments.ingress.text.token_decoder import IncrementalDecoder
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.text.tokenizer_kinds import KINDS
from tests.fakes import SPECIALS, byte_level_tokenizer, token_id

TOKENIZER = byte_level_tokenizer()
TEXT = ModelTokenizer(TOKENIZER)
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
def test_characters_are_never_split(text: str) -> None:
    assume(not any(word in text for word in SPECIALS))
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
    text = ModelTokenizer(tokenizer)
    stream = text.stream()
    pieces = [stream.push([id]) for id in [0, 1, 2, 3, 1, 5, 4]]
    assert pieces == ["the", " fox", "", "é", " fox", "s", " "]
    assert [text.token_bytes(id) for id in range(4)] == [b" the", b" fox", b"\xc3", b"\xa9"]


KIND_NAMES = sorted(KINDS)
_TOKENIZERS = {name: KINDS[name]() for name in KIND_NAMES}
_TEXTS = {name: ModelTokenizer(tokenizer) for name, tokenizer in _TOKENIZERS.items()}
sizes_of_frames = st.lists(st.integers(0, 7), max_size=40)
any_unicode = st.text(st.characters(exclude_categories=["Cs"]), max_size=20)


def _streamed(text: ModelTokenizer, ids: list[int], sizes: list[int]) -> str:
    stream = text.stream()
    pieces = [stream.push(batch) for batch in _in_batches(ids, sizes)]
    return "".join(pieces) + stream.flush()


def _by_runs(tokenizer: Tokenizer, ids: list[int]) -> str:
    """The library's decoding, but of a run of byte tokens only what fits in no character is lost.

    The library gives up such a run whole: it is decoded here character by character instead, by
    separating each lost byte from the others by a token without bytes.
    """
    decoder = json.loads(tokenizer.decoder.__getstate__()) if tokenizer.decoder else {}
    if not any(step["type"] == "ByteFallback" for step in decoder.get("decoders", ())):
        return str(tokenizer.decode(ids))
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    tokens = [tokenizer.id_to_token(id) for id in ids if id not in special]
    units: list[str] = []
    for is_run, run in itertools.groupby(
        [token for token in tokens if token is not None],
        lambda token: re.fullmatch("<0x..>", token) is not None,
    ):
        if not is_run:
            units += run
            continue
        raw = bytes.fromhex("".join(token[3:5] for token in run))
        lossy = raw.decode("utf-8", "surrogateescape")
        units += ["\ufffd" if "\ud800" <= char <= "\udfff" else char for char in lossy]
    return str(tokenizer.decoder.decode(units))


@pytest.mark.parametrize("kind", KIND_NAMES)
@settings(deadline=None, max_examples=150)
@given(data=st.data(), sizes=sizes_of_frames)
def test_any_tokens_in_any_frames_are_the_tokenizers_own_decoding(
    kind: str, data: st.DataObject, sizes: list[int]
) -> None:
    """Also ids that no text encodes to: invalid bytes, ids beyond the vocabulary."""
    tokenizer = _TOKENIZERS[kind]
    ids = data.draw(st.lists(st.integers(0, tokenizer.get_vocab_size() + 2), max_size=40))
    expected = _by_runs(tokenizer, ids)
    assert _streamed(_TEXTS[kind], ids, sizes) == _TEXTS[kind].decode(ids) == expected


@pytest.mark.parametrize("kind", KIND_NAMES)
@settings(deadline=None, max_examples=100)
@given(words=any_unicode, sizes=sizes_of_frames, cut=st.integers(0, 60))
def test_an_answer_in_any_frames_is_transformers_decoding(
    kind: str, words: str, sizes: list[int], cut: int
) -> None:
    """Whole, and cut anywhere: then the characters that were finished stay."""
    tokenizer = _TOKENIZERS[kind]
    ids = tokenizer.encode(words, add_special_tokens=False).ids
    text = _TEXTS[kind]
    assert _streamed(text, ids, sizes) == tokenizer.decode(ids)
    part = _streamed(text, ids[:cut], sizes)
    assert tokenizer.decode(ids).startswith(part.rstrip("\ufffd"))


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral", "byte-level"])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 7, 100])
def test_characters_in_one_long_run_of_bytes_come_out(kind: str, size: int) -> None:
    zoo = "\U0001f984\U0001f41d\U0001f422\U0001f40d\U0001f40a zoo"
    ids = _TOKENIZERS[kind].encode(zoo, add_special_tokens=False).ids
    stream = _TEXTS[kind].stream()
    shown = "".join(stream.push(ids[at : at + size]) for at in range(0, len(ids), size))
    assert shown + stream.flush() == zoo


@pytest.mark.parametrize("kind", ["llama", "gemma", "mistral"])
def test_a_run_that_is_cut_keeps_its_finished_characters(kind: str) -> None:
    ids = _TOKENIZERS[kind].encode("\U0001f984\U0001f41d", add_special_tokens=False).ids[:-2]
    stream = _TEXTS[kind].stream()
    assert "".join(stream.push([id]) for id in ids).strip() == "\U0001f984"
    assert stream.flush() == "\ufffd\ufffd"


@pytest.mark.parametrize("kind", KIND_NAMES)
def test_the_work_for_a_token_does_not_grow(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library decodes three tokens at most, however many came before."""
    lengths: list[int] = []

    class Counting(IncrementalDecoder):
        def _decode(self, strings: list[str]) -> str:
            lengths.append(len(strings))
            return super()._decode(strings)

    monkeypatch.setattr("deployments.ingress.text.token_decoder.IncrementalDecoder", Counting)
    tokenizer = _TOKENIZERS[kind]
    ids = [id % tokenizer.get_vocab_size() for id in range(0, 3000, 7)]
    _streamed(ModelTokenizer(tokenizer), ids, [1] * len(ids))
    assert max(lengths, default=0) <= 3
    assert len(lengths) <= 6 * len(ids)


@settings(deadline=None, max_examples=300)
@given(
    pieces=st.lists(
        st.sampled_from([" ", "'", " '", "n't", "'s", " .", "?", "a", " 'm", ",", "  "]),
        max_size=25,
    )
)
def test_the_clean_up_equals_transformers(pieces: list[str]) -> None:
    vocab = {piece: id for id, piece in enumerate(dict.fromkeys([*pieces, "<unk>"]))}
    backend = Tokenizer(WordLevel(vocab, unk_token="<unk>"))
    backend.decoder = Fuse()
    fast: Any = PreTrainedTokenizerFast
    theirs = fast(tokenizer_object=backend, clean_up_tokenization_spaces=True)
    ids = [vocab[piece] for piece in pieces]
    ours = ModelTokenizer(backend, cleans_up=True)
    assert _streamed(ours, ids, [1] * len(ids)) == ours.decode(ids) == theirs.decode(ids)


@pytest.mark.parametrize(
    "decoder",
    [
        DecoderSequence([Fuse(), Strip(" ", 0, 1)]),
        DecoderSequence([ByteFallback(), Fuse(), Replace("ab", "c")]),
        DecoderSequence([Fuse(), ByteFallback()]),
    ],
)
def test_decoders_that_change_earlier_text_are_refused(decoder: DecoderSequence) -> None:
    tokenizer = Tokenizer(BPE({"a": 0}, []))
    tokenizer.decoder = decoder
    with pytest.raises(ValueError, match="not served"):
        ModelTokenizer(tokenizer)


def test_a_token_begins_where_its_own_text_does() -> None:
    """What becomes of the unfinished bytes before it is not its own."""
    for kind, lost in (("byte-level", 1), ("llama", 2)):
        tokenizer = _TOKENIZERS[kind]
        broken = tokenizer.encode("x\U0001f984", add_special_tokens=False).ids[:-2]
        ids = [*broken, *tokenizer.encode("fox", add_special_tokens=False).ids]
        stream = _TEXTS[kind].stream()
        starts = []
        shown = ""
        for id in ids:
            shown += stream.push([id])
            starts.append(stream.start)
        at = len(broken)
        assert starts[at] == 1 + lost, kind
        assert shown[starts[at] :].lstrip() == "fox"
        assert starts[at - 2 : at] == [1, 1]
