"""An adapter's folder on this node: what lies in it, and what its content is."""

import hashlib
from pathlib import Path

from configs.adapters import AdapterRefusal
from configs.templates import OTHERS_FOLDER
from sharding.sources.base import (
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
    """Stat the files that make an adapter; OSError when they are gone."""
    templates = [path for name in TEMPLATE_NAMES if (path := folder / name).is_file()]
    templates += sorted(folder.glob(f"{OTHERS_FOLDER}/*.jinja"))
    paths = [folder / CONFIG_NAME, *sorted(folder.glob("adapter_model*")), *templates]
    stats = [(path, path.stat()) for path in paths]
    return tuple(
        (path.relative_to(folder).as_posix(), stat.st_size, stat.st_mtime_ns)
        for path, stat in stats
    )


def content_digest(folder: AdapterFolder) -> str:
    """blake2b of the adapter's files, names included; equal digests mean equal adapters."""
    digest = hashlib.blake2b(digest_size=20)
    for name, size, _ in folder.fingerprint:
        digest.update(f"{name}:{size}\n".encode())
        with (folder.folder / name).open("rb") as file:
            while chunk := file.read(_HASH_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def check_headers(folder: Path, name: str) -> None:
    """Refuse safetensors whose header is longer than any header, or than its file.

    The header's length is the file's first 8 bytes, so that a reader would allocate what they say.
    """
    for path in sorted(folder.glob("adapter_model*.safetensors")):
        size = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        if size < _LENGTH_BYTES or length > min(_MAX_HEADER_BYTES, size - _LENGTH_BYTES):
            refuse(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {name!r}: {path.name} has {size} bytes and says that its header has "
                f"{length}: it is damaged or no safetensors file; save or upload it again",
            )
