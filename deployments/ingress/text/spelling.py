"""What each token of a growing text adds to it, by the tokenizer's own decoder.

A decoder is a chain of steps over the list of all tokens. Most steps look at one token and at
whether it is the first; those are left to the `tokenizers` library, which sees a few tokens at a
time. One step joins bytes to characters (`ByteLevel`, `ByteFallback`), over any number of tokens;
that one is done here, so that no token is decoded again for those that follow.
"""

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any

from tokenizers import Tokenizer
from tokenizers.decoders import Decoder

_ANCHOR = "a"
"""Stands for all text before: no step changes it."""

_BYTE_STEPS = frozenset({"ByteLevel", "ByteFallback"})
_ONE_BY_ONE = frozenset({"Replace", "Strip"})
"""Steps that look at each string alone, as long as nothing has fused them."""
_ONLY_AT_THE_START = frozenset({"Fuse", "Strip"})
_BEFORE_BYTES = frozenset({"Replace", "Strip", "Metaspace"})
_AFTER_BYTES = frozenset({"Fuse", "Strip", "Replace", "Metaspace"})
_WITHOUT_BYTES = _AFTER_BYTES | {"BPEDecoder", "CTC", "WordPiece"}
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")

Step = Mapping[str, Any]


class Growing:
    """A decoder over strings that come one by one: what each adds to the text of those before."""

    def __init__(self, decoder: Decoder | None, begun: bool = False, settles: bool = False) -> None:
        """Without a decoder strings are joined by spaces, as the library does.

        begun: there is text before the first. settles: only the beginning of a text is changed.
        """
        self._decoder = decoder
        self._settles = settles
        self._context = [_ANCHOR] if begun else []
        self._length = len(_ANCHOR) if begun else 0

    def add(self, text: str) -> str:
        """The text that is new with this string."""
        if self._settles and self._length:
            return text
        new = self._decode([*self._context, text])[self._length :]
        if new or self._length:
            self._context = [_ANCHOR, text]
            self._length = len(self._decode(self._context))
        elif text or not self._context:  # Nothing is out yet: the next one may still be the first.
            self._context.append(text)
        return new

    def _decode(self, strings: list[str]) -> str:
        if self._decoder is None:
            return " ".join(strings)
        return str(self._decoder.decode(strings))


class Spelling:
    """One tokenizer's tokens as characters or bytes, each looked up once."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        """ValueError for a decoder that may change earlier text when later tokens come."""
        steps = _steps(tokenizer.decoder)
        at = next((i for i, step in enumerate(steps) if step["type"] in _BYTE_STEPS), len(steps))
        before, after = steps[:at], steps[at + 1 :]
        self._byte_step = steps[at]["type"] if at < len(steps) else ""
        _check(before, self._byte_step, after)
        self._tokenizer = tokenizer
        self._one_by_one = bool(steps) and _types(before) <= _ONE_BY_ONE
        self._before = _decoder(before)
        self._after = _decoder(after) if _types(after) - {"Fuse"} else None
        self._settles = _types(after) <= _ONLY_AT_THE_START
        self._table = _byte_table() if self._byte_step == "ByteLevel" else {}
        self._known: dict[int, str | bytes | None] = {}

    @property
    def replaces_each_byte(self) -> bool:
        """Whether each byte that belongs to no character is a U+FFFD, not each run of them."""
        return self._byte_step == "ByteFallback"

    def before_bytes(self) -> Growing | None:
        """A new text's state of what comes before the bytes; None where no place matters."""
        return None if self._one_by_one else Growing(self._before)

    def after_bytes(self) -> Growing | None:
        """A new text's state of what comes after them; None where that is nothing."""
        return None if self._after is None else Growing(self._after, settles=self._settles)

    def token(self, id: int) -> str | None:
        """A token as the vocabulary writes it; None for an id that it does not have."""
        return self._tokenizer.id_to_token(id)

    def alone(self, id: int) -> str | bytes | None:
        """What a token within a text stands for: characters, or bytes where it has such."""
        if id not in self._known:
            token = self.token(id)
            self._known[id] = None if token is None else self._spell(token)
        return self._known[id]

    def parts(self, text: str) -> str | bytes:
        """What the step of bytes makes of one string."""
        if self._byte_step == "ByteLevel":
            spelled = [self._table.get(char, -1) for char in text]
            return text.encode() if -1 in spelled else bytes(spelled)
        found = _BYTE.fullmatch(text) if self._byte_step == "ByteFallback" else None
        return text if found is None else bytes.fromhex(found[1])

    def _spell(self, token: str) -> str | bytes:
        if not self._one_by_one:
            return self.parts(Growing(self._before, begun=True).add(token))
        return self.parts(token if self._before is None else str(self._before.decode([token])))


def _steps(decoder: Decoder | None) -> list[Step]:
    """The steps of a decoder, those of chains within it in their place."""
    if decoder is None:
        return []
    return _flat(json.loads(decoder.__getstate__()))


def _flat(step: Step) -> list[Step]:
    if step["type"] != "Sequence":
        return [step]
    return [inner for part in step["decoders"] for inner in _flat(part)]


def _types(steps: Sequence[Step]) -> set[str]:
    return {step["type"] for step in steps}


def _check(before: Sequence[Step], byte_step: str, after: Sequence[Step]) -> None:
    """Refuse what could not be streamed: text that is out must not change any more."""
    unknown = _types(before) - (_BEFORE_BYTES if byte_step else _WITHOUT_BYTES)
    unknown |= _types(after) - _AFTER_BYTES
    if unknown:
        raise ValueError(f"a decoder with {sorted(unknown)} in this place is not served")
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
    """The library's decoder of these steps, None for none."""
    if not steps:
        return None
    empty = {"type": "WordLevel", "vocab": {}, "unk_token": ""}
    chain = {"type": "Sequence", "decoders": list(steps)}
    described = {"version": "1.0", "added_tokens": [], "decoder": chain, "model": empty}
    decoder: Decoder = Tokenizer.from_str(json.dumps(described)).decoder
    return decoder


def _byte_table() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable ones as themselves, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in set(printable)]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + place): byte for place, byte in enumerate(others)}
