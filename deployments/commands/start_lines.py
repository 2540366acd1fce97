"""What the ranks log about the progress of a start, for the terminal of `loray serve`."""

import re
from collections.abc import Iterator
from pathlib import Path

_PROGRESS = re.compile(rb"INFO rank-0 (\w[\w ,-]*: \d+(?: of \d+)?(?: \([^)]*\))? in \d+ s.*)")


class StartLines:
    """New progress lines of rank 0 in the log files of this machine's Ray."""

    def __init__(self, logs: Path) -> None:
        """logs: the folder of Ray's session."""
        self._logs = logs
        self._read: dict[Path, int] = {}

    def new(self) -> Iterator[str]:
        """The lines since the last call, whole ones only."""
        for path in sorted(self._logs.glob("worker-*.err")):
            start = self._read.get(path, 0)
            with path.open("rb") as file:
                file.seek(start)
                text, _, _ = file.read().rpartition(b"\n")
            if text:
                self._read[path] = start + len(text) + 1
            for found in _PROGRESS.finditer(text):
                yield found[1].decode("utf-8", "replace")
