"""Download one adapter's files into a folder; broken downloads are resumed."""

import hashlib
import time
from dataclasses import dataclass
from pathlib import Path

from sources.base import FoundAdapter, RemoteFile, RemoteSource, Token, Unreachable
from sources.retry import RetryPolicy, fault_of


@dataclass(frozen=True)
class Download:
    """A download of all files of an adapter.

    source, found: the adapter and its source.
    token: the hub token to use.
    retry: attempts and waits.
    deadline: of time.monotonic.
    """

    source: RemoteSource
    found: FoundAdapter
    token: Token
    retry: RetryPolicy
    deadline: float

    def into(self, folder: Path) -> None:
        """Download every file; partial files of an earlier attempt are continued.

        Raises Unreachable when all attempts break off, AdapterError when the source refuses.
        """
        for file in self.found.files:
            if not _is_whole(folder / file.name, file):
                (folder / file.name).parent.mkdir(exist_ok=True)
                self._fetch(file, folder / f"{file.name}.part")
                (folder / f"{file.name}.part").rename(folder / file.name)

    def _fetch(self, file: RemoteFile, part: Path) -> None:
        """Read until the file is complete; only attempts without progress count."""
        attempt, longest = 0, _size(part)
        while not _has_arrived(part, file):
            try:
                self._read(file, part)
                if _has_arrived(part, file):
                    return
                came = "fewer" if part.exists() else "other"
                fault: Exception = Unreachable(f"{came} bytes came than its source had announced")
            except Exception as error:
                # The source knows which of its errors are transient.
                if not self.source.is_transient(error):
                    raise
                fault = error
            now = _size(part)
            attempt, longest = (0, now) if now > longest else (attempt + 1, longest)
            if attempt >= self.retry.attempts:
                raise Unreachable(f"{file.name} broke off: {fault_of(fault)}") from fault
            self.retry.wait(attempt, fault)

    def _read(self, file: RemoteFile, part: Path) -> None:
        """Append the source's bytes; more than the file's size are an error."""
        opened = self.source.open(self.found, file, _size(part), self.token)
        with opened as body, part.open("ab") as output:
            output.truncate(body.start)
            for chunk in body.chunks:
                output.write(chunk)
                if output.tell() > file.size:
                    output.truncate(0)
                    raise Unreachable(f"{file.name} is larger than it should be")
                self.retry.check()
                if time.monotonic() > self.deadline:
                    raise Unreachable(f"{file.name} takes too long")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _has_arrived(part: Path, file: RemoteFile) -> bool:
    """Return whether a download is complete; one of other bytes is deleted."""
    if not _is_whole(part, file):
        return False
    if file.sha256:
        with part.open("rb") as content:
            found = hashlib.file_digest(content, "sha256").hexdigest()
        if found != file.sha256:
            part.unlink()
            return False
    return True


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size
