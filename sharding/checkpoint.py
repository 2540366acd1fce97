"""A model's tensors by name, read in slices when needed: from files, or random from a seed."""

import hashlib
import json
from collections.abc import Callable, KeysView
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from configs.reading import DamagedFile, read_text
from sharding.extents import CPU
from sharding.pickled_file import PickledFile, UnreadablePickle
from sharding.slicing import Segments, width
from sharding.tensor_file import FLOAT_TYPES, STORED_TYPES, TensorFile

_SAFETENSORS = "model.safetensors"
_PICKLED = "pytorch_model.bin"
_MAX_INDEX_BYTES = 256 << 20

_QUANTISED = (".qweight", ".weight_packed", ".SCB", ".weight.absmax", ".weight_scale")
"""How names of tensors end that quantised weights have."""

_DTYPES = FLOAT_TYPES | {str(dtype): dtype for dtype in FLOAT_TYPES.values()}
"""By the names of safetensors and of torch."""

_STORED = STORED_TYPES | {str(dtype): dtype for dtype in STORED_TYPES.values()}


class CheckpointError(ValueError):
    """The checkpoint does not fit the model; the message names the tensors."""


class TensorSource(Protocol):
    """A source of weights.

    bytes_read: bytes of tensor data that were read so far.
    """

    bytes_read: int

    def names(self) -> frozenset[str] | None:
        """Return all tensor names; None when the source makes a tensor of any name."""
        ...

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """Read the `cut` (segments for each dimension) of tensor `name` of this whole shape.

        device: where the caller needs it; a source may return it elsewhere.
        Raises CheckpointError when there is no such tensor or its shape differs.
        """
        ...

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """`read` a tensor that may be of no float type."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape; CheckpointError when there is no such tensor."""
        ...


class _File(Protocol):
    """A file of tensors."""

    def keys(self) -> KeysView[str]: ...

    def shape(self, key: str) -> tuple[int, ...]: ...

    def dtype(self, key: str) -> str: ...

    def read(self, key: str, cut: tuple[Segments, ...], device: torch.device = CPU) -> Tensor: ...


class Checkpoint:
    """A folder of weights, in one file or in shards; a source that holds a given set of tensors."""

    def __init__(self, folder: Path, name: str, opener: Callable[[Path], _File]) -> None:
        """Open the files, without tensor data yet; CheckpointError if one is damaged."""
        self.bytes_read = 0
        self._tensors: dict[str, tuple[_File, str]] = {}
        for path in _files(folder, name):
            try:
                file = opener(path)
            except (DamagedFile, UnreadablePickle, OSError) as error:
                raise CheckpointError(f"{folder}: {error}") from error
            self._tensors.update({key: (file, key) for key in file.keys()})  # noqa: SIM118

    def names(self) -> frozenset[str]:
        """Return all tensor names in all files."""
        return frozenset(self._tensors)

    def keep_part(self, own_name: Callable[[str], str | None]) -> None:
        """Keep the tensors of one part of the model, under their names there.

        own_name: from a tensor's name to the part's; None for a tensor of another part.
        """
        named = ((own_name(name), entry) for name, entry in self._tensors.items())
        self._tensors = {own: entry for own, entry in named if own is not None}

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the whole tensor's shape; CheckpointError when there is no such tensor."""
        file, key = self._tensor(name)
        return file.shape(key)

    def dtype(self, name: str) -> torch.dtype:
        """Return the type that the tensor is stored in; CheckpointError if it is no float type."""
        file, key = self._tensor(name)
        stored = file.dtype(key)
        if stored not in _DTYPES:
            raise CheckpointError(
                f"tensor {name!r} is stored as {stored}, which is not supported: of quantised "
                "weights those of linear maps inside the layers are read, where config.json's "
                "quantization_config names their method"
            )
        return _DTYPES[stored]

    def is_float(self, name: str) -> bool:
        """Return whether a tensor is stored in a type that models compute in."""
        file, key = self._tensor(name)
        return file.dtype(key) in _DTYPES

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """Read the cut and no bytes beyond its rows; segments of a dimension are concatenated.

        Raises CheckpointError when there is no such tensor, its shape differs, it is of no float
        type, or its file was written to since it was opened.
        """
        self._check(name, shape)
        self.dtype(name)  # Refuses types that no model has, before any byte is read.
        return self.read_stored(name, shape, cut, device)

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """`read` a tensor that may be of no float type."""
        self._check(name, shape)
        file, key = self._tensor(name)
        if file.dtype(key) not in _STORED:
            raise CheckpointError(
                f"tensor {name!r} is stored as {file.dtype(key)}, which no format has"
            )
        try:
            piece = file.read(key, cut, device)
        except OSError as error:
            raise CheckpointError(
                f"tensor {name!r} cannot be read: {error}; load the model again when its files are "
                "written"
            ) from error
        self.bytes_read += piece.nbytes
        return piece

    def _check(self, name: str, shape: tuple[int, ...]) -> None:
        found = self.shape(name)
        if found != shape:
            raise CheckpointError(f"tensor {name!r} has shape {found}, the model needs {shape}")

    def _tensor(self, name: str) -> tuple[_File, str]:
        """Return the file that holds a tensor, and its name there."""
        if name not in self._tensors:
            raise CheckpointError(f"the checkpoint has no tensor {name!r}; {self._instead(name)}")
        return self._tensors[name]

    def _instead(self, name: str) -> str:
        """Say what there is in place of a tensor that is missing."""
        module, _, last = name.rpartition(".")
        part = module.rpartition(".")[2]
        beside = sorted(key for key in self._tensors if key.startswith(f"{module}."))
        # A file may call the module's parents otherwise.
        beside = beside or sorted(key for key in self._tensors if part in key.split("."))
        stored = [key for key in beside if key.endswith(_QUANTISED)]
        if stored and (last == "weight" or part == "experts"):
            return (
                f"it has {stored[0]}: of quantised weights those of linear maps inside the layers "
                "are read, where config.json's quantization_config names their method, and of "
                "experts those in fp8, integers of 4 bits, nvfp4 or mxfp4, if published files of "
                "the type have a module for each expert, and gpt-oss': take a checkpoint that "
                "leaves others (routers, embeddings) as they were"
            )
        shown = ", ".join((beside or sorted(self._tensors))[:3])
        return f"it has {shown}, ...: complete or rename its tensors" if shown else "it is empty"


class SafetensorsCheckpoint(Checkpoint):
    """A folder of safetensors files: model.safetensors, or shards and their index."""

    def __init__(self, folder: Path) -> None:
        """Read the files' headers, without tensor data yet."""
        super().__init__(folder, _SAFETENSORS, TensorFile)


class PickledCheckpoint(Checkpoint):
    """A folder of torch.save files: pytorch_model.bin, or shards and their index.

    Only tensors are unpickled (torch.load's weights_only), and their bytes stay on disk until a
    slice is read.
    """

    def __init__(self, folder: Path) -> None:
        """Open the files; CheckpointError if one holds anything other than tensors."""
        super().__init__(folder, _PICKLED, PickledFile)


def open_checkpoint(folder: Path, allow_pickle: bool) -> Checkpoint:
    """Open a folder's weights: safetensors if there are any, else pickles if they are allowed.

    Raises CheckpointError when there are none that may be opened (model.allow_pickle).
    """
    if _has(folder, _SAFETENSORS) or not _has(folder, _PICKLED):
        return SafetensorsCheckpoint(folder)
    if not allow_pickle:
        raise CheckpointError(
            f"{folder} holds no model.safetensors, only pytorch_model.bin, a pickle: convert it to "
            "safetensors, or set model.allow_pickle to true to read its tensors all the same"
        )
    return PickledCheckpoint(folder)


def _has(folder: Path, name: str) -> bool:
    """Return whether the folder holds weights of that name, in one file or in shards."""
    return (folder / name).is_file() or (folder / f"{name}.index.json").is_file()


def _files(folder: Path, name: str) -> list[Path]:
    """Return the files that hold the tensors; CheckpointError if some are missing.

    A single file is preferred to an index, as in transformers (`_get_resolved_checkpoint_files`):
    when a model is saved into a folder that held shards, their index stays behind.
    """
    if (folder / name).is_file():
        return [folder / name]
    index = folder / f"{name}.index.json"
    if not index.is_file():
        raise CheckpointError(
            f"{folder} lacks {name}: only safetensors are read, and {_PICKLED} where "
            "model.allow_pickle is set"
        )
    try:
        weight_map = json.loads(read_text(index, _MAX_INDEX_BYTES))["weight_map"]
        names = sorted(set(weight_map.values()))
        missing = [file for file in names if not (folder / file).is_file()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, OSError) as error:
        raise CheckpointError(f"{index} is not an index of shards: {error!r}") from error
    # Links may lead out of the folder, as those of the hub's cache do; names must not.
    outside = [file for file in names if Path(file).is_absolute() or ".." in Path(file).parts]
    if outside:
        raise CheckpointError(
            f"{index} names {outside[0]}, which is outside of its folder: put the file beside it"
        )
    if missing:
        raise CheckpointError(
            f"{folder} lacks {', '.join(missing)}, which {index.name} names, and has no {name}: "
            "add the missing files, or save the model again"
        )
    return [folder / file for file in names]


class DummySource:
    """Random weights of any shape, made on the device: for load tests without a download.

    Values depend on (seed, name, cut) alone, so ranks that hold the same cut hold equal values.
    Matrices are normal with std 0.02 (transformers' initializer_range), vectors are ones, biases
    zeros. On the meta device tensors have shapes and no values, so that building a model is free.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype, seed: int = 0) -> None:
        """Make values of `dtype` on `device`."""
        self.bytes_read = 0
        self._device = device
        self._dtype = dtype
        self._seed = seed

    def names(self) -> None:
        """Return None: a tensor of any name can be made."""

    def shape(self, name: str) -> tuple[int, ...]:
        """Raise CheckpointError: a tensor of any shape can be made."""
        raise CheckpointError(f"dummy weights have no tensor {name!r} of a shape of its own")

    def read_stored(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """Raise CheckpointError: quantised values are made of random weights, see `read`."""
        raise CheckpointError(f"dummy weights have no quantised tensor {name!r}")

    def read(
        self,
        name: str,
        shape: tuple[int, ...],
        cut: tuple[Segments, ...],
        device: torch.device = CPU,
    ) -> Tensor:
        """Make random values of the cut's shape."""
        sizes = tuple(width(segments) for segments in cut)
        out = torch.empty(sizes, dtype=self._dtype, device=self._device)
        if out.is_meta:
            return out
        if name.endswith(".bias"):
            return out.zero_()
        if len(shape) == 1:
            return out.fill_(1.0)
        # Seeded by the cut: a rank makes no values of other ranks' slices, as no rank reads them.
        key = f"{self._seed}/{name}/{cut}".encode()
        seed = int.from_bytes(hashlib.blake2b(key, digest_size=7).digest(), "little")
        return out.normal_(std=0.02, generator=torch.Generator(self._device).manual_seed(seed))
