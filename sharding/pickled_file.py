"""PickledFile: a torch.save file that is not trusted: only tensors are read, by position.

torch.load makes tensors without values (FakeTensorMode) that know the offset of their values in
the file (https://docs.pytorch.org/docs/stable/notes/serialization.html); nothing is mapped.
"""

import os
import pickletools
import zipfile
from collections.abc import KeysView
from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from configs.reading import RegularFile
from sharding.extents import CPU, Extent, read_cut, read_whole
from sharding.slicing import Segments

_MAX_PICKLE_BYTES = 8 << 20
_MAX_OPERATIONS = 1 << 21
"""Of the description: 200 bytes and 35 operations for each tensor are usual. An operation may take
three microseconds and 64 bytes of memory."""

_PICKLE_NAME = "data.pkl"
_TORCH_MODULES = {
    "torch",
    "torch._tensor",
    "torch._utils",
    "torch.nn.parameter",
    "torch.serialization",
    "torch.storage",
}
_MAPPING = ("collections", "OrderedDict")


class UnreadablePickle(ValueError):
    """The file holds more than tensors, or is damaged; the message says what to do."""


@dataclass(frozen=True)
class _Stored:
    """A tensor in the file: elements from byte `begin` on, `strides` apart."""

    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_contiguous: bool

    @property
    def span(self) -> int:
        """Return the number of elements from the first to the last."""
        if 0 in self.shape:
            return 0
        pairs = zip(self.shape, self.strides, strict=True)
        return 1 + sum((size - 1) * stride for size, stride in pairs)


class PickledFile:
    """Tensors by name, of any type that lies in memory as plain numbers.

    size: the file's bytes when it was opened.
    """

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """Unpickle the tensors' description, without their values; within: as in RegularFile.

        Raises UnreadablePickle when it holds anything but tensors, OSError if it cannot be read.
        """
        self._file = RegularFile(path, within)
        self.size = self._file.size
        self._stored = {name: self._locate(name, t) for name, t in self._load().items()}

    def keys(self) -> KeysView[str]:
        """Return all tensors' names."""
        return self._stored.keys()

    def shape(self, key: str) -> tuple[int, ...]:
        """Return a tensor's shape."""
        return self._stored[key].shape

    def dtype(self, key: str) -> str:
        """Return a tensor's type as torch names it."""
        return str(self._stored[key].dtype)

    def read(self, key: str, cut: tuple[Segments, ...], device: torch.device = CPU) -> Tensor:
        """Read a cut of a tensor into new memory; FileChanged if the file was written to."""
        stored = self._stored[key]
        if stored.is_contiguous:
            extent = Extent(stored.begin, stored.dtype, stored.shape)
            return read_cut(self._file, extent, cut, device)
        # A view with other strides: its whole span is read, then the cut is taken in memory.
        flat = read_whole(self._file, Extent(stored.begin, stored.dtype, (stored.span,)))
        piece = flat.as_strided(stored.shape, stored.strides)
        for dim, segments in enumerate(cut):
            parts = [piece.narrow(dim, start, stop - start) for start, stop in segments]
            piece = torch.cat(parts, dim)
        return piece.contiguous().to(device)

    def _load(self) -> dict[str, Tensor]:
        name = self._file.name
        try:
            # A file object: torch would open the path again, which may name another file by now.
            with open(os.dup(self._file.descriptor), "rb") as opened, FakeTensorMode():
                _check_pickle(opened.fileno())
                found = torch.load(opened, map_location="cpu", weights_only=True)
        except OSError:
            raise
        except Exception as error:
            # A damaged or hostile file may make the reader raise nearly anything.
            raise UnreadablePickle(
                f"{name} cannot be read as tensors alone ({type(error).__name__}: {error}): "
                "convert it to safetensors"
            ) from error
        if not isinstance(found, dict) or not all(
            isinstance(key, str) and isinstance(value, Tensor) for key, value in found.items()
        ):
            raise UnreadablePickle(f"{name} holds more than named tensors: convert it")
        return found

    def _locate(self, name: str, tensor: Tensor) -> _Stored:
        where = f"{self._file.name}: tensor {name!r}"
        is_plain = tensor.layout is torch.strided and tensor.dtype.itemsize <= 8
        if not is_plain or tensor.is_neg() or tensor.is_conj():
            raise UnreadablePickle(f"{where} is not a dense tensor: convert it to safetensors")
        data = tensor.untyped_storage()._checkpoint_offset
        if data is None:
            raise UnreadablePickle(f"{where} has no values (device {tensor.device}): save it again")
        begin = data + int(tensor.storage_offset()) * tensor.dtype.itemsize
        stored = _Stored(
            begin, tensor.dtype, tuple(tensor.shape), tensor.stride(), tensor.is_contiguous()
        )
        # Offsets come from the file and are not trusted: reads stay within its bytes.
        end = begin + stored.span * tensor.dtype.itemsize
        if begin < 0 or end > self.size or min(stored.strides, default=0) < 0:
            raise UnreadablePickle(f"{where} lies outside of the file: it is incomplete")
        return stored

    @property
    def num_bytes(self) -> int:
        """Return the bytes of all tensors, though they may share some of them in the file."""
        return sum(prod(s.shape) * s.dtype.itemsize for s in self._stored.values())


def _check_pickle(descriptor: int) -> None:
    """Refuse what torch.save never writes of tensors.

    These are compressed parts, a very large description, and calls of anything but torch's own
    functions. torch reads more parts than the description whole, each into memory of the size that
    it names, and its reader of tensors alone would call `bytearray` with any number.
    """
    with open(os.dup(descriptor), "rb") as opened, zipfile.ZipFile(opened) as archive:
        for entry in archive.infolist():
            if entry.compress_type != zipfile.ZIP_STORED:
                raise ValueError(f"its {entry.filename} is compressed")
            # torch finds its parts whatever the case of their names.
            is_description = entry.filename.lower().endswith(_PICKLE_NAME)
            if is_description and entry.file_size > _MAX_PICKLE_BYTES:
                raise ValueError(f"its {_PICKLE_NAME} has {entry.file_size} bytes")
    with open(os.dup(descriptor), "rb") as opened:
        opened.seek(0)
        # By torch's own reader of archives: another might find another part of this name.
        _check_names(torch._C.PyTorchFileReader(opened).get_record(_PICKLE_NAME))
    os.lseek(descriptor, 0, os.SEEK_SET)


def _check_names(description: bytes) -> None:
    """Refuse very many operations, and names that are neither torch's nor a mapping."""
    for number, (opcode, argument, _) in enumerate(pickletools.genops(description)):
        if number == _MAX_OPERATIONS:
            raise ValueError(f"its {_PICKLE_NAME} has more than {number} operations")
        if opcode.name == "GLOBAL":
            module, _, name = str(argument).partition(" ")
            if module not in _TORCH_MODULES and (module, name) != _MAPPING:
                raise ValueError(f"its {_PICKLE_NAME} calls {module}.{name}")
