"""Objects by path, in a folder or in a bucket, by Arrow's file systems."""

import importlib
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any, NamedTuple


class Found(NamedTuple):
    """One object of a folder; size: in bytes."""

    name: str
    size: int


class Storage:
    """A tree of objects. Every method blocks, and may be called from any thread.

    An object appears whole or not at all: in a folder it is renamed when it is complete, in a
    bucket the service does the same.
    """

    def __init__(self, root: str) -> None:
        """root: an absolute folder, or a URI. ImportError names what to install."""
        try:
            fs: Any = importlib.import_module("pyarrow.fs")
        except ImportError as error:
            message = "batches.storage is set, but pyarrow is not installed"
            raise ImportError(f"{message}: pip install loray[batches]") from error
        self._kinds = fs.FileType
        self._selector = fs.FileSelector
        try:
            if root.startswith("/"):
                base, path = fs.LocalFileSystem(), root
                base.create_dir(path, recursive=True)
            else:
                base, path = fs.FileSystem.from_uri(root)
        except (OSError, ValueError) as error:
            raise type(error)(f"batches.storage ({root}) cannot be opened: {error}") from error
        self._renames = root.startswith("/")
        self._files = fs.SubTreeFileSystem(path, base)

    def read(self, path: str) -> bytes | None:
        """An object's bytes; None if there is none."""
        try:
            with self._files.open_input_stream(path) as stream:
                content: bytes = stream.read()
        except FileNotFoundError:
            return None
        return content

    def open(self, path: str) -> IO[bytes]:
        """A stream of an object's bytes; FileNotFoundError if there is none."""
        stream: IO[bytes] = self._files.open_input_stream(path)
        return stream

    def write(self, path: str, content: bytes) -> None:
        """Write or replace an object."""
        with self.writer(path) as stream:
            stream.write(content)

    @contextmanager
    def writer(self, path: str) -> Iterator[IO[bytes]]:
        """A stream into an object, which appears when the context ends without an exception."""
        target = f"{path}.{secrets.token_hex(4)}.part" if self._renames else path
        if self._renames:
            self._files.create_dir(path.rpartition("/")[0], recursive=True)
        stream = self._files.open_output_stream(target)
        try:
            yield stream
        except BaseException:
            # A bucket has no way to give up: what was written is an object for a moment.
            stream.close()
            self._files.delete_file(target)
            raise
        stream.close()
        if self._renames:
            self._files.move(target, path)

    def exists(self, path: str) -> bool:
        """Whether there is such an object."""
        return bool(self._files.get_file_info(path).type == self._kinds.File)

    def size(self, path: str) -> int:
        """An object's bytes; FileNotFoundError if there is none."""
        size = self._files.get_file_info(path).size
        if size is None:
            raise FileNotFoundError(path)
        return int(size)

    def objects(self, folder: str) -> list[Found]:
        """The objects directly in a folder, by name."""
        selector = self._selector(folder, allow_not_found=True)
        found = [
            Found(info.base_name, info.size)
            for info in self._files.get_file_info(selector)
            if info.type == self._kinds.File and not info.base_name.endswith(".part")
        ]
        return sorted(found)

    def folders(self, folder: str) -> list[str]:
        """The folders directly in a folder, by name."""
        selector = self._selector(folder, allow_not_found=True)
        infos = self._files.get_file_info(selector)
        return sorted(info.base_name for info in infos if info.type == self._kinds.Directory)

    def delete(self, path: str) -> None:
        """Delete an object, if there is one."""
        if self.exists(path):
            self._files.delete_file(path)

    def delete_folder(self, path: str) -> None:
        """Delete a folder and all in it, if there is one."""
        if self._files.get_file_info(path).type == self._kinds.Directory:
            self._files.delete_dir(path)
