"""Checkpoints in integers of 4 or 8 bits, written by the published rules of GPTQ's and AWQ's files.

Of modules as they are, whether linear layers or single experts. tests/modeling/quantisation/
test_packed.py compares the same readers with files that the package gptqmodel wrote.
"""

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

QUANTISED = re.compile(r"\.(?:w[123]|\w+_proj)\.weight$")
"""Names of the maps that are quantised, experts' and others."""

_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""The outputs of a word of AWQ, the lowest bits first."""

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Integers:
    """A matrix [out, in] as (code - zero) * scale.

    codes: [out, in]. zeros: [out, groups]. scales: float16 of that shape. group_of: [in]. bits: of
    a code.
    """

    codes: Tensor
    zeros: Tensor
    scales: Tensor
    group_of: Tensor
    bits: int = 4

    @property
    def numbers(self) -> Tensor:
        """What they stand for, in float32."""
        values = self.codes - self.zeros[:, self.group_of]
        return values.float() * self.scales.float()[:, self.group_of]


def rounded(
    matrix: Tensor, group: int, symmetric: bool, order: Tensor | None = None, bits: int = 4
) -> Integers:
    """Round a matrix; group: inputs that share a scale, -1: all. order: [in], of the groups."""
    middle, last = 2 ** (bits - 1), 2**bits - 1
    inputs = matrix.shape[1]
    group = inputs if group < 0 else group
    place = torch.arange(inputs) if order is None else torch.argsort(order)
    group_of = place // group
    parts = [matrix[:, group_of == each] for each in range(-(-inputs // group))]
    low = torch.stack([part.amin(1) for part in parts], 1).clamp(max=0)
    high = torch.stack([part.amax(1) for part in parts], 1).clamp(min=0)
    if symmetric:
        scales = torch.maximum(-low, high).div(middle - 1).half()
        zeros = torch.full_like(scales, middle).int()
    else:
        scales = (high - low).div(last).half()
        zeros = (-low / scales.float()).round().clamp(1, last).int()
    whole = scales.float()[:, group_of], zeros[:, group_of]
    codes = ((matrix / whole[0]).round() + whole[1]).clamp(0, last).int()
    return Integers(codes, zeros, scales, group_of, bits)


def words(codes: Tensor, bits: int = 4) -> Tensor:
    """Put 32 bits of codes of a row into an int32, the first one low."""
    parts = codes.long().view(len(codes), -1, 32 // bits) << torch.arange(0, 32, bits)
    # As a signed number of 32 bits.
    return (parts.sum(-1) + 2**31).remainder(2**32).sub(2**31).int().contiguous()


def gptq(made: Integers) -> Tensors:
    """The tensors of a module in GPTQ's files."""
    return {
        "qweight": words(made.codes, made.bits).t().contiguous(),
        "qzeros": words((made.zeros.t() - 1).contiguous(), made.bits),
        "scales": made.scales.t().contiguous(),
        "g_idx": made.group_of.int(),
        "bias": torch.zeros(len(made.codes), dtype=torch.float16),
    }


def awq(made: Integers) -> Tensors:
    """The tensors of a module in AWQ's files."""

    def ordered(codes: Tensor) -> Tensor:
        return words(codes.reshape(len(codes), -1, 8)[..., list(_AWQ_ORDER)].flatten(1))

    return {
        "qweight": ordered(made.codes.t()),
        "qzeros": ordered(made.zeros.t()),
        "scales": made.scales.t().contiguous(),
    }


def write_quantised(
    folder: Path,
    dense: Path,
    tensors_of: Callable[[str, Tensor], tuple[Tensors, Tensor]],
    settings: Mapping[str, Any],
    left: re.Pattern[str] = re.compile("(?!)"),
) -> Path:
    """Write a checkpoint whose linear maps and experts are quantised; returns that of the numbers.

    tensors_of: from a module's path and matrix to its tensors and the numbers that they stand for.
    left: names of matrices that stay as they are.
    """
    stored = load_file(dense / "model.safetensors")
    numbers = dict(stored)
    for name in [name for name in stored if QUANTISED.search(name) and not left.search(name)]:
        path = name.removesuffix(".weight")
        made, numbers[name] = tensors_of(path, stored.pop(name))
        stored |= {f"{path}.{key}": tensor for key, tensor in made.items()}
    own = json.loads((dense / "config.json").read_text())
    beside = folder.with_name(f"{folder.name}-numbers")
    for to, tensors, fields in (
        (folder, stored, own | {"quantization_config": dict(settings)}),
        (beside, numbers, own),
    ):
        to.mkdir(parents=True)
        save_file(tensors, to / "model.safetensors", {"format": "pt"})
        (to / "config.json").write_text(json.dumps(fields))
    return beside


def write_gptq(
    folder: Path,
    dense: Path,
    group: int,
    symmetric: bool = False,
    act_order: bool = False,
    bits: int = 4,
    dynamic: Mapping[str, Mapping[str, int]] = MappingProxyType({}),
    **more: Any,
) -> Path:
    """Write GPTQ's files; see `write_quantised`.

    dynamic: bits and group_size of the modules whose paths match a pattern, as gptqmodel has it.
    """

    def tensors_of(path: str, matrix: Tensor) -> tuple[Tensors, Tensor]:
        # Maps of one input have one order.
        seed = sum(map(ord, re.sub("gate|up|[qkv]_|w[13]", "", path)))
        order = torch.randperm(matrix.shape[1], generator=torch.Generator().manual_seed(seed))
        own = next((dynamic[each] for each in dynamic if re.match(each.lstrip("+:"), path)), {})
        size, own_bits = own.get("group_size", group), own.get("bits", bits)
        made = rounded(matrix, size, symmetric, order if act_order else None, own_bits)
        return gptq(made), made.numbers

    settings: dict[str, Any] = {
        "bits": bits, "group_size": group, "desc_act": act_order, "sym": symmetric
    }  # fmt: skip
    if dynamic:
        settings["dynamic"] = {pattern: dict(own) for pattern, own in dynamic.items()}
    return write_quantised(folder, dense, tensors_of, {"quant_method": "gptq", **settings}, **more)


def write_awq(folder: Path, dense: Path, group: int, **more: Any) -> Path:
    """Write AWQ's files; see `write_quantised`."""

    def tensors_of(_: str, matrix: Tensor) -> tuple[Tensors, Tensor]:
        made = rounded(matrix, group, False)
        return awq(made), made.numbers

    settings = {"bits": 4, "group_size": group, "zero_point": True, "version": "gemm"}
    return write_quantised(folder, dense, tensors_of, {"quant_method": "awq", **settings}, **more)
