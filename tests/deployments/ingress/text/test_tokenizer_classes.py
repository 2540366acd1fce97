"""Every tokenizer class that transformers builds here, beside AutoTokenizer itself.

All of it, also as a table of what is served: `python -m pytest tests/deployments/ingress/
test_tokenizer_classes.py -rs`.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)
from transformers.tokenization_utils_tokenizers import TokenizersBackend

from deployments.ingress.text import conversion
from deployments.ingress.text.tokenizer import ModelTokenizer
from tests.deployments.ingress.text.tokenizer_kinds import KINDS, TEXTS

PROBES = [
    *TEXTS,
    "",
    " ",
    "the fox",
    " the fox </s> jumps<s>over <|im_end|> now",
    "a\u0301e\u0308 \U0001f984\U0001f41d zoo \u2581x",
    "it 's , well . done ?",
    "word<think> more <mine>x <mine> y",
]

# These need other files than a vocabulary, or bounding boxes.
NOT_TEXT = {
    "LayoutLMv2Tokenizer", "LayoutLMv3Tokenizer", "LayoutXLMTokenizer", "MarkupLMTokenizer",
    "UdopTokenizer", "LukeTokenizer", "MLukeTokenizer", "CpmTokenizerFast",
}  # fmt: skip
# Pegasus reads its vocabulary's scores; RoFormer splits words with a library that is not installed.
NOT_BUILT = {"PegasusTokenizer", "RoFormerTokenizer"}
_BY_DEFAULT = [
    "[UNK]", "[CLS]", "[SEP]", "[PAD]", "[MASK]", "<pad>", "<mask>", "<unk>NOTUSED",
    "<|endoftext|>",
]  # fmt: skip
"""Special tokens that classes take for granted."""


def _classes() -> list[str]:
    """The names of all fast classes, each once."""
    found = {}
    for name in sorted(filter(None, TOKENIZER_MAPPING_NAMES.values())):
        kind = tokenizer_class_from_name(name)
        if isinstance(kind, type) and issubclass(kind, TokenizersBackend):
            found[kind.__name__] = kind
    return sorted(found)


def _class(name: str) -> Any:
    kind = tokenizer_class_from_name(name)
    assert kind is not None
    return kind


def _vocabulary(model: str) -> dict[str, Any]:
    """Constructor arguments of a class over this kind of model."""
    kind = {"Unigram": "unigram", "WordPiece": "word-piece"}.get(model, model)
    described = json.loads(KINDS[kind]().to_str())["model"]
    vocab = described["vocab"]
    if model == "Unigram":
        known = {token for token, _ in vocab}
        missing = [(word, 0.0) for word in _BY_DEFAULT if word not in known]
        return {"vocab": [tuple(entry) for entry in vocab] + missing}
    for word in _BY_DEFAULT:
        vocab.setdefault(word, len(vocab))
    if model == "WordPiece":
        return {"vocab": vocab}
    return {"vocab": vocab, "merges": [tuple(merge) for merge in described["merges"]]}


def _built(name: str) -> Any:
    """A tiny tokenizer of this class."""
    kind = _class(name)
    if kind.__name__ == "TokenizersBackend":
        return kind(tokenizer_object=KINDS["mistral"](), eos_token="</s>", bos_token="<s>")
    if kind.model is None or kind.model.__name__ == "Unigram":
        return kind(**_vocabulary("Unigram"))
    if kind.model.__name__ == "WordPiece":
        return kind(**_vocabulary("WordPiece"))
    tokenizer = kind(**_vocabulary("llama"))
    if '"ByteLevel"' in tokenizer.backend_tokenizer.to_str():
        return kind(**_vocabulary("byte-level"))
    return tokenizer


def assert_alike(folder: Path, converted: conversion.Converted) -> None:
    """Encode with special tokens and without, decode, and decode token by token."""
    theirs: Any = AutoTokenizer.from_pretrained(folder)
    ours = ModelTokenizer(converted.tokenizer(), cleans_up=converted.cleans_up)
    for probe in PROBES:
        for special in (True, False):
            ids = theirs(probe, add_special_tokens=special).input_ids
            assert asyncio.run(ours.encode(probe, special)) == ids, probe
            expected = theirs.decode(ids, skip_special_tokens=True)
            assert ours.decode(ids) == expected, probe
            stream = ours.stream()
            pieces = [stream.push([id]) for id in ids]
            assert "".join(pieces) + stream.flush() == expected, probe
    assert converted.special_tokens == theirs.special_tokens_map
    ours.close()


@pytest.mark.parametrize("name", _classes())
def test_each_class_is_alike_or_refused_by_name(name: str, tmp_path: Path) -> None:
    if name in NOT_TEXT | NOT_BUILT:
        pytest.skip(f"{name} is not for plain text, or cannot be built here")
    tokenizer = _built(name)
    tokenizer.add_tokens(["<think>"])
    tokenizer.save_pretrained(tmp_path)
    converted = conversion.converted(str(tmp_path), trust_remote_code=False)
    if converted.refusal:
        assert name in converted.refusal
        pytest.skip(converted.refusal)
    assert_alike(tmp_path, converted)
