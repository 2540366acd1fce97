"""Weights of 4 or 8 bits with a scale for some inputs of an output: GPTQ, AWQ and others.

    W[o, i] = (code[o, i] - zero[o, g(i)]) * scale[o, g(i)]

or table[code] * scale where codes stand for other numbers than themselves (bitsandbytes).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from modeling.quantisation.base import LEAST_CHUNK
from modeling.quantisation.coded import CodedWeight
from modeling.quantisation.products import GpuProducts, gpu_products
from sharding.linear_weight import LinearWeight, OperandGroups, Operands


@dataclass(frozen=True)
class Groups:
    """Which inputs of a matrix [out, in] share a scale.

    scales: [out, groups].
    zeros: uint8 [out, groups]; None where `middle` is every zero point, or there is none.
    group_of: int64 [in], the group of each input.
    size: inputs of each group, where all have as many; None where they do not.
    order: int64 [in], the inputs in the order of their groups; None where they are in it.
    middle: the zero point of all.
    """

    scales: Tensor
    zeros: Tensor | None
    group_of: Tensor
    size: int | None
    order: Tensor | None = None
    middle: int = 0


def local_groups(scales: Tensor, zeros: Tensor | None, group_of: Tensor, middle: int) -> Groups:
    """Keep the groups of this rank's inputs; scales, zeros: of all groups, [out, groups].

    group_of: int64 [this rank's inputs], in all groups.
    """
    used, own, counts = torch.unique(group_of, return_inverse=True, return_counts=True)
    sizes = set(counts.tolist())
    ordered = bool((own[1:] >= own[:-1]).all())
    return Groups(
        scales[:, used].contiguous(),
        None if zeros is None else zeros[:, used].contiguous(),
        own,
        sizes.pop() if len(sizes) == 1 else None,
        # Act-order: kernels read a group's inputs side by side.
        None if ordered else torch.argsort(own, stable=True),
        middle,
    )


CHUNKS = (128, 64, 32, 16, 8, 4)
"""Inputs of which the codes of 4 bits lie together: the first that divides a group, or all."""


def pack(codes: Tensor, chunk: int) -> Tensor:
    """Put four codes of 4 bits into two bytes: uint8 [out, in] to [in / chunk, out, chunk / 2].

    A word of 16 bits has the codes of inputs w, w + chunk / 4, w + chunk / 2, w + 3 chunk / 4 of
    its chunk, the first one lowest.
    """
    parts = codes.view(len(codes), -1, 4, chunk // 4).permute(1, 0, 2, 3)
    pairs = parts[:, :, 0::2] | parts[:, :, 1::2] << 4
    return pairs.transpose(-2, -1).flatten(-2).contiguous()


def unpack(packed: Tensor) -> Tensor:
    """Undo `pack`."""
    chunks, outputs, width = packed.shape
    words = packed.view(chunks, outputs, width // 2, 2)
    parts = torch.stack((words & 15, words >> 4), dim=-1).flatten(-2)
    return parts.permute(1, 0, 3, 2).flatten(1)


class IntegerWeight(CodedWeight):
    """Codes, and what groups of them share.

    codes: uint8, in the groups' order: of 4 bits see `pack`, where chunks are whole; [out, in]
    otherwise. scales, zeros: as Groups has them, but [groups, out].
    """

    def __init__(
        self,
        codes: Tensor,
        groups: Groups,
        bits: int,
        dtype: torch.dtype,
        table: Tensor | None = None,
    ) -> None:
        """codes: uint8 [out, in], not packed. table: [2 ** bits], what a code stands for."""
        super().__init__((codes.shape[0], codes.shape[1]), dtype)
        self.order = None if groups.order is None else self.keep(groups.order)
        if groups.order is not None:
            codes = codes[:, groups.order]
        self.bits, self.size, self.middle = bits, groups.size, groups.middle
        whole = groups.size or codes.shape[1]
        chunk = next((c for c in CHUNKS if bits == 4 and whole % c == 0), None)
        self.is_packed = chunk is not None
        self.codes = self.keep(codes if chunk is None else pack(codes, chunk))
        self.scales = self.keep(groups.scales.t().contiguous())
        zeros = groups.zeros
        self.zeros = None if zeros is None else self.keep(zeros.t().contiguous())
        self.group_of = self.keep(groups.group_of)
        self.table = None if table is None else self.keep(table)

    @property
    def form(self) -> str:
        """Return its name."""
        kind = "integers" if self.table is None else "bitsandbytes"
        return f"{kind} of {self.bits} bits"

    def joined(self, others: Sequence[LinearWeight]) -> Self | None:
        """Return one weight of all rows, where all share their groups of inputs."""
        parts = self.with_alike(others)
        if not parts or not all(self.grouped_like(part) for part in parts):
            return None
        zeros: list[Tensor] = [part.zeros for part in parts if part.zeros is not None]
        groups = Groups(
            torch.cat([part.scales for part in parts], dim=1).t(),
            torch.cat(zeros, dim=1).t() if zeros else None,
            self.group_of,
            self.size,
            self.order,
            self.middle,
        )
        return self.with_codes(torch.cat([part.unpacked(slice(None)) for part in parts]), groups)

    def with_codes(self, codes: Tensor, groups: Groups) -> Self:
        """Return weights of other codes, uint8 [out, in], of this kind."""
        return type(self)(codes, groups, self.bits, self.dtype, self.table)

    @property
    def has_kernels(self) -> bool:
        """Whether GPUs have kernels that read its codes."""
        return self.is_packed and self.size is not None

    @property
    def few_tokens(self) -> int:
        """Up to how many tokens kernels are faster than a library with numbers, on an H200."""
        is_wide = self.has_kernels and 2 * self.codes.shape[2] >= LEAST_CHUNK
        return 64 if is_wide and self.table is None else 0

    def product(
        self, gpu: GpuProducts, x: Tensor, bias: Tensor | None, out: Tensor | None
    ) -> Tensor:
        """x W^T + bias by kernels that read codes."""
        return gpu.integers(self.operands(x), bias, out)

    def joins(self, x: Tensor) -> bool:
        """Return whether a GPU has a kernel for few tokens of x that an adapter's shrink may join.

        Codes with zero points have one too, whose results were not compared as it is cut now.
        """
        return self.few_tokens > 0 and self.zeros is None and gpu_products(x) is not None

    def operands(self, x: Tensor) -> Operands:
        """Return x in the order of the codes, and the codes."""
        assert self.size is not None
        own = x if self.order is None else x.index_select(1, self.order)
        groups = OperandGroups(self.scales, self.zeros, self.table, self.middle, self.size)
        return Operands(own, self.codes, groups=groups)

    def __getitem__(self, rows: slice) -> Tensor:
        """Return some rows in `dtype`."""
        codes, scales = self.unpacked(rows), self.scales[:, rows].t()
        if self.table is not None:
            values = self.table[codes.long()]
        elif self.zeros is None:
            values = (codes.to(torch.int16) - self.middle).to(scales.dtype)
        else:
            zeros = self.zeros[:, rows].t().to(torch.int16)[:, self.group_of]
            values = (codes.to(torch.int16) - zeros).to(scales.dtype)
        return (values * scales[:, self.group_of]).to(self.dtype)

    def unpacked(self, rows: slice) -> Tensor:
        """Return some rows' codes, uint8, in the order of the inputs."""
        codes = unpack(self.codes[:, rows]) if self.is_packed else self.codes[rows]
        return codes if self.order is None else codes[:, torch.argsort(self.order)]

    def grouped_like(self, other: "IntegerWeight") -> bool:
        """Return whether another weight's inputs are grouped as this one's."""
        return (
            self.bits == other.bits
            and (self.zeros is None) == (other.zeros is None)
            and self.middle == other.middle
            and _same(self.table, other.table)
            and torch.equal(self.group_of, other.group_of)
        )


def _same(mine: Tensor | None, theirs: Tensor | None) -> bool:
    return mine is theirs if mine is None or theirs is None else torch.equal(mine, theirs)


def round_groups(matrix: Tensor, bits: int, size: int | None) -> IntegerWeight:
    """Round a matrix [out, in] to the nearest integers, with scales of `size` inputs."""
    size = matrix.shape[1] if size is None else size
    group_of = torch.arange(matrix.shape[1], device=matrix.device) // size
    parts = torch.split(matrix, size, dim=1)
    middle = 2 ** (bits - 1)
    scales = torch.stack([part.abs().amax(dim=1) for part in parts], dim=1) / (middle - 1)
    rounded = [
        torch.round(part / scales[:, index, None].clamp(min=torch.finfo(matrix.dtype).tiny))
        for index, part in enumerate(parts)
    ]
    codes = (torch.cat(rounded, dim=1) + middle).clamp(0, 2 * middle - 1).to(torch.uint8)
    return IntegerWeight(codes, local_groups(scales, None, group_of, middle), bits, matrix.dtype)
