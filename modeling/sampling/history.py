"""TokenHistory: the sampling rows' tokens on the device; the host may not have the newest yet."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from modeling.sampling.grammars import Grammars

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenHistory:
    """The tokens of a step's n sampling rows: each row's are contiguous, the prompt first.

    buffer: int64, flat, on the device. It is read on the stream, after the step that writes the
    newest tokens, so the host does not wait for their values.
    targets: [n], the index in the buffer of each row's next token.
    prompt_lengths: [n].
    batch_slots: [n], the rows' keys in `grammars`.
    grammars: None where no row has a grammar.
    """

    buffer: Tensor
    targets: Ints
    prompt_lengths: Ints
    batch_slots: Ints
    grammars: Grammars | None = None

    def generated(self, positions: Sequence[int]) -> Ints:
        """Return how many tokens each row has generated, from the positions of the next ones."""
        return np.array(positions, dtype=np.int64) - self.prompt_lengths
