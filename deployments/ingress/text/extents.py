"""How many characters so many tokens can stand for: a longer text cannot fit, and is not read."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

_FEW_CHARACTERS = 65_536
_A_TOKEN = 16
"""More than texts have, of which most have four."""

# A character that is written as several (NFD) becomes one again: four at most.
_NORMALIZERS = {
    "NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1,
}  # fmt: skip
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_CUTTERS = frozenset({"Split", "Punctuation"})

Step = Mapping[str, Any]


class Extents:
    """One tokenizer's bound on the characters of a text by its tokens."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Measure the vocabulary, once."""
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        """Characters of the longest token."""
        shrinks = _most_shrunk(tokenizer)
        self._is_proven = shrinks is not None
        self._a_token = self.longest * shrinks if shrinks else max(self.longest, _A_TOKEN)

    def most_characters(self, tokens: int) -> int:
        """The longest text that is read where at most `tokens` (>= 1) may come of it.

        No longer text has so few tokens, unless one token may stand for any length (spaces that
        are dropped, unknown words): then 16 characters a token, and 65,536 in any case, are read.
        """
        most = self._a_token * tokens
        return most if self._is_proven else max(most, _FEW_CHARACTERS)


def _most_shrunk(tokenizer: Tokenizer) -> int | None:
    """How many of a text's characters may become one of a token; None: any number."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not _knows_all(tokenizer):
        return None
    if not all(_keeps(step) for step in _steps(tokenizer.pre_tokenizer, "pretokenizers")):
        return None
    shrinks = 1
    for step in _steps(tokenizer.normalizer, "normalizers"):
        factor = _shrunk(step)
        if factor is None:
            return None
        shrinks *= factor
    return shrinks


def _knows_all(tokenizer: Tokenizer) -> bool:
    """Whether each character is in some token: none is dropped, none joins an unknown word."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = [
        *_steps(tokenizer.normalizer, "normalizers"),
        *_steps(tokenizer.pre_tokenizer, "pretokenizers"),
    ]
    spells_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return spells_bytes and all(char in vocabulary for char in ByteLevel.alphabet())


def _keeps(step: Step) -> bool:
    """Whether a pre-tokenizer leaves all characters in."""
    if step["type"] in _CUTTERS:
        return bool(step["behavior"] != "Removed")
    return step["type"] in _PRE_TOKENIZERS


def _shrunk(step: Step) -> int | None:
    """How many characters a normalizer may make one of; None: any number."""
    if step["type"] != "Replace":
        return _NORMALIZERS.get(step["type"])
    pattern, content = step["pattern"].get("String"), step["content"]
    if not pattern or not content:
        return None
    return -(-len(pattern) // len(content))


def _steps(part: Any, name: str) -> Iterator[Step]:
    """The steps of a normalizer or a pre-tokenizer, those of sequences one by one."""
    if part is not None:
        yield from _flat(json.loads(part.__getstate__()), name)


def _flat(step: Step, name: str) -> Iterator[Step]:
    if step["type"] != "Sequence":
        yield step
    else:
        for inner in step[name]:
            yield from _flat(inner, name)
