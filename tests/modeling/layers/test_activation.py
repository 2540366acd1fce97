"""Activations by name against transformers' table."""

import pytest
import torch
from transformers.activations import ACT2FN

from configs.architectures.base import Activation
from modeling.layers.activation import ACTIVATIONS


@pytest.mark.parametrize("name", Activation)
def test_equals_transformers(name: Activation) -> None:
    x = torch.linspace(-4, 4, 33)
    torch.testing.assert_close(ACTIVATIONS[name](x), ACT2FN[name.value](x))
