"""Where files come from: a model's or an adapter's name becomes a folder on this node.

`local` reads only under configured roots (links out of them are refused); `hub` downloads
through huggingface_hub, safetensors only, and works offline when the files are in its cache.
"""

import hashlib
import posixpath
from dataclasses import dataclass
from pathlib import Path

from huggingface_hub import HfApi, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from configs.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from configs.engine import AdaptersConfig
from configs.model import ModelConfig

_PACKAGE_ROOT = Path(__file__).resolve().parent.parent
_ADAPTER_FILES = ["adapter_config.json", "adapter_model*.safetensors*"]
_MODEL_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model"]
_PICKLED_FILES = ["pytorch_model*.bin"]
_CODE_FILES = ["*.py"]
_LONGEST_ID = 255
_SERVER_FAULTS, _TOO_MANY_REQUESTS = 500, 429
_HASH_BYTES = 1 << 20

HTTPError: type[Exception] = next(
    base for base in HfHubHTTPError.__mro__ if base.__name__ == "HTTPError"
)
"""What the hub's client raises when it does not get through, whichever HTTP library it uses."""

Fingerprint = tuple[tuple[str, int, int], ...]
"""Name, size in bytes and modification time in ns of every file: cheap to compare."""


@dataclass(frozen=True)
class AdapterFolder:
    """An adapter's files on this node and what they are."""

    folder: Path
    fingerprint: Fingerprint


class ModelNotFound(ValueError):
    """The base model's id is neither a folder nor to be had from the hub."""


def fetch_model(config: ModelConfig) -> Path:
    """The base model's folder: as given, beside the package (configs/...), or from the hub."""
    for folder in (Path(config.id), _PACKAGE_ROOT / config.id):
        if (folder / "config.json").is_file():
            return folder.resolve()
    patterns = [
        *_MODEL_FILES,
        *(_PICKLED_FILES if config.allow_pickle else []),
        *(_CODE_FILES if config.trust_remote_code else []),
    ]
    try:
        found = snapshot_download(
            config.id, revision=config.revision, allow_patterns=patterns, etag_timeout=10
        )
    except (HTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFound(
            f"model {config.id!r} is not a folder with a config.json and could not be had from "
            f"the hub: {error}. Give a folder's path, or a hub id that this machine can reach"
        ) from error
    return Path(found)


class AdapterSources:
    """Turns references into folders; every refusal is an AdapterError that says what to do."""

    def __init__(self, config: AdaptersConfig) -> None:
        """Roots that are relative are looked up in the working directory, then the package."""
        self._config = config
        self._roots = [_find_root(root) for root in config.local_roots]

    def fetch(self, reference: AdapterReference, api_token: str | bool) -> AdapterFolder:
        """Bring the adapter's files to this node; blocks on disk and network.

        api_token: the caller's, False for none, True for the server's own.
        """
        try:
            return self._fetch(reference, api_token)
        except (OSError, ValueError) as error:
            # Files that vanish meanwhile, names that no file system takes.
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE, f"adapter {reference.id!r} cannot be read: {error}"
            ) from error

    def _fetch(self, reference: AdapterReference, api_token: str | bool) -> AdapterFolder:
        if reference.source is AdapterSource.LOCAL:
            folder = self._local(reference.id)
        elif reference.source is AdapterSource.HUB:
            folder = self._hub(reference, api_token)
        else:
            raise AdapterError(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {reference.id!r}: source {reference.source.value!r} is not served here, "
                "use hub or local",
            )
        return AdapterFolder(folder, self._inspect(folder, reference.id))

    def known_local(self) -> list[str]:
        """Ids of the adapters directly under the local roots, for listings."""
        return sorted(
            path.parent.name for root in self._roots for path in root.glob("*/adapter_config.json")
        )

    def _local(self, adapter_id: str) -> Path:
        plain = "\0" not in adapter_id and posixpath.normpath(adapter_id) == adapter_id
        plain = plain and ".." not in adapter_id.split("/")
        for root in self._roots if plain and len(adapter_id) <= _LONGEST_ID else ():
            folder = (root / adapter_id).resolve()
            if folder.is_relative_to(root) and (folder / "adapter_config.json").is_file():
                return folder
        raise AdapterError(
            AdapterRefusal.NOT_FOUND,
            f"adapter {adapter_id!r} was not found: no folder of that name with an "
            "adapter_config.json lies under the server's local adapter roots",
        )

    def _hub(self, reference: AdapterReference, api_token: str | bool) -> Path:
        name = reference.id
        try:
            return Path(self._download(reference, api_token))
        except GatedRepoError as error:
            raise AdapterError(
                AdapterRefusal.FORBIDDEN,
                f"adapter {name!r} is gated: send an api_token that may read it",
            ) from error
        except (LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
            raise AdapterError(
                AdapterRefusal.NOT_FOUND,
                f"adapter {name!r} is not in the local hub cache and the hub is out of reach: "
                "check the id, or use source `local`",
            ) from error
        except (RepositoryNotFoundError, RevisionNotFoundError, EntryNotFoundError) as error:
            raise AdapterError(
                AdapterRefusal.NOT_FOUND,
                f"adapter {name!r} was not found on the hub, or it is private and the request "
                "brought no api_token that may read it",
            ) from error
        except HFValidationError as error:
            raise AdapterError(
                AdapterRefusal.NOT_FOUND, f"{name!r} is not a valid adapter id: {error}"
            ) from error
        except (HTTPError, OSError) as error:
            raise AdapterError(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {name!r} could not be downloaded ({type(error).__name__}): try again",
            ) from error

    def _download(self, reference: AdapterReference, api_token: str | bool) -> str:
        try:
            info = HfApi().model_info(
                reference.id,
                revision=reference.revision,
                files_metadata=True,
                token=api_token,
                timeout=self._config.fetch_timeout_s,
            )
        except (RepositoryNotFoundError, RevisionNotFoundError, GatedRepoError):
            raise
        except (HTTPError, OfflineModeIsEnabled, OSError) as error:
            _refuse_if_forbidden(error, reference.id)
            # No hub in reach: what the cache holds is still good.
            return snapshot_download(
                reference.id,
                revision=reference.revision,
                allow_patterns=_ADAPTER_FILES,
                local_files_only=True,
            )
        total = sum(
            file.size or 0
            for file in info.siblings or []
            if file.rfilename.startswith("adapter_model")
        )
        self._check_size(total, reference.id)
        return snapshot_download(
            reference.id, revision=info.sha, allow_patterns=_ADAPTER_FILES, token=api_token
        )

    def _inspect(self, folder: Path, name: str) -> Fingerprint:
        """Stat the files that make the adapter; refuses one that is too large to read."""
        if not (folder / "adapter_config.json").is_file():
            raise AdapterError(
                AdapterRefusal.NOT_FOUND, f"{name!r} has no adapter_config.json: not an adapter"
            )
        found = fingerprint(folder)
        self._check_size(sum(size for _, size, _ in found), name)
        return found

    def _check_size(self, num_bytes: int, name: str) -> None:
        if num_bytes > self._config.max_file_bytes:
            raise AdapterError(
                AdapterRefusal.TOO_LARGE,
                f"adapter {name!r} has {num_bytes} bytes, over the server's limit of "
                f"{self._config.max_file_bytes} (adapters.max_file_bytes)",
            )


def _refuse_if_forbidden(error: Exception, name: str) -> None:
    """A hub that answers "no" is in reach: its cached copy is not this caller's to use."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None and status < _SERVER_FAULTS and status != _TOO_MANY_REQUESTS:
        raise AdapterError(
            AdapterRefusal.FORBIDDEN, f"adapter {name!r}: the hub refused this api_token ({status})"
        ) from error


def fingerprint(folder: Path) -> Fingerprint:
    """Stat the files that make an adapter; OSError when they are gone."""
    paths = [folder / "adapter_config.json", *sorted(folder.glob("adapter_model*"))]
    stats = [(path, path.stat()) for path in paths]
    return tuple((path.name, stat.st_size, stat.st_mtime_ns) for path, stat in stats)


def content_digest(folder: AdapterFolder) -> str:
    """blake2b of the adapter's files, names included; equal digests mean equal adapters."""
    digest = hashlib.blake2b(digest_size=20)
    for name, size, _ in folder.fingerprint:
        digest.update(f"{name}:{size}\n".encode())
        with (folder.folder / name).open("rb") as file:
            while chunk := file.read(_HASH_BYTES):
                digest.update(chunk)
    return digest.hexdigest()


def _find_root(root: str) -> Path:
    for folder in (Path(root), _PACKAGE_ROOT / root):
        if folder.is_dir():
            return folder.resolve()
    raise ValueError(
        f"adapters.local_roots: {root!r} is not a folder; give an existing folder or remove it"
    )
