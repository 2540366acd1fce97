"""The interface of sources, an adapter's files at its source and on this node, their checks."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NoReturn, Protocol

from huggingface_hub.errors import HfHubHTTPError

from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal
from configs.wire.templates import OTHERS_FOLDER

PACKAGE_ROOT = Path(__file__).resolve().parents[1]
CONFIG_NAME = "adapter_config.json"
TEMPLATE_NAMES = ("chat_template.jinja", "tokenizer_config.json", "special_tokens_map.json")
MLX_NAME = "adapters.safetensors"
"""The weights of adapters that mlx_lm trained; they are converted (`mlx.py`)."""
MAX_TEXT_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
"""Limits of files that are parsed whole; parsing needs many times their bytes."""

HEADS_NAME, HEADS_CONFIG_NAME = "medusa_lm_head.safetensors", "config.json"
"""The files of Medusa heads that an adapter may bring."""
_WEIGHTS = "adapter_model*.safetensors"
_PICKLED = "adapter_model*.bin"

HTTPError: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
"""The hub client's error for a failed request; its class depends on the HTTP library."""

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in ns of every file: a cheap check for changes."""

Token = str | bool
"""The hub token of a request: the caller's, False for none, True for the server's."""


class Unreachable(Exception):
    """A source did not reply, after several attempts; the message says what failed."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a source.

    name: in the adapter's folder. size: bytes. tag: changes with the content.
    sha256: of its bytes, in hexadecimal; "" where the source does not say it.
    """

    name: str
    size: int
    tag: str
    sha256: str = ""


@dataclass(frozen=True)
class FoundAdapter:
    """The version of an adapter that a reference names now.

    reference: the client's name for the adapter.
    origin: identifies the content at its source; equal origins mean equal files.
    files: the files to download.
    folder: the folder on this node that has the files; None if they must be downloaded.
    root: the folder that links in `folder` must not lead out of.
    open_to_all: whether every caller may read the adapter.
    lasting: whether the result may be used again without another call of the source.
    digest: of the content, where it is known without reading the files.
    """

    reference: AdapterReference
    origin: str
    files: tuple[RemoteFile, ...] = ()
    folder: Path | None = None
    root: Path | None = None
    open_to_all: bool = True
    lasting: bool = True
    digest: str | None = None

    @property
    def size(self) -> int:
        """Return the bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files on this node.

    folder: the folder with the files.
    fingerprint: of the files.
    origin: as in FoundAdapter, of the files in `folder`.
    held: the origin of the disk cache's entry that is held until `release`; None for other folders.
    root: as in FoundAdapter.
    """

    folder: Path
    fingerprint: Fingerprint
    origin: str
    held: str | None = None
    root: Path | None = None


@dataclass(frozen=True)
class FileBody:
    """The bytes of a file from `start` on."""

    start: int
    chunks: Iterator[bytes]


class RemoteSource(Protocol):
    """A service with adapters to download. Any thread may call; calls block."""

    def resolve(self, reference: AdapterReference, token: Token) -> FoundAdapter:
        """Return what the reference names, by one or two small requests.

        Raises AdapterError if it is missing or the token may not read it, Unreachable if the
        source did not reply.
        """
        ...

    def open(
        self, found: FoundAdapter, file: RemoteFile, start: int, token: Token
    ) -> AbstractContextManager[FileBody]:
        """Stream a file from byte `start`, or from 0 where the source serves no ranges."""
        ...

    def is_transient(self, error: Exception) -> bool:
        """Return whether another attempt may succeed (5xx, 429, a broken connection)."""
        ...


def refuse(refusal: AdapterRefusal, message: str, cause: Exception | None = None) -> NoReturn:
    """Raise AdapterError."""
    raise AdapterError(refusal, message) from cause


def is_adapter_file(name: str, allow_pickle: bool = False) -> bool:
    """Return whether a file (by its name in the folder) is part of an adapter."""
    folder, _, plain = name.rpartition("/")
    if folder:
        return folder == OTHERS_FOLDER and plain.endswith(".jinja")
    others = (HEADS_NAME, HEADS_CONFIG_NAME, *TEMPLATE_NAMES)
    if name in (CONFIG_NAME, MLX_NAME, *others) or fnmatchcase(name, _WEIGHTS):
        return True
    return allow_pickle and fnmatchcase(name, _PICKLED)


def check_files(found: FoundAdapter, max_bytes: int) -> None:
    """Refuse files that are not an adapter, or too large, before any download."""
    shown = f"adapter {found.reference.id!r}"
    names = {file.name for file in found.files}
    if CONFIG_NAME not in names:
        refuse(
            AdapterRefusal.NOT_FOUND,
            f"{shown} has no {CONFIG_NAME}: not an adapter as PEFT or MLX saves it",
        )
    weights = (_WEIGHTS, _PICKLED, MLX_NAME)
    if not any(fnmatchcase(name, pattern) for name in names for pattern in weights):
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"{shown} has no {_WEIGHTS}: save it with save_pretrained(..., "
            "safe_serialization=True); pickled weights are read only where the server's "
            "adapters.allow_pickle is set",
        )
    check_size(found.size, found.reference.id, max_bytes)
    check_texts(((file.name, file.size) for file in found.files), found.reference.id)


def check_texts(files: Iterable[tuple[str, int]], name: str) -> None:
    """Refuse configs and templates above their limits. files: (name, bytes) of each."""
    for file, size in files:
        limit = min(MAX_CONFIG_BYTES, MAX_TEXT_BYTES) if file == CONFIG_NAME else MAX_TEXT_BYTES
        is_text = file in (CONFIG_NAME, *TEMPLATE_NAMES) or file.startswith(OTHERS_FOLDER)
        if is_text and size > limit:
            refuse(
                AdapterRefusal.TOO_LARGE,
                f"adapter {name!r}: {file} has {size} bytes, more than the {limit} that "
                "such a file may have: save or upload it again",
            )


def check_size(
    num_bytes: int, name: str, max_bytes: int, setting: str = "adapters.max_file_bytes"
) -> None:
    """Refuse an adapter above the server's limit; setting: what sets it."""
    if num_bytes > max_bytes:
        refuse(
            AdapterRefusal.TOO_LARGE,
            f"adapter {name!r} has {num_bytes} bytes, over the server's limit of {max_bytes} "
            f"({setting})",
        )
