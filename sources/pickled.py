"""Adapters saved as pickles, made into safetensors; only tensors are ever unpickled."""

from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from configs.reading import read_small
from configs.wire.adapters import AdapterRefusal
from sharding.pickled_file import PickledFile, UnreadablePickle
from sharding.slicing import whole
from sources.base import refuse
from sources.files import fingerprint

PICKLED_NAME = "adapter_model.bin"
SAFE_NAME = "adapter_model.safetensors"
WEIGHTS_START = "adapter_model"

_FLOATS = frozenset(map(str, (torch.float64, torch.float32, torch.float16, torch.bfloat16)))


def convert(folder: Path, into: Path, name: str, root: Path | None = None) -> None:
    """Write the adapter in `folder` to `into`, its weights as safetensors.

    root: the folder that links must not lead out of. Where `folder` and `into` are the same the
    pickle is removed. AdapterError when it holds anything but tensors, or more than its file could;
    OSError when it cannot be read.
    """
    # Written here, for the library's own writer tells of a full disk by an error of its own.
    weights = save(_tensors(folder / PICKLED_NAME, name, root))
    (into / SAFE_NAME).write_bytes(weights)
    if folder == into:
        (folder / PICKLED_NAME).unlink()
        return
    for other, size, _ in fingerprint(folder):
        if not other.startswith(WEIGHTS_START):
            (into / other).parent.mkdir(exist_ok=True)
            (into / other).write_bytes(read_small(folder / other, size, root))


def _tensors(path: Path, name: str, root: Path | None) -> dict[str, Tensor]:
    """The tensors of a file, each in memory of its own."""
    try:
        file = PickledFile(path, root)
    except UnreadablePickle as error:
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: {error} (save_pretrained(..., safe_serialization=True))",
            error,
        )
    for key in file.keys():  # noqa: SIM118
        if file.dtype(key) not in _FLOATS:
            refuse(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {name!r}: {key} has type {file.dtype(key)}: save the adapter in float32, "
                "float16 or bfloat16",
            )
    # A tensor's sizes may repeat few bytes many times.
    if file.num_bytes > file.size:
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: the tensors of {path.name} are larger than the file",
        )
    return {key: file.read(key, tuple(map(whole, file.shape(key)))) for key in file.keys()}  # noqa: SIM118
