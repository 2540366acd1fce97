"""TensorFile: a safetensors file's tensors as views of its mapping.

safetensors' own reader makes one tensor in some 40 µs of Python; an adapter has hundreds, and the
interpreter is the thread's that launches steps.
"""

import json
from math import prod
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

_LENGTH_BYTES = 8
_TYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


class TensorFile:
    """Tensors by name, of the float types; for a file that `safe_open` has accepted.

    Format: 8 bytes with the header's length, a JSON header, the tensors
    (https://huggingface.co/docs/safetensors).
    """

    def __init__(self, path: Path) -> None:
        """Map the file and read its header; OSError if it cannot be read."""
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
            self._entries = json.loads(file.read(length))
        self._begin = _LENGTH_BYTES + length
        mapped = torch.UntypedStorage.from_file(str(path), False, size)
        self._storage = cast(torch.UntypedStorage, mapped)
        self._whole: dict[torch.dtype, Tensor] = {}

    def get(self, key: str) -> Tensor:
        """A view of one tensor; a copy where the file does not align it."""
        entry = self._entries[key]
        dtype, shape = _TYPES[entry["dtype"]], entry["shape"]
        first, end = (self._begin + offset for offset in entry["data_offsets"])
        if first % dtype.itemsize:
            return self._flat(torch.uint8)[first:end].clone().view(dtype).view(shape)
        start = first // dtype.itemsize
        return self._flat(dtype)[start : start + prod(shape)].view(shape)

    def _flat(self, dtype: torch.dtype) -> Tensor:
        """The whole file as numbers of one type, as far as they fill it."""
        if dtype not in self._whole:
            count = self._storage.nbytes() // dtype.itemsize
            empty = torch.empty(0, dtype=dtype)
            self._whole[dtype] = empty.set_(self._storage, 0, (count,), (1,))
        return self._whole[dtype]
