"""The tokenizer of grammars knows the tokens that the ingress knows."""

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers
from tokenizers.models import Model

from configs.grammars import matcher_of, tokenizer_of
from tests.fakes import write_tokenizer

pytest.importorskip("llguidance")

EXTRA = "<|extra|>"
SPECIAL = ("<unk>", "<s>", "</s>")
END = SPECIAL.index("</s>")
PIECES = [
    *SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)),
    *(chr(code) for code in range(33, 127)), "ab", "</",
]  # fmt: skip
IDS = {piece: id for id, piece in enumerate(PIECES)}
MERGES = [("a", "b"), ("<", "/")]
LEVELS = sorted(pre_tokenizers.ByteLevel.alphabet())
MODELS: dict[str, tuple[Model, decoders.Decoder]] = {
    "bytes": (
        models.BPE({piece: id for id, piece in enumerate([*SPECIAL, *LEVELS, "ab", "</"])}, MERGES),
        decoders.ByteLevel(),
    ),
    "fallback": (
        models.BPE(IDS, MERGES, unk_token="<unk>", byte_fallback=True),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    ),
    "unigram": (
        models.Unigram([(piece, -1.0) for piece in PIECES], unk_id=0, byte_fallback=True),
        decoders.Sequence([decoders.ByteFallback(), decoders.Fuse()]),
    ),
}


def test_tokens_that_only_the_tokenizers_config_names(tmp_path: Path) -> None:
    first = write_tokenizer(tmp_path).get_vocab_size()
    decoder = {str(first): {"content": EXTRA, "special": True}, "0": {"content": "<s>"}}
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"added_tokens_decoder": decoder}))
    matcher = matcher_of(tokenizer_of(tmp_path, 400), f"start: <[{first}]>")
    assert matcher.consume_token(first)
    assert matcher.is_accepting()


@pytest.mark.parametrize("in_config", [False, True])
def test_added_tokens_that_the_model_does_not_have(tmp_path: Path, in_config: bool) -> None:
    """Files of fine-tuned models often add a padding token, and leave the model's size."""
    size = write_tokenizer(tmp_path).get_vocab_size()
    path, config = tmp_path / "tokenizer.json", tmp_path / "tokenizer_config.json"
    if in_config:
        config.write_text(json.dumps({"added_tokens_decoder": {str(size): {"content": EXTRA}}}))
    else:
        tokenizer = Tokenizer.from_file(str(path))
        tokenizer.add_special_tokens([EXTRA])
        tokenizer.save(str(path))
    matcher = matcher_of(tokenizer_of(tmp_path, size), f"start: {json.dumps(EXTRA)}")
    mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
    allowed = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
    assert len(allowed), "it is text"
    assert max(allowed) < size


def test_a_folder_without_a_fast_tokenizer_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no tokenizer\.json: save one"):
        tokenizer_of(tmp_path, 400)


@pytest.mark.parametrize("flag", [True, False], ids=["special", "not_marked"])
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("choice", ["</s>", "a<s>b", "<unk>", "ab</s>"])
def test_special_tokens_in_a_constraint_are_text(
    tmp_path: Path, kind: str, choice: str, flag: bool
) -> None:
    model, decoder = MODELS[kind]
    tokenizer = Tokenizer(model)
    tokenizer.decoder = decoder
    # One that ends an answer is special, whatever its file says.
    tokenizer.add_tokens([AddedToken(token, special=flag or token != "</s>") for token in SPECIAL])
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": END}))
    size = tokenizer.get_vocab_size()
    matcher = matcher_of(tokenizer_of(tmp_path, size), f"start: {json.dumps(choice)}")
    text = ""
    for _ in choice:
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        [*_, token] = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        if token == END:
            break
        assert matcher.consume_token(int(token)), matcher.get_error()
        text += tokenizer.id_to_token(int(token)) or ""
    assert text == choice
    assert matcher.is_accepting()


def _byte_level() -> Tokenizer:
    tokenizer = Tokenizer(MODELS["bytes"][0])
    tokenizer.normalizer = normalizers.Sequence([normalizers.NFC(), normalizers.Lowercase()])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _metaspace() -> Tokenizer:
    pieces = [(piece, -1.0) for piece in [*PIECES, "\u2581", "\u2581b"]]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0, byte_fallback=True))
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])
    return tokenizer


def _prepending() -> Tokenizer:
    pieces = {piece: id for id, piece in enumerate([*PIECES, "\u2581"])}
    tokenizer = Tokenizer(models.BPE(pieces, MERGES, unk_token="<unk>", byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("\u2581"), normalizers.Replace(" ", "\u2581")]
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(),
         decoders.Strip(" ", 1, 0)]
    )  # fmt: skip
    tokenizer.add_tokens([AddedToken("bana", normalized=True)])
    return tokenizer


@pytest.mark.parametrize("make", [_byte_level, _metaspace, _prepending])
@pytest.mark.parametrize("choice", ["Cafe\u0301", "5\u2126 \ufb01", "A b  c", "a bana b"])
def test_a_constraint_is_written_as_it_is(
    tmp_path: Path, make: Callable[[], Tokenizer], choice: str
) -> None:
    """Whatever the tokenizer does to the text of a prompt."""
    tokenizer = make()
    tokenizer.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": END}))
    known = tokenizer_of(tmp_path, tokenizer.get_vocab_size())
    matcher, written = matcher_of(known, f"start: {json.dumps(choice)}"), []
    while not matcher.is_accepting():
        mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
        [*_, token] = np.flatnonzero(np.unpackbits(mask, bitorder="little"))
        written.append(int(token))
        assert matcher.consume_token(written[-1]), matcher.get_error()
    assert tokenizer.decode(written) == choice
