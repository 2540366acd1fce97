"""Tensors by name, read lazily and by slices: from safetensors files, or made up from a seed."""

import hashlib
import json
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


class SafetensorsCheckpoint:
    """A folder of safetensors files: model.safetensors, or shards and their index."""

    def __init__(self, folder: Path) -> None:
        """Open the files' headers; no tensor data is read yet."""
        self.bytes_read = 0
        files: list[Any] = [safe_open(path, framework="pt") for path in _files(folder)]
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
        if self.shape(name) != shape:
            raise CheckpointError(
                f"tensor {name!r} has shape {self.shape(name)}, the model needs {shape}"
            )
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


def _read_cut(view: Any, cut: tuple[Segments, ...], fixed: tuple[slice, ...]) -> Tensor:
    """Fix one dimension after the other to each of its segments and join the pieces."""
    if len(fixed) == len(cut):
        piece: Tensor = view[fixed]
        return piece
    pieces = [_read_cut(view, cut, (*fixed, slice(*segment))) for segment in cut[len(fixed)]]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=len(fixed))


def _files(folder: Path) -> list[Path]:
    """The files that hold the tensors; CheckpointError if some are missing."""
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        weight_map = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        files = [folder / name for name in sorted(set(weight_map.values()))]
    else:
        files = [folder / "model.safetensors"]
    missing = [path.name for path in files if not path.is_file()]
    if missing:
        raise CheckpointError(f"{folder} lacks {', '.join(missing)}: only safetensors are read")
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
