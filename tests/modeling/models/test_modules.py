"""Our linear layers in the place of transformers'."""

from typing import Any

import torch
from torch import Tensor, nn

from modeling.models.generic.modules import GenericLinear
from modeling.models.generic.step import CurrentStep


class Seen(nn.Module):
    """Keeps what it was given; kernels read rows of neighbours."""

    def forward(self, x: Tensor, _adapters: Any) -> Tensor:
        assert x.stride(1) == 1, x.stride()
        return 2 * x


def test_inputs_that_a_mixer_has_transposed() -> None:
    linear: Any = Seen()
    module = GenericLinear(linear, CurrentStep())
    x = torch.randn(1, 6, 4).transpose(1, 2)
    assert torch.equal(module(x), 2 * x)
