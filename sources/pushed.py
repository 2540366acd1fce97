"""Adapters that trainers push: files in memory, shared by all processes of a node.

An ingress replica writes them; driver replicas and ranks of the node read them. Their digest is
computed while they arrive, so it is not that of the same files from another source.
"""

import hashlib
import os
import stat
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import NoReturn

from configs.adapters import PushConfig
from configs.reading import FileChanged, RegularFile
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.base import CONFIG_NAME, FoundAdapter, check_size, check_texts, refuse
from sources.cache import CacheFull, DiskCache

SHARED_MEMORY = Path("/dev/shm")
"""The folder of POSIX shared memory: multiprocessing.shared_memory and shm_open make files here."""

_WEIGHTS_NAME = "adapter_model.safetensors"
_DIGEST_BYTES = 20
_THREADS = min(8, os.cpu_count() or 1)
PIECE_BYTES = 1 << 20
"""Bytes of weights that one thread copies and hashes at a time."""

_PREFIX = "pushed:"
_LIMITS = "the lower of adapters.max_file_bytes and adapters.push.max_bytes"


def origin_of(digest: str) -> str:
    """The origin of pushed content."""
    return f"{_PREFIX}{digest}"


def is_pushed(origin: str) -> bool:
    """Whether an origin is that of pushed content."""
    return origin.startswith(_PREFIX)


class IncomingWeights:
    """A weights file that is being written; it has no name, so it ends with its process.

    Its digest is that of the digests of its pieces, so that several threads can hash it.
    """

    def __init__(self, folder: Path, name: str, max_bytes: int) -> None:
        """name: the adapter's, for messages. max_bytes: of the file."""
        self._descriptor = os.open(folder, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="push")
        self._digests: list[bytes] = []
        self._name = name
        self._max_bytes = max_bytes
        self.size = 0

    def write(self, data: bytes | bytearray | memoryview) -> None:
        """Append bytes, as `copy` does."""

        def read(buffer: memoryview, offset: int) -> None:
            buffer[:] = whole[offset : offset + len(buffer)]

        with memoryview(data) as whole:
            self.copy(read, len(whole))

    def copy(self, read: Callable[[memoryview, int], None], size: int) -> None:
        """Append `size` bytes; AdapterError beyond the limit or the memory of the node.

        read: reads into a buffer from an offset of the source on; threads call it side by side.
        Only the last call may append other than whole pieces.
        """
        begin = self.size
        assert begin % PIECE_BYTES == 0, begin
        self.size += size
        check_size(self.size, self._name, self._max_bytes, _LIMITS)

        offsets = range(0, size, PIECE_BYTES)

        def keep(thread: int) -> list[bytes]:
            buffer = memoryview(bytearray(PIECE_BYTES))
            digests = []
            for first in offsets[thread::_THREADS]:
                # A copy: what is hashed is what is kept, whatever writes to the source meanwhile.
                piece = buffer[: min(PIECE_BYTES, size - first)]
                read(piece, first)
                self._put(piece, begin + first)
                # Processors compute this one in hardware, almost twice as fast as blake2b.
                digests.append(hashlib.sha256(piece).digest())
            return digests

        kept = list(self._threads.map(keep, range(_THREADS)))
        self._digests += [kept[k % _THREADS][k // _THREADS] for k in range(len(offsets))]

    def digest(self, config: bytes) -> str:
        """The digest of the adapter with this adapter_config.json."""
        digest = hashlib.blake2b(digest_size=_DIGEST_BYTES)
        for part in (self.size.to_bytes(8, "little"), *self._digests, config):
            digest.update(part)
        return digest.hexdigest()

    def link(self, path: Path) -> None:
        """Give the file a name."""
        # Only with a folder's descriptor does Python have the system follow the link.
        source = f"/proc/self/fd/{self._descriptor}"
        os.link(source, path, src_dir_fd=self._descriptor, follow_symlinks=True)

    def close(self) -> None:
        """Free the memory, unless the file has a name."""
        self._threads.shutdown(cancel_futures=True)
        os.close(self._descriptor)

    def _put(self, piece: memoryview, offset: int) -> None:
        try:
            while piece:
                written = os.pwrite(self._descriptor, piece, offset)
                piece, offset = piece[written:], offset + written
        except OSError as error:
            _refuse_full(self._name, self.size, error)


class PushedFiles:
    """The pushed adapters on this node, by digest; any process and thread may use it."""

    def __init__(self, config: PushConfig, max_file_bytes: int) -> None:
        """max_file_bytes: of one adapter."""
        # Each process reads its own: the user may have another number on another node.
        self._folder = Path(config.folder.replace("{uid}", str(os.getuid())))
        self._max_bytes = min(max_file_bytes, config.max_bytes)
        self._cache = DiskCache(self._folder, config.max_bytes, "adapters.push.max_bytes")

    @contextmanager
    def incoming(self, name: str) -> Iterator[IncomingWeights]:
        """A weights file to write; it is freed at the end unless `store` kept it."""
        self._make_folder(name)
        try:
            weights = IncomingWeights(self._folder, name, self._max_bytes)
        except OSError as error:
            _refuse_full(name, 0, error)
        try:
            yield weights
        finally:
            weights.close()

    def store(self, name: str, config: bytes, weights: IncomingWeights) -> str:
        """Keep an adapter that has arrived; returns its digest, held until `release`."""
        check_texts([(CONFIG_NAME, len(config))], name)
        digest, size = weights.digest(config), weights.size + len(config)

        def write(folder: Path) -> None:
            for old in folder.iterdir():  # An attempt that a process left.
                old.unlink()
            (folder / CONFIG_NAME).write_bytes(config)
            weights.link(folder / _WEIGHTS_NAME)

        try:
            self._cache.store(origin_of(digest), size, write)
        except (CacheFull, OSError) as error:
            _refuse_full(name, size, error)
        return digest

    def store_content(self, name: str, config: bytes, weights: bytes) -> str:
        """Keep an adapter that another node sent; returns its digest, held until `release`."""
        with self.incoming(name) as file:
            file.write(weights)
            return self.store(name, config, file)

    def hold(self, digest: str) -> Path | None:
        """The folder of an adapter, kept until `release`; None if this node does not have it."""
        return self._cache.hold(origin_of(digest)) if self._is_own() else None

    def release(self, digest: str, *, forget: bool = False) -> None:
        """End one use; forget: delete the files if this was the last use on this node."""
        self._cache.release(origin_of(digest))
        if forget:
            self._cache.remove(origin_of(digest))

    def content(self, digest: str) -> tuple[bytes, bytes] | None:
        """adapter_config.json and the weights, for another node; None if they are not here."""
        folder = self.hold(digest)
        if folder is None:
            return None
        try:
            return (folder / CONFIG_NAME).read_bytes(), (folder / _WEIGHTS_NAME).read_bytes()
        finally:
            self.release(digest)

    def clear(self) -> None:
        """Delete what no process holds: the server has ended."""
        if self._is_own():
            self._cache.clear()

    def _make_folder(self, name: str) -> None:
        """Make the folder. One that another user made could replace what it holds."""
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        except OSError as error:
            _refuse_full(name, 0, error)
        if not self._is_own():
            refuse(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {name!r} cannot be kept: {self._folder} belongs to another user: give "
                "this server a folder of its own (adapters.push.folder)",
            )

    def _is_own(self) -> bool:
        """Whether the folder exists and is this user's; another user's may not even be readable."""
        try:
            found = self._folder.lstat()
        except OSError:
            return False
        return stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid()


class PushedSource:
    """The pushed adapters that a driver replica serves, by name; any thread may call."""

    def __init__(self, files: PushedFiles) -> None:
        self.files = files
        self._digests: dict[str, str] = {}
        self._lock = threading.Lock()

    def resolve(self, reference: AdapterReference) -> FoundAdapter:
        """The content of a name; AdapterError for one that was not pushed, or with a revision."""
        digest = self._digests.get(reference.id)
        if digest is None or reference.revision is not None:
            hint = "" if digest is None else "; pushed adapters have no revisions"
            refuse(
                AdapterRefusal.NOT_FOUND,
                f"adapter {reference.id!r} was not pushed to this server{hint}",
            )
        return found(reference.id, digest)

    def serve(self, name: str, digest: str | None) -> None:
        """Set the content of a name; None forgets it."""
        with self._lock:
            if digest is None:
                self._digests.pop(name, None)
            else:
                self._digests[name] = digest

    def fetch(self, found: FoundAdapter) -> Path:
        """The folder of pushed content, held; AdapterError if this node does not have it."""
        assert found.digest is not None
        folder = self.files.hold(found.digest)
        if folder is None:
            refuse(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {found.reference.id!r}: its pushed files are gone: push it again",
            )
        return folder

    def release(self, origin: str) -> None:
        """End one use; content that no name serves any more is deleted."""
        digest = origin.removeprefix(_PREFIX)
        with self._lock:
            served = digest in self._digests.values()
        self.files.release(digest, forget=not served)


def found(name: str, digest: str) -> FoundAdapter:
    """Pushed content under its name."""
    reference = AdapterReference(AdapterSource.PUSHED, name)
    return FoundAdapter(reference, origin_of(digest), lasting=False, digest=digest)


def read_shared_memory(segment: str, size: int | None, into: IncomingWeights, name: str) -> None:
    """Copy a segment of POSIX shared memory on this node; AdapterError if that fails.

    size: bytes to copy, None for the whole segment, which may be padded to whole pages.
    """
    if "/" in segment or "\0" in segment or segment in ("", ".", ".."):
        message = f"`shared_memory` must be a segment's plain name, not {segment!r}"
        raise AdapterError(AdapterRefusal.UNSUPPORTED, message)
    try:
        with RegularFile(SHARED_MEMORY / segment, SHARED_MEMORY) as file:
            _copy_segment(file, file.size if size is None else size, into)
    except OSError as error:
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"adapter {name!r}: shared memory {segment!r} cannot be read: {error}; keep the "
            "segment until the reply, on the node that the request goes to, readable for the "
            "server's user, or send the weights in a form (`adapter_model`)",
            error,
        )


def _copy_segment(file: RegularFile, size: int, into: IncomingWeights) -> None:
    if size > file.size:
        raise FileChanged(f"it has {file.size} bytes, `size` says {size}")
    into.copy(file.read_into, size)


def _refuse_full(name: str, num_bytes: int, error: Exception) -> NoReturn:
    refuse(
        AdapterRefusal.UNAVAILABLE,
        f"adapter {name!r} with {num_bytes} bytes could not be kept in memory: {error}; wait until "
        "requests over old versions have ended, or give pushes more room (adapters.push)",
        error,
    )
