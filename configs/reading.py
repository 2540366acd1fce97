"""Files that others may write at any time: opened without waiting, read by position.

A pipe makes whoever opens it wait for a writer, and a mapped file that is cut short ends the
process that reads it (SIGBUS). So files are opened with O_NONBLOCK, must be regular ones, and are
never mapped.
"""

import os
import stat
import weakref
from pathlib import Path
from typing import Self

_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC


class NotRegular(OSError):
    """What lies there is a folder, a pipe, a socket or a device."""


class FileChanged(OSError):
    """The file is not what it was when it was opened."""


class OutsideRoot(OSError):
    """The path leads out of the folder that it must stay in."""


class RegularFile:
    """An open file. size: its bytes when it was opened. Any thread may read."""

    def __init__(self, path: Path, within: Path | None = None) -> None:
        """within: the folder, links resolved, that the opened file itself must lie in.

        OSError if there is no such file, NotRegular or OutsideRoot if it is not one to be read.
        """
        self.name = path.name
        self.descriptor = os.open(path, _FLAGS)
        # At the end of the process the system closes files by itself.
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
        """Close the file; it closes itself with its last reference too."""
        self._close()

    def read_into(self, buffer: memoryview, offset: int) -> None:
        """Fill a writable buffer of bytes from `offset` on; FileChanged if the file ends before."""
        done = 0
        while done < len(buffer):
            count = os.preadv(self.descriptor, [buffer[done:]], offset + done)
            if not count:
                raise FileChanged(f"{self.name} ended early: it was changed while it was read")
            done += count

    def read(self, offset: int, count: int) -> bytes:
        """`count` bytes from `offset` on; FileChanged if the file ends before."""
        data = bytearray(count)
        self.read_into(memoryview(data), offset)
        return bytes(data)

    def check_unchanged(self) -> None:
        """FileChanged if it was written to since it was opened."""
        if _version(os.fstat(self.descriptor)) != self._opened:
            raise FileChanged(f"{self.name} was changed while it was read")

    def _check(self, within: Path | None) -> None:
        found = os.fstat(self.descriptor)
        self.size = found.st_size
        self._opened = _version(found)
        if not stat.S_ISREG(found.st_mode):
            raise NotRegular(f"{self.name} is no regular file")
        # Not the path, which may lead elsewhere by now, but what was opened.
        if within is not None:
            opened = Path(os.readlink(f"/proc/self/fd/{self.descriptor}"))
            if not opened.is_relative_to(within):
                raise OutsideRoot(f"{self.name} is a link to a file outside {within}")


def read_text(path: Path, most_bytes: int, within: Path | None = None) -> str:
    """A small UTF-8 file whole; OSError as RegularFile, ValueError if it is larger or no UTF-8."""
    return read_small(path, most_bytes, within).decode("utf-8")


def read_small(path: Path, most_bytes: int, within: Path | None = None) -> bytes:
    """A small file whole; OSError as RegularFile, ValueError if it is larger."""
    with RegularFile(path, within) as file:
        if file.size > most_bytes:
            raise ValueError(f"{path.name} has {file.size} bytes, more than {most_bytes}")
        return file.read(0, file.size)


def _version(found: os.stat_result) -> tuple[int, int]:
    return found.st_size, found.st_mtime_ns
