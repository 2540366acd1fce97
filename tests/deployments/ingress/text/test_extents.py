"""No text with few enough tokens is longer than the bound."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, normalizers, pre_tokenizers

from deployments.ingress.text.extents import Extents
from tests.deployments.ingress.text.tokenizer_kinds import KINDS


def _normalized(*steps: normalizers.Normalizer) -> Tokenizer:
    tokenizer = KINDS["byte-level"]()
    tokenizer.normalizer = normalizers.Sequence(list(steps))
    return tokenizer


PROVEN = {
    "byte-level": KINDS["byte-level"](),
    "llama": KINDS["llama"](),
    "gemma": KINDS["gemma"](),
    "mistral": KINDS["mistral"](),
    "nfc": _normalized(normalizers.NFC()),
    "nfkc": _normalized(normalizers.NFKC(), normalizers.Lowercase()),
    "shorter": _normalized(normalizers.Replace("abc", "x")),
}
longish = st.text(
    st.sampled_from("abc the\u0301\u1100\u1161\u11a8\u03b1\u0313\u0300\u0345🦄="), max_size=60
)


@pytest.mark.parametrize("kind", sorted(PROVEN))
@settings(deadline=None, max_examples=200)
@given(text=longish)
def test_texts_that_fit_are_encoded(kind: str, text: str) -> None:
    tokenizer = PROVEN[kind]
    tokens = len(tokenizer.encode(text, add_special_tokens=False).ids)
    assert len(text) <= Extents(tokenizer).most_characters(max(1, tokens))


def test_the_bound_is_the_longest_token() -> None:
    tokenizer = KINDS["byte-level"]()
    tokenizer.add_tokens([AddedToken("=" * 99)])
    assert Extents(tokenizer).most_characters(7) == 7 * 99
    tokenizer.normalizer = normalizers.NFC()
    assert Extents(tokenizer).most_characters(7) == 7 * 99 * 4


def _without_bytes() -> Tokenizer:
    """Unknown characters are dropped."""
    described = json.loads(KINDS["gemma"]().to_str())
    described["model"]["byte_fallback"] = False
    described["model"]["unk_token"] = None
    return Tokenizer.from_str(json.dumps(described))


def _eating() -> Tokenizer:
    tokenizer = KINDS["byte-level"]()
    tokenizer.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    return tokenizer


def _cutting() -> Tokenizer:
    tokenizer = KINDS["byte-level"]()
    cut = pre_tokenizers.Split(" ", "removed")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([cut, pre_tokenizers.ByteLevel()])
    return tokenizer


@pytest.mark.parametrize(
    "tokenizer",
    [
        KINDS["word-piece"](),
        KINDS["unigram"](),
        _without_bytes(),
        _eating(),
        _cutting(),
        _normalized(normalizers.Strip()),
        _normalized(normalizers.Replace("x", "")),
    ],
)
def test_tokens_of_any_length_have_a_fixed_bound(
    tokenizer: Tokenizer,
) -> None:
    longest = max(16, *map(len, tokenizer.get_vocab()))
    assert Extents(tokenizer).most_characters(10) == 65_536
    assert Extents(tokenizer).most_characters(100_000) == 100_000 * longest
