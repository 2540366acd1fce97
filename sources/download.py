"""One adapter's files into one folder: resumed where they broke off, exactly as large as told."""

import time
from dataclasses import dataclass
from pathlib import Path

from sources.base import FoundAdapter, RemoteFile, RemoteSource, Token, Unreachable
from sources.retry import RetryPolicy


@dataclass(frozen=True)
class Download:
    """What is downloaded with whose token, how patiently, and until when (time.monotonic)."""

    source: RemoteSource
    found: FoundAdapter
    token: Token
    patience: RetryPolicy
    deadline: float

    def into(self, folder: Path) -> None:
        """Bring every file; half a file of an earlier try is continued.

        Unreachable when the source breaks off again and again, AdapterError when it says no.
        """
        for file in self.found.files:
            if not _is_whole(folder / file.name, file):
                (folder / file.name).parent.mkdir(exist_ok=True)
                self._bring(file, folder / f"{file.name}.part")
                (folder / f"{file.name}.part").rename(folder / file.name)

    def _bring(self, file: RemoteFile, part: Path) -> None:
        """Read on until the file is whole; attempts count while it is no longer than ever."""
        attempt, most = 0, _size(part)
        while _size(part) != file.size or not part.exists():
            try:
                self._read(file, part)
                fault: Exception = Unreachable(f"{file.name} has another size than it should")
            except Exception as error:
                # Which kinds may pass is the source's to say.
                if not self.source.is_transient(error):
                    raise
                fault = error
            now = _size(part)
            if now == file.size:
                return
            attempt, most = (0, now) if now > most else (attempt + 1, most)
            if attempt >= self.patience.attempts:
                raise Unreachable(f"{file.name} broke off: {type(fault).__name__}") from fault
            self.patience.wait(attempt)

    def _read(self, file: RemoteFile, part: Path) -> None:
        """Append what the source sends; more than the file's size is an error, and thrown away."""
        opened = self.source.open(self.found, file, _size(part), self.token)
        with opened as body, part.open("ab") as output:
            output.truncate(body.start)
            for chunk in body.chunks:
                output.write(chunk)
                if output.tell() > file.size:
                    output.truncate(0)
                    raise Unreachable(f"{file.name} is larger than it should be")
                self.patience.check()
                if time.monotonic() > self.deadline:
                    raise Unreachable(f"{file.name} takes too long")


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _is_whole(path: Path, file: RemoteFile) -> bool:
    return path.is_file() and path.stat().st_size == file.size
