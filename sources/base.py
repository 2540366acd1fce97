"""What all sources of adapters share: the files that count, what a source found, refusals."""

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
MAX_TEXT_BYTES = 16 << 20
MAX_CONFIG_BYTES = 1 << 20
"""Of each file that is no weights: it is parsed whole, which takes many times its bytes."""

_WEIGHTS = "adapter_model*.safetensors"
_PICKLED = "adapter_model*.bin"

HTTPError: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
"""What the hub's client raises when it does not get through, whichever HTTP library it uses."""

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in ns of every file: cheap to compare."""

Token = str | bool
"""Whose rights count at the hub: a caller's token, False for nobody's, True for the server's."""


class Unreachable(Exception):
    """A source gave no answer, though it was asked several times; the message is for people."""


@dataclass(frozen=True)
class RemoteFile:
    """A file at a source; the tag changes with the content."""

    name: str
    size: int
    tag: str


@dataclass(frozen=True)
class FoundAdapter:
    """What a reference names now.

    name: how clients call it. origin: names the content at its source, so that equal origins mean
    equal files. files: what to download. folder: where they lie already, None until they are
    brought. root: the folder that links in it must not lead out of. open_to_all: whether the
    answer holds for every caller. lasting: whether it may be used again without asking.
    """

    reference: AdapterReference
    origin: str
    files: tuple[RemoteFile, ...] = ()
    folder: Path | None = None
    root: Path | None = None
    open_to_all: bool = True
    lasting: bool = True

    @property
    def size(self) -> int:
        """Bytes of all files."""
        return sum(file.size for file in self.files)


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files on this node and what they are.

    origin: names the content, as in Found, but of the files that are here now. held: the entry of
    the disk cache that must not be evicted meanwhile, None for other folders.
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
    """A place that adapters are downloaded from; blocks on the network, used by many threads."""

    def resolve(self, reference: AdapterReference, token: Token) -> FoundAdapter:
        """What the reference names, if the token may read it; one or two small requests.

        AdapterError says why not; Unreachable when there was no answer.
        """
        ...

    def open(
        self, found: FoundAdapter, file: RemoteFile, start: int, token: Token
    ) -> AbstractContextManager[FileBody]:
        """Stream a file from byte `start`, or from 0 where ranges are not served."""
        ...

    def is_transient(self, error: Exception) -> bool:
        """Whether asking again may help (5xx, 429, a connection that broke)."""
        ...


def refuse(refusal: AdapterRefusal, message: str, cause: Exception | None = None) -> NoReturn:
    """Raise AdapterError."""
    raise AdapterError(refusal, message) from cause


def is_adapter_file(name: str, allow_pickle: bool = False) -> bool:
    """Whether a file (by its name in its folder) is part of an adapter."""
    folder, _, plain = name.rpartition("/")
    if folder:
        return folder == OTHERS_FOLDER and plain.endswith(".jinja")
    if name == CONFIG_NAME or name in TEMPLATE_NAMES or fnmatchcase(name, _WEIGHTS):
        return True
    return allow_pickle and fnmatchcase(name, _PICKLED)


def check_files(found: FoundAdapter, max_bytes: int) -> None:
    """Refuse what is no adapter, or too large, before anything is downloaded."""
    shown = f"adapter {found.reference.id!r}"
    names = {file.name for file in found.files}
    if CONFIG_NAME not in names:
        refuse(AdapterRefusal.NOT_FOUND, f"{shown} has no {CONFIG_NAME}: not an adapter")
    if not any(fnmatchcase(name, _WEIGHTS) or fnmatchcase(name, _PICKLED) for name in names):
        refuse(
            AdapterRefusal.UNSUPPORTED,
            f"{shown} has no {_WEIGHTS}: save it with save_pretrained(..., "
            "safe_serialization=True); pickled weights are read only where the server's "
            "adapters.allow_pickle is set",
        )
    check_size(found.size, found.reference.id, max_bytes)
    check_texts(((file.name, file.size) for file in found.files), found.reference.id)


def check_texts(files: Iterable[tuple[str, int]], name: str) -> None:
    """Refuse config and templates that are larger than any: (file name, bytes) of each file."""
    for file, size in files:
        most = min(MAX_CONFIG_BYTES, MAX_TEXT_BYTES) if file == CONFIG_NAME else MAX_TEXT_BYTES
        is_text = file in (CONFIG_NAME, *TEMPLATE_NAMES) or file.startswith(OTHERS_FOLDER)
        if is_text and size > most:
            refuse(
                AdapterRefusal.TOO_LARGE,
                f"adapter {name!r}: {file} has {size} bytes, more than the {most} that "
                "such a file may have: save or upload it again",
            )


def check_size(num_bytes: int, name: str, max_bytes: int) -> None:
    """Refuse an adapter that is over the server's limit."""
    if num_bytes > max_bytes:
        refuse(
            AdapterRefusal.TOO_LARGE,
            f"adapter {name!r} has {num_bytes} bytes, over the server's limit of {max_bytes} "
            "(adapters.max_file_bytes)",
        )
