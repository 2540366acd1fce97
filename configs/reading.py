"""Read files that other processes may write to at any time.

Opening a pipe blocks until it has a writer, and a mapped file that is cut short kills its reader
(SIGBUS). So files are opened with O_NONBLOCK, must be regular files, and are never mapped.
"""

import json
import os
import stat
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Self

SAFETENSORS_LENGTH_BYTES = 8
MAX_SAFETENSORS_HEADER_BYTES = 64 << 20

_VOCABULARIES = (
    "tokenizer.json",
    "vocab.json",
    "vocab.txt",
    "*.model",
    "*.tiktoken",
    "tekken.json",
)
_MOST_BUFFERS = 1024
"""Buffers of one call: Linux's IOV_MAX."""

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotRegular(OSError):
    """The path names a folder, a pipe, a socket or a device."""


class FileChanged(OSError):
    """The file was written to after it was opened."""


class OutsideRoot(OSError):
    """The path leads out of the folder that it must stay in."""


class DamagedFile(ValueError):
    """The file is incomplete or of another format; the message says what is wrong."""


class RegularFile:
    """An open file that any thread may read.

    name: the last part of its path. size: its bytes when it was opened.
    """

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """Open the file.

        within: a folder, its own links resolved; links must not lead out of it.
        Raises OSError if there is no such file, NotRegular or OutsideRoot if it must not be read.
        """
        self.name = path.name
        self.descriptor = os.open(path, _FLAGS)
        # At the end of the process the system closes files.
        self._close = weakref.finalize(self, os.close, self.descriptor)
        self._close.atexit = False
        try:
            self._check(within)
        except OSError:
            self._close()
            raise

    def __enter__(self) -> Self:
        """Return the file itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; the end of its last reference closes it too."""
        self._close()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Read into a writable buffer from byte `offset` on; FileChanged if the file is shorter."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            if not count:
                raise FileChanged(f"{self.name} ended early: it was changed while it was read")
            done += count

    def scatter(self, buffers: Sequence[memoryview], offset: int) -> None:
        """Read what follows byte `offset` into one buffer after the other, in few calls.

        FileChanged if the file is shorter.
        """
        for first in range(0, len(buffers), _MOST_BUFFERS):
            some = buffers[first : first + _MOST_BUFFERS]
            count = os.preadv(self.descriptor, some, offset)
            for buffer in some:
                done = min(count, len(buffer))
                if done < len(buffer):  # The call was cut short.
                    self.read_into(buffer[done:], offset + done)
                count -= done
                offset += len(buffer)

    def read(self, offset: int, count: int) -> bytes:
        """Return `count` bytes from `offset` on; FileChanged if the file is shorter."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def check_unchanged(self) -> None:
        """Raise FileChanged if the file was written to since it was opened."""
        if _version(os.fstat(self.descriptor)) != self._opened:
            raise FileChanged(f"{self.name} was changed while it was read")

    def _check(self, within: Path | None) -> None:
        found = os.fstat(self.descriptor)
        self.size = found.st_size
        self._opened = _version(found)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegular(f"{self.name} is no regular file")
        # The path may have changed since, so the opened file itself is looked up.
        if within is not None:
            opened = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
            if not opened.is_relative_to(within):
                raise OutsideRoot(f"{self.name} is a link to a file outside {within}")


def has_tokenizer(folder: Path) -> bool:
    """Return whether a folder has a tokenizer's vocabulary, in any of its formats."""
    return any(path.is_file() for name in _VOCABULARIES for path in folder.glob(name))


def is_encodable(text: str) -> bool:
    """Return whether a text can be written as UTF-8.

    Names of files that are no UTF-8, and halves of surrogate pairs in JSON, cannot.
    """
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def read_text(path: Path, max_bytes: int, within: Path | None = None) -> str:
    """Read a whole UTF-8 file of at most `max_bytes`.

    Raises OSError as RegularFile does, ValueError if it is larger or not UTF-8.
    """
    return read_small(path, max_bytes, within).decode("utf-8")


def read_object(path: Path, max_bytes: int, within: Path | None = None) -> dict[str, Any]:
    """Read a JSON object of at most `max_bytes`.

    Raises OSError as RegularFile does, ValueError if it is larger, or anything else than an object.
    """
    try:
        found = json.loads(read_text(path, max_bytes, within))
    except RecursionError as error:
        raise ValueError(f"{path.name} is nested too deep") from error
    if not isinstance(found, dict):
        raise ValueError(f"{path.name} must hold an object")
    return found


def read_small(path: Path, max_bytes: int, within: Path | None = None) -> bytes:
    """Read a whole file of at most `max_bytes`; OSError as RegularFile, ValueError if larger."""
    with RegularFile(path, within) as file:
        if file.size > max_bytes:
            raise ValueError(f"{path.name} has {file.size} bytes, more than {max_bytes}")
        return file.read(0, file.size)


def safetensors_header_bytes(file: RegularFile) -> int:
    """Return the length of a safetensors file's header, which its first 8 bytes say.

    Raises DamagedFile if it is longer than the file or any real header: a reader would allocate it.
    """
    length = 0
    if file.size >= SAFETENSORS_LENGTH_BYTES:
        length = int.from_bytes(file.read(0, SAFETENSORS_LENGTH_BYTES), "little")
    if not 0 < length <= min(MAX_SAFETENSORS_HEADER_BYTES, file.size - SAFETENSORS_LENGTH_BYTES):
        raise DamagedFile(
            f"{file.name} has {file.size} bytes and says that its header has {length}"
        )
    return length


def _version(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
