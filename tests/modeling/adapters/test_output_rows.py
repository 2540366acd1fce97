"""What adapters do to outputs beside B A x."""

from dataclasses import replace
from typing import Any

import torch

from modeling.adapters.output_rows import added_bias
from modeling.adapters.projection import BaseLinear, ModulePosition
from modeling.adapters.stacks import LoraStack
from tests.modeling.adapters.lora_files import UP


def test_biases_of_some_layers_alone() -> None:
    """DoRA leaves a layer's own bias as it is; another layer of the same map has none."""
    projection = replace(UP, has_bias=True)
    size = projection.local_outputs
    bias, scales = torch.arange(1.0, size + 1), torch.full((2, size), 0.5)
    weight: Any = torch.zeros(size, projection.local_inputs)
    base = {
        ModulePosition(0, 0): BaseLinear(weight, None),
        ModulePosition(0, 1): BaseLinear(weight, bias),
    }
    factors = torch.zeros(2, 1, 1)
    stack = LoraStack(0, (0, 1), factors, factors)
    found = added_bias(stack, projection, base, scales)
    assert torch.equal(found[0], torch.zeros(size))
    assert torch.equal(found[1], -0.5 * bias)
