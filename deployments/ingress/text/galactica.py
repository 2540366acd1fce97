"""Galactica's prompts: inside DNA, SMILES and amino-acid sequences each character is a token.

The model is an OPT. Its tokenizer cuts a text at a certain marker, and drops the marker. The
markers must be put into a text before it is encoded.
"""

import re
from bisect import bisect_left

from tokenizers import Tokenizer

MARKER = "SPL1T-TH1S-Pl3A5E"
"""The tokenizer cuts here: it is the pattern of its pre-tokenizer."""

ENDS = frozenset({"<s>", "<pad>", "</s>", "<unk>"})
"""Special tokens that are not text; the others ([START_REF], <work>, ...) belong to an answer."""

_TAG = re.compile(r"\[(START|END)_(DNA|SMILES|I_SMILES|AMINO)\]|\n")


def cuts_sequences(tokenizer: Tokenizer) -> bool:
    """Whether this tokenizer cuts at the marker."""
    pre_tokenizer = tokenizer.pre_tokenizer
    return pre_tokenizer is not None and MARKER.encode() in pre_tokenizer.__getstate__()


def mark(text: str) -> str:
    """Put a marker before each character of a sequence and before its end."""
    pieces, at = [], 0
    for start, end in _sequences(text):
        if start.start() < at:
            continue  # within another sequence
        inner = [start[0], *text[start.end() : end.start()], end[0]]
        pieces += [text[at : start.start()], MARKER.join(inner)]
        at = end.end()
    return "".join([*pieces, text[at:]])


def _sequences(text: str) -> list[tuple[re.Match[str], re.Match[str]]]:
    """Each start that has an end of its kind on its line, and the first such end.

    It reads backwards: forwards, each start without an end would be a search to the text's end.
    """
    found = []
    ends: dict[str, re.Match[str]] = {}
    for tag in reversed(list(_TAG.finditer(text))):
        side, kind = tag.groups()
        if side is None:
            ends.clear()
        elif side == "END":
            ends[kind] = tag
        elif kind in ends:
            found.append((tag, ends[kind]))
    return found[::-1]


class MarkedOffsets:
    """Converts offsets in a marked text to offsets in the unmarked one."""

    def __init__(self, marked: str) -> None:
        self._starts = [found.start() for found in re.finditer(re.escape(MARKER), marked)]

    def offset(self, at: int) -> int:
        """The offset without the markers that begin before it."""
        return at - len(MARKER) * bisect_left(self._starts, at)
