"""Convert adapters saved as pickles to safetensors; only tensors are unpickled."""

from pathlib import Path

from safetensors.torch import save
from torch import Tensor

from configs.reading import read_small
from configs.wire.adapters import AdapterRefusal
from sharding.pickled_file import PickledFile, UnreadablePickle
from sharding.slicing import whole
from sharding.tensor_file import FLOAT_TYPES
from sources.base import refuse
from sources.files import fingerprint

PICKLED_NAME = "adapter_model.bin"
SAFE_NAME = "adapter_model.safetensors"
WEIGHTS_START = "adapter_model"

_FLOATS = frozenset(map(str, FLOAT_TYPES.values()))


def convert(folder: Path, into: Path, name: str, root: Path | None = None) -> None:
    """Write the adapter in `folder` to `into`, its weights as safetensors.

    root: the folder that links must not lead out of. If `folder` and `into` are the same, the
    pickle is removed. Raises AdapterError when it holds anything but tensors, or tensors larger
    than the file; OSError when it cannot be read.
    """
    # The library's writer raises an error of its own when the disk is full, not OSError.
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
    """Read the tensors of a file, each into new memory."""
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
    # Tensors with stride 0, or several over the same bytes, may be larger than the file.
    if file.num_bytes > file.size:
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: the tensors of {path.name} are larger than the file",
        )
    return {key: file.read(key, tuple(map(whole, file.shape(key)))) for key in file.keys()}  # noqa: SIM118
