"""Adapters saved as pickles, made into safetensors; only tensors are ever unpickled."""

import shutil
from pathlib import Path

import torch
from safetensors.torch import save
from torch import Tensor

from configs.adapters import AdapterRefusal
from sharding.sources.base import CONFIG_NAME, TEMPLATE_NAMES, refuse

PICKLED_NAME = "adapter_model.bin"
SAFE_NAME = "adapter_model.safetensors"


def convert(folder: Path, into: Path, name: str) -> None:
    """Write the adapter in `folder` to `into`, its weights as safetensors.

    Where they are the same folder the pickle is removed. AdapterError when it holds anything but
    tensors, or more than its file could.
    """
    tensors = _tensors(folder / PICKLED_NAME, name)
    # Written here, for the library's own writer tells of a full disk by an error of its own.
    weights = save({key: tensor.contiguous() for key, tensor in tensors.items()})
    (into / SAFE_NAME).write_bytes(weights)
    if folder == into:
        (folder / PICKLED_NAME).unlink()
        return
    for other in (CONFIG_NAME, *TEMPLATE_NAMES):
        if (folder / other).is_file():
            shutil.copyfile(folder / other, into / other)


def _tensors(path: Path, name: str) -> dict[str, Tensor]:
    """The tensors of a file, mapped, not read."""
    try:
        found = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except OSError:
        raise
    except Exception as error:
        # What a damaged or hostile file makes the reader raise is no short list.
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: {path.name} cannot be read as tensors alone: save it as "
            "safetensors (save_pretrained(..., safe_serialization=True))",
            error,
        )
    if not isinstance(found, dict) or not all(isinstance(v, Tensor) for v in found.values()):
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: {path.name} holds more than named tensors",
        )
    # A tensor's sizes may repeat few bytes many times.
    if sum(tensor.nbytes for tensor in found.values()) > path.stat().st_size:
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: the tensors of {path.name} are larger than the file",
        )
    # Tensors that share memory cannot be saved as they are.
    return {key: tensor.clone() for key, tensor in found.items()}
