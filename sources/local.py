"""Adapters in folders of this node, under the configured roots only."""

import os
import posixpath
import time
from pathlib import Path

from configs.reading import is_encodable
from configs.wire.adapters import AdapterReference, AdapterRefusal, AdapterSource
from sources.base import (
    CONFIG_NAME,
    PACKAGE_ROOT,
    Fingerprint,
    FoundAdapter,
    check_size,
    refuse,
)
from sources.files import fingerprint

_LONGEST_ID = 255
"""Bytes: the most that file systems allow for the name of a folder."""
_CLOCK_TICK_NS = 100_000_000


class LocalSource:
    """Folders under the roots; `id@revision` is a folder of that whole name."""

    def __init__(self, roots: tuple[str, ...], max_bytes: int) -> None:
        """Relative roots are looked up in the working directory, then beside the package."""
        self._given = [_find_root(root) for root in roots]
        self._max_bytes = max_bytes

    @property
    def _roots(self) -> list[Path]:
        """The roots without links. Tools that copy folders to a node move a link to the new one."""
        return [_resolved(root) for root in self._given]

    def resolve(self, reference: AdapterReference) -> FoundAdapter:
        """Return the folder that the reference names, after a check of its size.

        Raises AdapterError if there is none, it is too large, or a file links out of its root.
        """
        name = reference.id
        if reference.revision is not None:
            name = f"{name}@{reference.revision}"
        root, folder = self._find(name)
        files = fingerprint(folder)
        if not all(_resolved(folder / file).is_relative_to(root) for file, _, _ in files):
            refuse(
                AdapterRefusal.FORBIDDEN,
                f"adapter {name!r} has a link to a file outside the server's local adapter roots",
            )
        check_size(sum(size for _, size, _ in files), name, self._max_bytes)
        origin = origin_of(folder, files)
        return FoundAdapter(reference, origin, folder=folder, root=root, lasting=False)

    def reference_of(self, folder: str) -> AdapterReference | None:
        """Return the reference of a folder under the roots; None for any other path."""
        if "\0" in folder:
            return None
        path = _resolved(Path(folder))
        for root in self._roots:
            if path != root and path.is_relative_to(root):
                return AdapterReference(AdapterSource.LOCAL, path.relative_to(root).as_posix())
        return None

    def listing(self) -> list[str]:
        """Return the ids of the adapters directly under the roots.

        Hidden folders are left out, and those of a name that no request can spell.
        """
        found = (path for root in self._roots for path in root.glob(f"*/{CONFIG_NAME}"))
        # Roots may have equal names, or be one folder: the first one that has a name serves it.
        names = {path.parent.name for path in found}
        return sorted(name for name in names if not name.startswith(".") and is_encodable(name))

    def _find(self, name: str) -> tuple[Path, Path]:
        """Return the root and the folder of an id; AdapterError if there is none."""
        plain = "\0" not in name and posixpath.normpath(name) == name
        plain = plain and ".." not in name.split("/")
        plain = plain and len(name.encode(errors="replace")) <= _LONGEST_ID
        for root in self._roots if plain else ():
            folder = _resolved(root / name)
            if folder.is_relative_to(root) and (folder / CONFIG_NAME).is_file():
                return root, folder
        refuse(
            AdapterRefusal.NOT_FOUND,
            f"adapter {name!r} was not found: no folder of that name with an "
            "adapter_config.json lies under the server's local adapter roots",
        )


def origin_of(folder: Path, files: Fingerprint) -> str:
    """Identify a folder's content by its files' names, sizes and times; OSError if one is gone.

    Archives may set the time of a file's content, so that of its inode counts too. A file that was
    written just now may change again within one tick of the file system's clock, so the origin of a
    young folder is different in each call. A file is as old as the older of its two times says: one
    that an archive set may lie in the future.
    """
    changes = [(folder / name).stat().st_ctime_ns for name, _, _ in files]
    written = max(min(file[2], change) for file, change in zip(files, changes, strict=True))
    now = time.time_ns()
    is_young = now - written < _CLOCK_TICK_NS
    return f"local:{folder}:{files}{changes}{now if is_young else ''}"


def _resolved(path: Path) -> Path:
    """The path without links; of links that lead to each other some path that does not exist.

    Path.resolve raises RuntimeError for those, before Python 3.13.
    """
    return Path(os.path.realpath(path))


def _find_root(root: str) -> Path:
    for folder in (Path(os.path.expanduser(root)), PACKAGE_ROOT / root):
        if folder.is_dir():
            return folder.absolute()
    raise ValueError(
        f"adapters.local_roots: {root!r} is not a folder; give an existing folder or remove it"
    )
