"""Triton's cache of compiled kernels, and behind it a folder that was filled elsewhere.

Triton takes this class by name, from its own variable TRITON_CACHE_MANAGER.
"""

import json
from pathlib import Path

from triton.runtime.cache import FileCacheManager

from configs.env import kernel_folder

GROUP = "__grp__"
"""Before the name of a file that lists one kernel's files, with paths where they were made."""


class CarriedKernels(FileCacheManager):  # type: ignore[misc]
    """One kernel's files: in this user's own cache, else in the folder, which is not written."""

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        """key: of the kernel. override, dump: other folders of Triton's, with nothing behind."""
        super().__init__(key, override, dump)
        folder = None if override or dump else kernel_folder()
        self._carried = None if folder is None else folder / "triton" / key

    def get_file(self, filename: str) -> str | None:
        """Return the path of a file, or None."""
        own: str | None = super().get_file(filename)
        return own or self._find(filename)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """Return the paths of a kernel's files by their names; None if it was not compiled."""
        own: dict[str, str] | None = super().get_group(filename)
        listed = None if own else self._find(GROUP + filename)
        if listed is None:
            return own
        # By name: the paths in the list are those of the machine that compiled.
        names = json.loads(Path(listed).read_text("utf-8"))["child_paths"]
        found = {name: self._find(name) for name in names}
        return {name: path for name, path in found.items() if path is not None}

    def _find(self, filename: str) -> str | None:
        path = None if self._carried is None else self._carried / filename
        return str(path) if path is not None and path.is_file() else None
