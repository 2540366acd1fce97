"""Galactica's prompts: inside DNA, SMILES and amino-acid sequences each character is a token.

The model is an OPT with a tokenizer of its own, which cuts a text wherever it meets a certain
marker, and drops the marker. Whoever asks for tokens has to put the markers in.
"""

import re
from bisect import bisect_left

from tokenizers import Tokenizer

MARKER = "SPL1T-TH1S-Pl3A5E"
"""What the tokenizer cuts at: the pattern of its pre-tokenizer."""

ENDS = frozenset({"<s>", "<pad>", "</s>", "<unk>"})
"""Special tokens without a text; the others ([START_REF], <work>, ...) are part of an answer."""

_TAG = re.compile(r"\[(START|END)_(DNA|SMILES|I_SMILES|AMINO)\]|\n")


def cuts_sequences(tokenizer: Tokenizer) -> bool:
    """Whether a tokenizer is of this kind: it looks for the marker."""
    cutter = tokenizer.pre_tokenizer
    return cutter is not None and MARKER.encode() in cutter.__getstate__()


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

    Read from the back, so that starts without an end do not each look for one to the text's end.
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
    """Offsets in a marked text as offsets in the text before."""

    def __init__(self, marked: str) -> None:
        """Look for the markers."""
        self._starts = [found.start() for found in re.finditer(re.escape(MARKER), marked)]

    def offset(self, at: int) -> int:
        """The offset without the markers that begin before it."""
        return at - len(MARKER) * bisect_left(self._starts, at)
