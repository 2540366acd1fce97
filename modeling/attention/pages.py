"""Page tables as kernels want them: ragged indices, and where each row's run of them starts."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import takewhile

import numpy as np
import numpy.typing as npt

from modeling.attention.base import Words


@dataclass(frozen=True)
class RowPages:
    """The pages of n rows, int32.

    indptr: [n + 1], where each row's pages start in the ragged list. last: [n], keys in each
    row's last page, 1 .. page_size.
    """

    indptr: Words
    last: Words

    @classmethod
    def of(cls, key_lengths: npt.ArrayLike, page_size: int) -> "RowPages":
        """Rows of that many keys; none is empty."""
        lengths = np.asarray(key_lengths, dtype=np.int32)
        indptr = np.zeros(len(lengths) + 1, dtype=np.int32)
        np.cumsum(-(-lengths // page_size), out=indptr[1:])
        return cls(indptr, (lengths - 1) % page_size + 1)

    @property
    def total(self) -> int:
        """Pages of all rows."""
        return int(self.indptr[-1])

    def within(self, width: int) -> npt.NDArray[np.bool_]:
        """Which entries of tables [n, width] are rows' pages; read row by row, the ragged list."""
        counts = self.indptr[1:] - self.indptr[:-1]
        found: npt.NDArray[np.bool_] = np.arange(width) < counts[:, None]
        return found


def leading_decodes(query_lengths: Sequence[int]) -> int:
    """How many rows of one token come before the first longer one."""
    return sum(1 for _ in takewhile(lambda length: length == 1, query_lengths))


def starts(lengths: Sequence[int]) -> Words:
    """int32 [n + 1]: where each row starts when they are packed, and the total."""
    found = np.zeros(len(lengths) + 1, dtype=np.int32)
    np.cumsum(np.asarray(lengths, dtype=np.int32), out=found[1:])
    return found
