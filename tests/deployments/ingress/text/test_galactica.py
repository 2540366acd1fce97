"""Galactica's prompt rules, on a tokenizer that cuts and drops as its own does."""

import asyncio
import re

import pytest
from hypothesis import given
from hypothesis.strategies import lists, sampled_from
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from deployments.ingress.text.galactica import MARKER, MarkedOffsets, cuts_sequences, mark
from deployments.ingress.text.tokenizer import ModelTokenizer, Slice
from tests.fakes import byte_level_tokenizer

WORDS = ["[START_AMINO]", "[END_AMINO]", "[START_I_SMILES]", "[END_I_SMILES]", "<work>"]
PROMPT = "a Protein [START_AMINO]MIRLGA[END_AMINO] binds"


def galactica_tokenizer() -> Tokenizer:
    """Byte-level, one merge ("MI") beyond single bytes, and Galactica's pre-tokenizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
    vocab |= {letter: len(vocab) + i for i, letter in enumerate(letters)}
    vocab["MI"] = len(vocab)
    tokenizer = Tokenizer(models.BPE(vocab, [("M", "I")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(MARKER, "removed"),
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.Split(Regex("[\\n]"), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(word, special=True) for word in ("<s>", "<pad>", "</s>", "<unk>", *WORDS)]
    )
    tokenizer.post_processor = processors.TemplateProcessing("$A", special_tokens=[])
    return tokenizer


_DEFINITION = re.compile(r"\[START_(DNA|SMILES|I_SMILES|AMINO)\](.*?)\[END_\1\]")


@given(
    lists(
        sampled_from(["[START_DNA]", "[END_DNA]", "[START_AMINO]", "[END_AMINO]", "\n", "C", "GA"]),
        max_size=14,
    ).map("".join)
)
def test_what_is_marked_is_what_the_definition_finds(text: str) -> None:
    def marked(found: re.Match[str]) -> str:
        kind, inner = found.groups()
        return MARKER.join([f"[START_{kind}]", *inner, f"[END_{kind}]"])

    assert mark(text) == _DEFINITION.sub(marked, text)


def test_starts_without_an_end_take_linear_time() -> None:
    """Looked for from each of them, the end that is not there would take minutes."""
    text = "[START_DNA]" * 200_000
    assert mark(text) == text


def ids_of(text: ModelTokenizer, prompt: str) -> list[int]:
    return asyncio.run(text.encode(prompt))


def test_each_character_of_a_sequence_is_a_token() -> None:
    tokenizer = galactica_tokenizer()
    text = ModelTokenizer(tokenizer)
    found = [tokenizer.id_to_token(id) for id in ids_of(text, "MI[START_AMINO]MI[END_AMINO]MI")]
    assert found == ["MI", "[START_AMINO]", "M", "I", "[END_AMINO]", "MI"]


def test_offsets_are_those_in_the_prompt() -> None:
    text = ModelTokenizer(galactica_tokenizer())
    slices = asyncio.run(text.slices(PROMPT))
    assert "".join(each.text for each in slices) == PROMPT
    assert [each.start for each in slices[1:]] == [each.stop for each in slices[:-1]]
    assert Slice(ids_of(text, "M")[0], "M", 23, 24) in slices
    assert [each.id for each in slices] == ids_of(text, PROMPT)


def test_visible_special_tokens_are_text_and_ends_are_not() -> None:
    tokenizer = galactica_tokenizer()
    text = ModelTokenizer(tokenizer)
    ids = [0, *ids_of(text, PROMPT), 2]
    assert text.decode(ids) == PROMPT
    stream = text.stream()
    assert "".join(stream.push([id]) for id in ids) + stream.flush() == PROMPT


@pytest.mark.parametrize(
    ("plain", "marked"),
    [
        ("no sequence [START_AMINO]AB", "no sequence [START_AMINO]AB"),
        ("[START_AMINO]AB[END_DNA]", "[START_AMINO]AB[END_DNA]"),
        ("[START_DNA][END_DNA]", "[START_DNA]|[END_DNA]"),
        ("x[START_SMILES]C=O[END_SMILES]y", "x[START_SMILES]|C|=|O|[END_SMILES]y"),
        ("[START_DNA]A\nC[END_DNA]", "[START_DNA]A\nC[END_DNA]"),
        (
            "[START_I_SMILES]C[END_I_SMILES][START_DNA]T[END_DNA]",
            "[START_I_SMILES]|C|[END_I_SMILES][START_DNA]|T|[END_DNA]",
        ),
    ],
)
def test_what_is_marked(plain: str, marked: str) -> None:
    assert mark(plain) == marked.replace("|", MARKER)
    offsets = MarkedOffsets(mark(plain))
    assert offsets.offset(len(mark(plain))) == len(plain)


def test_other_tokenizers_are_unchanged() -> None:
    assert not cuts_sequences(byte_level_tokenizer())
    text = ModelTokenizer(byte_level_tokenizer())
    assert text.decode(ids_of(text, PROMPT)) == PROMPT
    assert cuts_sequences(galactica_tokenizer())
