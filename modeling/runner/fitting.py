"""Whether a paged model's weights fit a device, and in which form they would."""

from dataclasses import dataclass
from typing import cast

import torch
from torch import nn

from configs.architectures.base import ModelArchitecture
from modeling.models.select import build_model
from sharding.checkpoint import DummySource
from sharding.group import TensorParallel
from sharding.linear_weight import DenseWeight
from sharding.loader import Weights

META = torch.device("meta")
BLOCK = 64
"""Inputs that share a scale in 4 bits of bitsandbytes."""


@dataclass(frozen=True)
class WeightSizes:
    """A rank's share of a model's weights, as numbers.

    linear: in linear maps, which quantised models have in fewer bits. outputs: of these maps.
    others: elsewhere, in embedding, head and norms. in_blocks: whether the inputs of each map are
    whole blocks of BLOCK.
    """

    linear: int
    outputs: int
    others: int
    in_blocks: bool

    def dense_bytes(self, dtype: torch.dtype) -> int:
        """Return what they take in one type."""
        return (self.linear + self.others) * dtype.itemsize

    def fp8_bytes(self, dtype: torch.dtype) -> int:
        """Return what they take in fp8, with a float32 scale for each output."""
        return self.linear + 4 * self.outputs + self.others * dtype.itemsize

    def four_bit_bytes(self, dtype: torch.dtype) -> int:
        """Return what they take in 4 bits of bitsandbytes, with a float32 scale for each block."""
        return self.linear // 2 + 4 * self.linear // BLOCK + self.others * dtype.itemsize


def weight_sizes(model: nn.Module) -> WeightSizes:
    """Count a rank's numbers; quantised maps are none of the linear ones."""
    maps = [module for module in model.modules() if isinstance(module, DenseWeight)]
    linear = sum(each.matrix.numel() for each in maps)
    everything = sum(parameter.numel() for parameter in model.parameters())
    outputs, in_blocks = 0, True
    for each in maps:
        outputs += each.shape[0]
        in_blocks &= each.shape[1] % BLOCK == 0
    return WeightSizes(linear, outputs, everything - linear, in_blocks)


def smaller_form(sizes: WeightSizes, dtype: torch.dtype, room: int) -> str:
    """Return the forms in which the weights take at most `room` bytes; "" where there is none."""
    forms = [(sizes.fp8_bytes(dtype), "in fp8 (model.quantize: fp8)")]
    if sizes.in_blocks:
        named = "in 4 bits (model.quantize: bitsandbytes-nf4)"
        forms.append((sizes.four_bit_bytes(dtype), named))
    found = [f"{_gb(size)} {name}" for size, name in forms if size <= room]
    if not sizes.linear or not found:
        return ""
    dense = _gb(sizes.dense_bytes(dtype))
    return f"weights that take {dense} on this rank take {', or '.join(found)}"


def too_large(
    architecture: ModelArchitecture,
    group: TensorParallel,
    dtype: torch.dtype,
    free: int,
    quantised: bool = False,
) -> ValueError:
    """Return the error of weights that did not fit into `free` bytes while they were read.

    quantised: whether they would have been kept in a smaller form.
    """
    # Built without values, which takes no memory.
    weights = Weights(DummySource(META, dtype), group, dtype, META)
    sizes = weight_sizes(cast(nn.Module, build_model(architecture, weights)))
    smaller = "" if quantised else smaller_form(sizes, dtype, free)
    return ValueError(
        f"the model does not fit: {_gb(free)} were free on this rank. Use more ranks "
        f"(tensor_parallel)" + (f", or another form: {smaller}" if smaller else "")
    )


def _gb(size: int) -> str:
    return f"{size / 1e9:.1f} GB"
