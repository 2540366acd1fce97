"""An adapter's folder on this node: what lies in it, and what its content is."""

import hashlib
import stat
from pathlib import Path

from configs.reading import NotRegular, RegularFile
from configs.wire.adapters import AdapterRefusal
from configs.wire.templates import OTHERS_FOLDER
from sources.base import (
    CONFIG_NAME,
    TEMPLATE_NAMES,
    AdapterFolder,
    Fingerprint,
    refuse,
)

_HASH_BYTES = 1 << 20
_LENGTH_BYTES = 8
_MAX_HEADER_BYTES = 64 << 20


def fingerprint(folder: Path) -> Fingerprint:
    """Stat the files that make an adapter; OSError when they are gone, or no regular files."""
    templates = [path for name in TEMPLATE_NAMES if (path := folder / name).is_file()]
    templates += sorted(folder.glob(f"{OTHERS_FOLDER}/*.jinja"))
    paths = [folder / CONFIG_NAME, *sorted(folder.glob("adapter_model*")), *templates]
    stats = [(path, path.stat()) for path in paths]
    for path, found in stats:
        if not stat.S_ISREG(found.st_mode):
            raise NotRegular(f"{path.name} is no regular file")
    return tuple(
        (path.relative_to(folder).as_posix(), found.st_size, found.st_mtime_ns)
        for path, found in stats
    )


def content_digest(folder: AdapterFolder) -> str:
    """blake2b of the adapter's files, names included; equal digests mean equal adapters.

    OSError when a file ends early, is no regular one any more, or is a link out of the root.
    """
    digest = hashlib.blake2b(digest_size=20)
    buffer = memoryview(bytearray(_HASH_BYTES))
    for name, size, _ in folder.fingerprint:
        digest.update(f"{name}:{size}\n".encode())
        with RegularFile(folder.folder / name, folder.root) as file:
            for first in range(0, size, _HASH_BYTES):
                chunk = buffer[: min(_HASH_BYTES, size - first)]
                file.read_into(chunk, first)
                digest.update(chunk)
    return digest.hexdigest()


def check_headers(folder: Path, name: str, root: Path | None = None) -> None:
    """Refuse safetensors whose header is longer than any header, or than its file.

    The header's length is the file's first 8 bytes, so that a reader would allocate what they say.
    """
    for path in sorted(folder.glob("adapter_model*.safetensors")):
        with RegularFile(path, root) as file:
            size = file.size
            start = file.read(0, min(_LENGTH_BYTES, size))
        length = int.from_bytes(start, "little")
        if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            refuse(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {name!r}: {path.name} has {size} bytes and says that its header has "
                f"{length}: it is damaged or no safetensors file; save or upload it again",
            )
