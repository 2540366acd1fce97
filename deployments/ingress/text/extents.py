"""A bound on the characters of a text by its number of tokens; longer texts are not encoded."""

from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel

from deployments.ingress.text.steps import Step, steps_of

_FEW_CHARACTERS = 65_536
_ASSUMED = 16
"""Characters a token; more than in real texts, of which most have four."""

# How many characters each normalizer may make one of. NFC composes four at most.
_NORMALIZERS = {
    "NFD": 1, "NFKD": 1, "NFC": 4, "NFKC": 4, "Lowercase": 1, "Prepend": 1, "ByteLevel": 1,
}  # fmt: skip
_PRE_TOKENIZERS = frozenset({"ByteLevel", "Metaspace", "Digits", "UnicodeScripts", "FixedLength"})
_CUTTERS = frozenset({"Split", "Punctuation"})


class Extents:
    """The bound of one tokenizer; reads its whole vocabulary once.

    longest: characters of the longest token.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.longest = max(map(len, tokenizer.get_vocab()), default=1)
        shrinks = _most_shrunk(tokenizer)
        self._is_proven = shrinks is not None
        self._per_token = self.longest * shrinks if shrinks else max(self.longest, _ASSUMED)

    def most_characters(self, tokens: int) -> int:
        """The longest text that may be encoded if it must have at most `tokens` (>= 1) tokens.

        No longer text has so few tokens, except where one token may be any number of characters
        (dropped spaces, unknown words). There it is 16 characters a token, but at least 65,536.
        """
        most = self._per_token * tokens
        return most if self._is_proven else max(most, _FEW_CHARACTERS)


def _most_shrunk(tokenizer: Tokenizer) -> int | None:
    """How many characters of a text may become one character of a token; None: any number."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added) or not _covers_all(tokenizer):
        return None
    if not all(_keeps(step) for step in steps_of(tokenizer.pre_tokenizer, "pretokenizers")):
        return None
    shrinks = 1
    for step in steps_of(tokenizer.normalizer, "normalizers"):
        factor = _shrunk(step)
        if factor is None:
            return None
        shrinks *= factor
    return shrinks


def _covers_all(tokenizer: Tokenizer) -> bool:
    """Whether every character is in a token: none is dropped or joined to an unknown word."""
    model = tokenizer.model
    if not isinstance(model, BPE):
        return False
    if model.unk_token is not None and not model.fuse_unk:
        return True
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    if model.byte_fallback:
        return all(f"<0x{byte:02X}>" in vocabulary for byte in range(256))
    steps = [
        *steps_of(tokenizer.normalizer, "normalizers"),
        *steps_of(tokenizer.pre_tokenizer, "pretokenizers"),
    ]
    as_bytes = any(step["type"] == "ByteLevel" for step in steps)
    return as_bytes and all(char in vocabulary for char in ByteLevel.alphabet())


def _keeps(step: Step) -> bool:
    """Whether a pre-tokenizer drops no character."""
    if step["type"] in _CUTTERS:
        return bool(step["behavior"] != "Removed")
    return step["type"] in _PRE_TOKENIZERS


def _shrunk(step: Step) -> int | None:
    """How many characters a normalizer may replace by one; None: any number."""
    if step["type"] != "Replace":
        return _NORMALIZERS.get(step["type"])
    pattern, content = step["pattern"].get("String"), step["content"]
    if not pattern or not content:
        return None
    return -(-len(pattern) // len(content))
