"""Tensors by name, read lazily and by slices: from files, or made up from a seed."""

import hashlib
import json
import pickle
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from sharding.slicing import Segments, width

_DTYPES = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F64": torch.float64,
}


class CheckpointError(ValueError):
    """A checkpoint that does not fit the model; the message names the tensors."""


class TensorSource(Protocol):
    """Where weights come from. bytes_read: of tensor data, since it was opened."""

    bytes_read: int

    def names(self) -> frozenset[str] | None:
        """All tensor names; None when the source makes whatever it is asked for."""
        ...

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """The `cut` (segments for each dimension) of tensor `name`, whose whole shape is given.

        CheckpointError when there is no such tensor or its shape is another.
        """
        ...


class Checkpoint(Protocol):
    """A source that holds a given set of tensors."""

    bytes_read: int

    def names(self) -> frozenset[str]:
        """All tensor names in all files."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape; CheckpointError when there is no such tensor."""
        ...

    def dtype(self, name: str) -> torch.dtype:
        """The type that the tensor is stored in; CheckpointError if it is not a float type."""
        ...

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """As in TensorSource: only the bytes of the cut are read."""
        ...


def open_checkpoint(folder: Path, allow_pickle: bool) -> Checkpoint:
    """The folder's weights: safetensors where there are any, pickled ones only where allowed.

    CheckpointError when there are none, or none that may be opened (model.allow_pickle).
    """
    if _has(folder, "model.safetensors") or not _has(folder, "pytorch_model.bin"):
        return SafetensorsCheckpoint(folder)
    if not allow_pickle:
        raise CheckpointError(
            f"{folder} holds no model.safetensors, only pytorch_model.bin, a pickle: convert it to "
            "safetensors, or set model.allow_pickle to true to read its tensors all the same"
        )
    return PickledCheckpoint(folder)


class SafetensorsCheckpoint:
    """A folder of safetensors files: model.safetensors, or shards and their index."""

    def __init__(self, folder: Path) -> None:
        """Open the files' headers; no tensor data is read yet."""
        self.bytes_read = 0
        paths = _files(folder, "model.safetensors")
        files: list[Any] = [safe_open(path, framework="pt") for path in paths]
        self._owner: dict[str, Any] = {name: file for file in files for name in file.keys()}  # noqa: SIM118

    def names(self) -> frozenset[str]:
        """All tensor names in all files."""
        return frozenset(self._owner)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The type that the tensor is stored in; CheckpointError if it is not a float type."""
        stored = self._slice(name).get_dtype()
        if stored not in _DTYPES:
            raise CheckpointError(f"tensor {name!r} is stored as {stored}, which is not supported")
        return _DTYPES[stored]

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """Read only the bytes of the cut; several segments of a dimension are concatenated."""
        _check_shape(name, self.shape(name), shape)
        dtype = self.dtype(name)
        sizes = tuple(width(segments) for segments in cut)
        if 0 in sizes:  # a rank whose rows are all padding; the file format has no empty slices
            return torch.empty(sizes, dtype=dtype)
        piece = _read_cut(self._slice(name), cut, ())
        self.bytes_read += piece.nbytes
        return piece

    def _slice(self, name: str) -> Any:
        """The lazy view of one tensor."""
        if name not in self._owner:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._owner[name].get_slice(name)


class PickledCheckpoint:
    """A folder of torch.save files: pytorch_model.bin, or shards and their index.

    Only tensors are unpickled (torch.load's weights_only), and their bytes stay on disk until a
    slice is read (mmap).
    """

    def __init__(self, folder: Path) -> None:
        """Map the files; CheckpointError when one holds anything but tensors."""
        self.bytes_read = 0
        self._tensors: dict[str, Tensor] = {}
        for path in _files(folder, "pytorch_model.bin"):
            self._tensors.update(_map_tensors(path))

    def names(self) -> frozenset[str]:
        """All tensor names in all files."""
        return frozenset(self._tensors)

    def shape(self, name: str) -> tuple[int, ...]:
        """The whole tensor's shape."""
        return tuple(self._tensor(name).shape)

    def dtype(self, name: str) -> torch.dtype:
        """The type that the tensor is stored in; CheckpointError if it is not a float type."""
        stored = self._tensor(name).dtype
        if stored not in _DTYPES.values():
            raise CheckpointError(f"tensor {name!r} is stored as {stored}, which is not supported")
        return stored

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """Copy the cut out of the mapped file."""
        _check_shape(name, self.shape(name), shape)
        self.dtype(name)
        piece = _read_cut(self._tensor(name), cut, ()).clone()
        self.bytes_read += piece.nbytes
        return piece

    def _tensor(self, name: str) -> Tensor:
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}")
        return self._tensors[name]


def _map_tensors(path: Path) -> dict[str, Tensor]:
    """A torch.save file as a mapping of names to tensors that lie on disk."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except (RuntimeError, OSError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(
            f"{path.name} cannot be read as tensors alone ({error}): convert it to safetensors"
        ) from error
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        raise CheckpointError(f"{path.name} holds more than named tensors: convert it")
    return found


def _check_shape(name: str, found: tuple[int, ...], wanted: tuple[int, ...]) -> None:
    if found != wanted:
        raise CheckpointError(f"tensor {name!r} has shape {found}, the model needs {wanted}")


def _read_cut(view: Any, cut: tuple[Segments, ...], fixed: tuple[slice, ...]) -> Tensor:
    """Fix one dimension after the other to each of its segments and join the pieces."""
    if len(fixed) == len(cut):
        piece: Tensor = view[fixed]
        return piece
    pieces = [_read_cut(view, cut, (*fixed, slice(*segment))) for segment in cut[len(fixed)]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=len(fixed))


def _has(folder: Path, name: str) -> bool:
    """Whether the folder holds weights of that name, whole or as shards."""
    return (folder / name).is_file() or (folder / f"{name}.index.json").is_file()


def _files(folder: Path, name: str) -> list[Path]:
    """The files that hold the tensors; CheckpointError if some are missing."""
    index = folder / f"{name}.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / file for file in sorted(set(weight_map.values()))]
    else:
        files = [folder / name]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}: only safetensors are read, and "
            "pytorch_model.bin where model.allow_pickle is set"
        )
    return files


class DummySource:
    """Seeded random weights of any shape, made on the device: for load tests without a download.

    Values depend on (seed, name, cut) alone, so replicas on several ranks are equal. Matrices
    are normal with std 0.02 (transformers' initializer_range), vectors are ones, biases zeros.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        """Make values of `dtype` on `device`."""
        self.bytes_read = 0
        self._device = device
        self._dtype = dtype
        self._seed = seed

    def names(self) -> None:
        """Any name will do."""

    def read(self, name: str, shape: tuple[int, ...], cut: tuple[Segments, ...]) -> Tensor:
        """Random values of the cut's shape."""
        sizes = tuple(width(segments) for segments in cut)
        out = torch.empty(sizes, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            return out.zero_()
        if len(shape) == 1:
            return out.fill_(1.0)
        key = f"{self._seed}/{name}/{cut}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        return out.normal_(std=0.02, generator=torch.Generator(self._device).manual_seed(seed))
