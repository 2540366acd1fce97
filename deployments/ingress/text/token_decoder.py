"""Decodes tokens one by one, with the steps of the tokenizer's own decoder.

A decoder is a chain of steps over the list of all tokens. Most steps need only one token, and
whether it is the first one; the `tokenizers` library runs these, on a few tokens at a time. One
step joins bytes to characters (`ByteLevel`, `ByteFallback`) over any number of tokens; this module
runs it, so that no token is decoded again when later tokens arrive.
"""

import json
import re
from collections.abc import Sequence

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

from deployments.ingress.text.steps import Step, steps_of

_ANCHOR = "a"
"""Represents all earlier text; no step changes it."""

_BYTE_STEPS = frozenset({"ByteLevel", "ByteFallback"})
_ONE_BY_ONE = frozenset({"Replace", "Strip"})
"""Steps that work on each string by itself, as long as no step has fused the strings."""
_ONLY_AT_THE_START = frozenset({"Fuse", "Strip"})
_BEFORE_BYTES = frozenset({"Replace", "Strip", "Metaspace"})
_AFTER_BYTES = frozenset({"Fuse", "Strip", "Replace", "Metaspace"})
_WITHOUT_BYTES = _AFTER_BYTES | {"BPEDecoder", "CTC", "WordPiece"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class IncrementalDecoder:
    """Decodes strings that arrive one by one; returns the new text of each."""

    def __init__(
        self, decoder: Decoder | None, begun: bool = False, only_start: bool = False
    ) -> None:
        """decoder: None joins the strings by spaces, like the library.

        begun: there is text before the first string.
        only_start: the decoder changes nothing but the start of a text.
        """
        self._decoder = decoder
        self._only_start = only_start
        self._context = [_ANCHOR] if begun else []
        self._length = len(_ANCHOR) if begun else 0

    def add(self, text: str) -> str:
        """Add a string and return its new text."""
        if self._only_start and self._length:
            return text
        new = self._decode([*self._context, text])[self._length :]
        # One string of context is enough: no step looks further back than the string before.
        if new or self._length:
            self._context = [_ANCHOR, text]
            self._length = len(self._decode(self._context))
        elif text or not self._context:  # No text yet: the next string may be the first one.
            self._context.append(text)
        return new

    def _decode(self, strings: list[str]) -> str:
        if self._decoder is None:
            return " ".join(strings)
        return str(self._decoder.decode(strings))


class TokenDecoder:
    """Decodes single tokens of one tokenizer to characters or bytes, and caches them.

    replaces_each_byte: each invalid byte becomes one U+FFFD, instead of each run of them.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        """ValueError for a decoder that may change earlier text when later tokens come."""
        steps = steps_of(tokenizer.decoder, "decoders")
        at = next((i for i, step in enumerate(steps) if step["type"] in _BYTE_STEPS), len(steps))
        before, after = steps[:at], steps[at + 1 :]
        self._byte_step = steps[at]["type"] if at < len(steps) else ""
        self.replaces_each_byte = self._byte_step == "ByteFallback"
        _check(before, self._byte_step, after)
        self._tokenizer = tokenizer
        self._one_by_one = bool(steps) and _types(before) <= _ONE_BY_ONE
        self._before = _decoder(before)
        self._after = _decoder(after) if _types(after) - {"Fuse"} else None
        self._only_start = _types(after) <= _ONLY_AT_THE_START
        self._table = _byte_table() if self._byte_step == "ByteLevel" else {}
        self._cache: dict[int, str | bytes | None] = {}

    def before_bytes(self) -> IncrementalDecoder | None:
        """The steps before the byte step, for a new text; None if they work on single tokens."""
        return None if self._one_by_one else IncrementalDecoder(self._before)

    def after_bytes(self) -> IncrementalDecoder | None:
        """The steps after the byte step, for a new text; None if there are none."""
        if self._after is None:
            return None
        return IncrementalDecoder(self._after, only_start=self._only_start)

    def token(self, id: int) -> str | None:
        """The token's string in the vocabulary; None for an unknown id."""
        return self._tokenizer.id_to_token(id)

    def alone(self, id: int) -> str | bytes | None:
        """The characters or bytes of one token in the middle of a text; None for an unknown id."""
        if id not in self._cache:
            token = self.token(id)
            self._cache[id] = None if token is None else self._decode(token)
        return self._cache[id]

    def bytes_step(self, text: str) -> str | bytes:
        """Run the byte step on one string."""
        if self._byte_step == "ByteLevel":
            values = [self._table.get(char, -1) for char in text]
            return text.encode() if -1 in values else bytes(values)
        found = _BYTE.fullmatch(text) if self._byte_step == "ByteFallback" else None
        return text if found is None else bytes.fromhex(found[1])

    def _decode(self, token: str) -> str | bytes:
        if not self._one_by_one:
            return self.bytes_step(IncrementalDecoder(self._before, begun=True).add(token))
        return self.bytes_step(token if self._before is None else str(self._before.decode([token])))


def _types(steps: Sequence[Step]) -> set[str]:
    return {step["type"] for step in steps}


def _check(before: Sequence[Step], byte_step: str, after: Sequence[Step]) -> None:
    """Raise ValueError for steps that may change text that was sent already."""
    unknown = _types(before) - (_BEFORE_BYTES if byte_step else _WITHOUT_BYTES)
    unknown |= _types(after) - _AFTER_BYTES
    if unknown:
        raise ValueError(f"a decoder with {sorted(unknown)} at this position is not served")
    fused = byte_step == "ByteLevel"
    for step in [*before, *after]:
        fused = fused or step["type"] == "Fuse"
        in_runs = fused or step in after
        if step["type"] == "Strip" and in_runs and (step["stop"] or not fused):
            raise ValueError("a decoder that strips the end of a text is not served")
        pattern = step.get("pattern", {}).get("String", "")
        if step["type"] == "Replace" and in_runs and len(pattern) != 1:
            raise ValueError("a decoder that replaces in the whole text is not served")


def _decoder(steps: Sequence[Step]) -> Decoder | None:
    """The library's decoder with these steps; None if there are none."""
    if not steps:
        return None
    empty = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    chain = {"type": "Sequence", "decoders": list(steps)}
    described = {"version": "1.0", "added_tokens": [], "decoder": chain, "model": empty}
    decoder: Decoder = Tokenizer.from_str(json.dumps(described)).decoder
    return decoder


def _byte_table() -> dict[str, int]:
    """GPT-2's characters for bytes: printable bytes as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}
