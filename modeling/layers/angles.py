"""The angles by which heads are rotated."""

from typing import NamedTuple

from torch import Tensor


class Angles(NamedTuple):
    """Cosines and sines of a step's positions, [tokens, 1, rotated width] each.

    Each pair's numbers stand twice, in both halves; in the first half sines are negated.
    neighbours: whether the pairs of a head's numbers are (2i, 2i + 1), else (i, i + width / 2).
    """

    cos: Tensor
    sin: Tensor
    neighbours: bool = False
