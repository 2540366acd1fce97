"""The disk cache of downloads, with a limit of its size and eviction by last use.

<folder>/entries/<name>   complete entries; the folder's time is that of its last use
<folder>/partial/<name>   downloads that run, or that a later attempt resumes
<folder>/trash            folders that are being deleted

Several processes may share one cache. A user of an entry holds a shared lock (flock) on its
folder; a process that writes or evicts an entry holds an exclusive lock. Locks end with their
process.
"""

import errno
import fcntl
import hashlib
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

_RESUMABLE_S = 3600.0
_POLL_S = 0.05
_DISK_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})


class CacheFull(Exception):
    """There is no room, although all unused entries were evicted; the message says what is full."""


@dataclass
class _Held:
    descriptor: int
    count: int


@dataclass(frozen=True)
class _Trash:
    """A folder that no name leads to any more; descriptor: holds its lock, for its deletion."""

    folder: Path
    descriptor: int

    def delete(self) -> None:
        """Free its disk or memory."""
        shutil.rmtree(self.folder, ignore_errors=True)
        os.close(self.descriptor)


class DiskCache:
    """Folders by name, with at most `max_bytes` together; threads and processes may share it."""

    def __init__(self, folder: Path, max_bytes: int, setting: str = "fetch.cache_bytes") -> None:
        """setting: the name of max_bytes in messages."""
        self._folder = folder
        self._max_bytes = max_bytes
        self._setting = setting
        self._lock = threading.Lock()
        self._held: dict[str, _Held] = {}
        self._reserved: dict[str, int] = {}

    def hold(self, origin: str) -> Path | None:
        """Return the entry's folder, protected from eviction until `release`; None if absent."""
        name = _name(origin)
        path = self._folder / "entries" / name
        with self._lock:
            held = self._held.get(name)
            if held is not None:
                held.count += 1
                return path
            descriptor = _lock(path, fcntl.LOCK_SH | fcntl.LOCK_NB)
            if descriptor is None:
                return None
            os.utime(path)
            self._held[name] = _Held(descriptor, 1)
            return path

    def release(self, origin: str) -> None:
        """End one use of an entry."""
        name = _name(origin)
        with self._lock:
            held = self._held[name]
            held.count -= 1
            if held.count == 0:
                os.close(self._held.pop(name).descriptor)

    def store(self, origin: str, num_bytes: int, write: Callable[[Path], None]) -> Path:
        """Return the entry's folder, held; `write` writes it unless another process did.

        The files of a failed `write` are kept for an hour, for the next attempt. Raises CacheFull
        when there is no room; then nothing is kept.
        """
        name = _name(origin)
        while True:
            found = self.hold(origin)
            if found is not None:
                return found
            with self._partial(name) as partial:
                if partial is None:
                    time.sleep(_POLL_S)
                elif (self._folder / "entries" / name).exists():
                    partial.rmdir()
                else:
                    self._write(name, num_bytes, partial, write)

    def discard(self, origin: str) -> None:
        """Delete the files of a failed write."""
        self._remove(self._folder / "partial" / _name(origin))

    def remove(self, origin: str) -> None:
        """Delete an entry unless it is in use."""
        name = _name(origin)
        with self._lock:
            trash = None if name in self._held else self._to_trash(self._folder / "entries" / name)
        if trash is not None:
            trash.delete()  # Without the lock: to free much memory takes a while.

    def clear(self) -> None:
        """Delete all that is not in use, and the cache's own folder if nothing is left."""
        parts = [self._folder / name for name in ("entries", "partial", "trash")]
        for path in (path for part in parts for path in _folders(part)):
            self._remove(path)
        with suppress(OSError):  # Something is in use.
            for part in (part for part in parts if part.exists()):
                part.rmdir()
            self._folder.rmdir()

    def check(self) -> None:
        """Assert that the size is within its limit and nothing is left over; call it when idle."""
        assert not self._reserved, self._reserved
        assert self._used() <= self._max_bytes, (self._used(), self._max_bytes)
        assert not _folders(self._folder / "trash")
        assert all(held.count > 0 for held in self._held.values())

    def _write(
        self, name: str, num_bytes: int, partial: Path, write: Callable[[Path], None]
    ) -> None:
        try:
            self._make_room(name, num_bytes)
            write(partial)
            entries = self._folder / "entries"
            entries.mkdir(exist_ok=True)
            partial.rename(entries / name)
        except CacheFull:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        except OSError as error:
            if error.errno not in _DISK_ERRORS:
                raise
            shutil.rmtree(partial, ignore_errors=True)
            raise CacheFull("the disk is full") from error
        finally:
            with self._lock:
                self._reserved.pop(name, None)

    @contextmanager
    def _partial(self, name: str) -> Iterator[Path | None]:
        """Lock the folder to write; None while another process writes it."""
        path = self._folder / "partial" / name
        # mkdir looks twice: the folder it met is no folder if it became an entry in between.
        with suppress(FileExistsError):
            path.mkdir(parents=True, exist_ok=True)
        # The lock must not block: a complete folder is renamed to an entry, and users of the entry
        # may hold their lock for long.
        descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            yield None
            return
        try:
            yield path
        finally:
            os.close(descriptor)

    def _make_room(self, name: str, num_bytes: int) -> None:
        """Evict until the entry fits the limit and the disk."""
        with self._lock:
            if num_bytes > self._max_bytes:
                raise CacheFull(f"the cache has {self._max_bytes} bytes ({self._setting})")
            self._reserved[name] = num_bytes
            for victim in self._stale():
                self._remove(victim)
            used = self._used()
            victims = self._by_last_use()
            while used > self._max_bytes or shutil.disk_usage(self._folder).free < num_bytes:
                if not victims:
                    raise CacheFull("the cache or its disk is full of adapters that are in use")
                size = _size(victims[0])
                used -= size if self._remove(victims.pop(0)) else 0

    def _used(self) -> int:
        """Return the bytes of entries, reservations and other processes' downloads."""
        whole = sum(_size(path) for path in _folders(self._folder / "entries"))
        partial = sum(
            _size(path)
            for path in _folders(self._folder / "partial")
            if path.name not in self._reserved
        )
        return whole + partial + sum(self._reserved.values())

    def _stale(self) -> list[Path]:
        """Return downloads that were never resumed, and folders that an ended process left."""
        old = time.time() - _RESUMABLE_S
        partial = [p for p in _folders(self._folder / "partial") if _used_at(p) < old]
        return [*_folders(self._folder / "trash"), *partial]

    def _by_last_use(self) -> list[Path]:
        """Return the folders that may be evicted: partial downloads first, then entries."""
        partial = _folders(self._folder / "partial")
        entries = [
            path for path in _folders(self._folder / "entries") if path.name not in self._held
        ]
        return [*sorted(partial, key=_used_at), *sorted(entries, key=_used_at)]

    def _remove(self, path: Path) -> bool:
        """Delete a folder unless it is in use; returns whether it was deleted."""
        trash = self._to_trash(path)
        if trash is not None:
            trash.delete()
        return trash is not None

    def _to_trash(self, path: Path) -> "_Trash | None":
        """Move a folder to the trash, for its deletion; None if it is in use."""
        descriptor = _lock(path, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if descriptor is None:
            return None
        try:
            trash = self._folder / "trash"
            trash.mkdir(exist_ok=True)
            return _Trash(path.rename(trash / uuid.uuid4().hex), descriptor)
        except OSError:
            os.close(descriptor)
            raise


def _lock(path: Path, operation: int) -> int | None:
    """Lock a folder; None if it is absent, locked by another process, or was moved meanwhile."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    except FileNotFoundError:
        return None
    try:
        fcntl.flock(descriptor, operation)
        # Another process may have renamed it between opening and locking.
        opened = os.fstat(descriptor)
        named = path.stat()
        if (opened.st_dev, opened.st_ino) == (named.st_dev, named.st_ino):
            return descriptor
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(descriptor)
        raise
    os.close(descriptor)
    return None


def _name(origin: str) -> str:
    return hashlib.blake2b(origin.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def _folders(parent: Path) -> list[Path]:
    try:
        return list(parent.iterdir())
    except FileNotFoundError:
        return []


def _size(folder: Path) -> int:
    try:
        return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    except (FileNotFoundError, NotADirectoryError):
        return 0


def _used_at(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0
