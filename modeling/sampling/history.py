"""The sampling rows' own tokens: where they lie on the device, the newest perhaps only there."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from torch import Tensor

from modeling.sampling.grammars import Grammars

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True)
class TokenHistory:
    """Where the tokens of a step's n sampling rows lie, each row's in one piece, prompt first.

    buffer: int64, flat, on the device. targets: [n], where in it each row's next token goes.
    prompt_lengths: [n]. batch_slots: [n], by which `grammars` knows the rows. The buffer is read
    behind the step that writes the newest tokens: nobody waits for their values.
    """

    buffer: Tensor
    targets: Ints
    prompt_lengths: Ints
    batch_slots: Ints
    grammars: Grammars | None = None

    def generated(self, positions: Sequence[int]) -> Ints:
        """How many tokens each row has generated, given the positions of the next ones."""
        return np.array(positions, dtype=np.int64) - self.prompt_lengths
