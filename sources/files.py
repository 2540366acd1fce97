"""An adapter's folder on this node: the fingerprint and the digest of its files."""

import hashlib
import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from configs.reading import (
    DamagedFile,
    NotRegular,
    RegularFile,
    is_encodable,
    safetensors_header_bytes,
)
from configs.wire.adapters import AdapterRefusal
from configs.wire.templates import OTHERS_FOLDER
from sources.base import (
    CONFIG_NAME,
    HEADS_CONFIG_NAME,
    HEADS_NAME,
    MLX_NAME,
    TEMPLATE_NAMES,
    AdapterFolder,
    Fingerprint,
    refuse,
)

_HASH_BYTES = 1 << 20
_HASH_THREADS = 4


def fingerprint(folder: Path) -> Fingerprint:
    """Stat an adapter's files; OSError when one is missing or not a regular file."""
    # Catalogues of thousands of folders are looked at every few seconds: one listing for each.
    names = set(os.listdir(folder))
    present = (folder / name for name in TEMPLATE_NAMES if name in names)
    templates = [path for path in present if path.is_file()]
    if OTHERS_FOLDER in names:
        templates += sorted(folder.glob(f"{OTHERS_FOLDER}/*.jinja"))
    weights = [folder / name for name in sorted(names) if name.startswith("adapter_model")]
    if not weights and is_mlx(folder):
        weights = [folder / MLX_NAME]
    heads = [folder / name for name in (HEADS_NAME, HEADS_CONFIG_NAME) if HEADS_NAME in names]
    paths = [folder / CONFIG_NAME, *weights, *(p for p in heads if p.name in names), *templates]
    stats = [(path, path.stat()) for path in paths]
    for path, found in stats:
        if not is_encodable(path.name):
            raise NotRegular(f"{path.name!r} is no name in UTF-8: rename the file")
        if not stat.S_ISREG(found.st_mode):
            raise NotRegular(f"{path.name} is no regular file")
    return tuple(
        (path.relative_to(folder).as_posix(), found.st_size, found.st_mtime_ns)
        for path, found in stats
    )


def is_mlx(folder: Path) -> bool:
    """Return whether the weights are those of mlx_lm alone."""
    return (folder / MLX_NAME).is_file() and not any(folder.glob("adapter_model*.safetensors"))


def content_digest(folder: AdapterFolder) -> str:
    """Return a digest of the adapter's files, names included: equal ones mean equal adapters.

    It is blake2b over names, sizes and the sha256 of each MiB: several threads hash a large file.
    Raises OSError when a file ends early, is no longer a regular file, or links out of the root.
    """
    digest = hashlib.blake2b(digest_size=20)
    for name, size, _ in folder.fingerprint:
        digest.update(f"{name}:{size}\n".encode())
        with RegularFile(folder.folder / name, folder.root) as file:
            for piece in _piece_digests(file, size):
                digest.update(piece)
    return digest.hexdigest()


def _piece_digests(file: RegularFile, size: int) -> list[bytes]:
    """Return sha256 of each piece of a file, in order; processors compute it in hardware."""
    offsets = range(0, size, _HASH_BYTES)

    def digests(offsets: range) -> list[bytes]:
        buffer = memoryview(bytearray(_HASH_BYTES))
        found = []
        for first in offsets:
            piece = buffer[: min(_HASH_BYTES, size - first)]
            file.read_into(piece, first)
            found.append(hashlib.sha256(piece).digest())
        return found

    if len(offsets) <= _HASH_THREADS:
        return digests(offsets)
    # Threads of its own: a file whose disk hangs must not keep others waiting.
    with ThreadPoolExecutor(_HASH_THREADS, thread_name_prefix="hash") as threads:
        parts = list(
            threads.map(digests, (offsets[k::_HASH_THREADS] for k in range(_HASH_THREADS)))
        )
    return [parts[k % _HASH_THREADS][k // _HASH_THREADS] for k in range(len(offsets))]


def check_headers(folder: Path, name: str, root: Path | None = None) -> None:
    """Refuse safetensors files whose header's length cannot be right."""
    for path in sorted(folder.glob("adapter_model*.safetensors")):
        try:
            with RegularFile(path, root) as file:
                safetensors_header_bytes(file)
        except DamagedFile as error:
            refuse(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {name!r}: {error}: it is damaged or not a safetensors file; save or "
                "upload it again",
                error,
            )
