"""TensorFile: a safetensors file that is not trusted, read by position and never mapped.

The library's reader maps the file and spends some 40 µs of Python on each tensor. An adapter has
hundreds, and that time is taken from the thread that launches steps.
"""

import copy
from collections.abc import Collection, Iterable, KeysView, Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Annotated, Self

import msgspec
import torch
from torch import Tensor

from configs.reading import (
    SAFETENSORS_LENGTH_BYTES,
    DamagedFile,
    RegularFile,
    safetensors_header_bytes,
)
from sharding.extents import (
    CPU,
    Extent,
    Scratch,
    Stacks,
    read_cut,
    read_pieces,
    read_stacks,
    read_whole,
)
from sharding.slicing import Segments, whole

WHOLE_BYTES = 2**25
"""Tensor data up to this size is read at once: one read instead of hundreds. Larger files are read
tensor by tensor, so that staging holds no second copy of them in memory."""

FLOAT_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
"""The types that numbers of a model have, by the format's names."""

STORED_TYPES = FLOAT_TYPES | {
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64,
    "I32": torch.int32,
    "I8": torch.int8,
    "U8": torch.uint8,
}
"""The types that can be read: quantised weights have the others."""

_BITS = {
    4: ("F4",),
    6: ("F6_E2M3", "F6_E3M2"),
    8: ("BOOL", "U8", "I8", "F8_E5M2", "F8_E4M3", "F8_E8M0", "F8_E4M3FNUZ", "F8_E5M2FNUZ"),
    16: ("I16", "U16", "F16", "BF16"),
    32: ("I32", "U32", "F32"),
    64: ("I64", "U64", "F64", "C64"),
}
_BITS_OF = {name: bits for bits, names in _BITS.items() for name in names}
_METADATA = "__metadata__"

_Count = Annotated[int, msgspec.Meta(ge=0, le=2**48)]


class _Entry(msgspec.Struct):
    dtype: str
    shape: Annotated[list[_Count], msgspec.Meta(max_length=16)]
    data_offsets: tuple[_Count, _Count]


class TensorFile:
    """Tensors by name; those of STORED_TYPES can be read.

    Format: 8 bytes with the header's length, a JSON header, the tensors without gaps
    (https://huggingface.co/docs/safetensors).
    header: as it is in the file.
    """

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """Open the file and read its header; within: as in RegularFile.

        Raises DamagedFile if it is not of the format, OSError if it cannot be read.
        """
        self._file = RegularFile(path, within)
        length = safetensors_header_bytes(self._file)
        self._begin = SAFETENSORS_LENGTH_BYTES + length
        self.header = self._file.read(SAFETENSORS_LENGTH_BYTES, length)
        self._entries = _parse(self.header, path.name)
        _check_layout(self._entries, self._file.size - self._begin, path.name)
        self._data: dict[torch.dtype, Tensor] = {}

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self._file.close()

    def keys(self) -> KeysView[str]:
        """Return all tensors' names, in the header's order."""
        return self._entries.keys()

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors."""
        return self._file.size - self._begin

    def without_numbers(self) -> Self:
        """Return what is known of the tensors, without the open file: nothing can be read."""
        found = copy.copy(self)
        found._data = {}
        del found._file
        return found

    def with_numbers_of(self, file: "TensorFile") -> Self:
        """Return this file's tensors in another one that has the same header."""
        assert file.header == self.header, "the tensors lie elsewhere"
        found = copy.copy(self)
        found._file, found._data = file._file, {}
        return found

    def rename(self, names: Mapping[str, str]) -> None:
        """Give tensors other names; names: of every tensor, all different."""
        self._entries = {names[key]: entry for key, entry in self._entries.items()}

    def leave_out(self, keys: Collection[str]) -> None:
        """Forget tensors, as if the file did not hold them."""
        self._entries = {key: each for key, each in self._entries.items() if key not in keys}

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return tuple(self._entries[key].shape)

    def size(self, key: str) -> int:
        """Return a tensor's bytes."""
        first, stop = self._entries[key].data_offsets
        return stop - first

    def dtype(self, key: str) -> str:
        """Return a tensor's type as the file names it."""
        return self._entries[key].dtype

    def read(self, key: str, cut: tuple[Segments, ...], device: torch.device = CPU) -> Tensor:
        """Read a cut of a tensor into new memory; FileChanged if the file was written to."""
        return read_cut(self._file, self._extent(key), cut, device)

    def rows(self, key: str, start: int, stop: int) -> Tensor:
        """Read rows (indices of the first dimension) of a tensor into new memory."""
        others = self.shape(key)[1:]
        return self.read(key, (((start, stop),), *map(whole, others)))

    def get_tensor(self, key: str) -> Tensor:
        """Return a whole tensor, which may share memory with others of the file."""
        extent = self._extent(key)
        if self._file.size - self._begin > WHOLE_BYTES:
            return read_whole(self._file, extent)
        first, size = extent.begin - self._begin, extent.dtype.itemsize
        # The format does not align tensors, and torch views only aligned bytes as wider numbers.
        if first % size:
            bytes_ = self._whole(torch.uint8)[first : first + extent.nbytes]
            return bytes_.clone().view(extent.dtype).view(extent.shape)
        start = first // size
        return self._whole(extent.dtype)[start : start + prod(extent.shape)].view(extent.shape)

    def stack(self, keys: Sequence[str]) -> Tensor:
        """Read tensors of one shape into new memory, [keys, *shape]."""
        return self.stacks([keys]).stacks[0]

    def stacks(self, stacks: Sequence[Sequence[str]], scratch: Scratch | None = None) -> Stacks:
        """Read stacks of tensors, each of one shape; scratch: as in `read_stacks`."""
        extents = [[self._extent(key) for key in keys] for keys in stacks]
        if all(len({(each.dtype, each.shape) for each in stack}) == 1 for stack in extents):
            return read_stacks(self._file, extents, scratch)
        found = [torch.stack([self.get_tensor(key) for key in keys]) for keys in stacks]
        return Stacks(found, found)

    def read_pieces(self, pieces: Iterable[tuple[str, int, memoryview]]) -> None:
        """Fill buffers, each with bytes of a tensor from the given one on."""
        starts = {key: self._begin + each.data_offsets[0] for key, each in self._entries.items()}
        targets = [(starts[key] + first, data) for key, first, data in pieces]
        read_pieces(self._file, targets)

    def _extent(self, key: str) -> Extent:
        entry = self._entries[key]
        begin = self._begin + entry.data_offsets[0]
        return Extent(begin, STORED_TYPES[entry.dtype], tuple(entry.shape))

    def _whole(self, dtype: torch.dtype) -> Tensor:
        """Return all tensor data as numbers of one type; a rest of fewer bytes is left out."""
        # One copy of the bytes; the views by other types share it.
        if torch.uint8 not in self._data:
            size = self._file.size - self._begin
            extent = Extent(self._begin, torch.uint8, (size,))
            self._data[torch.uint8] = read_whole(self._file, extent)
        data = self._data[torch.uint8]
        if dtype not in self._data:
            self._data[dtype] = data[: len(data) // dtype.itemsize * dtype.itemsize].view(dtype)
        return self._data[dtype]


def _parse(header: bytes, name: str) -> dict[str, _Entry]:
    try:
        raw = msgspec.json.decode(header, type=dict[str, msgspec.Raw])
        raw.pop(_METADATA, None)
        decode = msgspec.json.Decoder(_Entry).decode
        return {key: decode(entry) for key, entry in raw.items()}
    except (ValueError, RecursionError) as error:
        raise DamagedFile(f"{name} has a header that is not of safetensors: {error}") from error


def _check_layout(entries: Mapping[str, _Entry], num_bytes: int, name: str) -> None:
    """Check that tensors follow each other without gaps up to the file's end, as the format says.

    Overlaps and gaps would let a small file describe any amount of memory, or hide bytes.
    """
    end = 0
    for key, entry in sorted(entries.items(), key=lambda item: item[1].data_offsets):
        first, stop = entry.data_offsets
        if entry.dtype not in _BITS_OF:
            raise DamagedFile(f"{name}: tensor {key!r} has the unknown type {entry.dtype!r}")
        bits = prod(entry.shape) * _BITS_OF[entry.dtype]
        if first != end or bits != (stop - first) * 8:
            raise DamagedFile(
                f"{name}: tensor {key!r} lies at bytes {first} to {stop}, which does not fit "
                "its shape or its neighbours"
            )
        end = stop
    if end != num_bytes:
        raise DamagedFile(
            f"{name} has {num_bytes} bytes of tensors, its header says {end}: it is incomplete"
        )
