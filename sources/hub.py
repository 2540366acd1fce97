"""Adapters on the hub; each `resolve` checks there whether the token may read the repository."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, get_session, get_token, hf_hub_url, snapshot_download
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HFValidationError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

from configs.adapters import FetchConfig
from configs.wire.adapters import AdapterReference, AdapterRefusal
from configs.wire.templates import OTHERS_FOLDER
from sources.base import (
    CONFIG_NAME,
    MLX_NAME,
    TEMPLATE_NAMES,
    FileBody,
    FoundAdapter,
    HTTPError,
    RemoteFile,
    Token,
    Unreachable,
    is_adapter_file,
    refuse,
)
from sources.retry import RetryPolicy, fault_of

_TRANSIENT = frozenset({408, 425, 429, 500, 502, 503, 504})
_MISSING = frozenset({404, 410})
_DENIED = frozenset({401, 403})
_LONGEST_TOKEN = 1024
_OTHERS = f"{OTHERS_FOLDER}/*.jinja"


class HubSource:
    """The hub at one endpoint.

    With HF_HUB_OFFLINE=1 adapters come from the library's own cache, and every caller may use them.
    """

    def __init__(
        self, endpoint: str | None, fetch: FetchConfig, allow_pickle: bool, retry: RetryPolicy
    ) -> None:
        """endpoint: None for the library's default."""
        self._api = HfApi(endpoint=endpoint)
        self._fetch = fetch
        self._allow_pickle = allow_pickle
        self._retry = retry

    def resolve(self, reference: AdapterReference, token: Token) -> FoundAdapter:
        """Return the commit that the reference names, and its files."""
        _check_token(token, reference.id)
        token = _sent(token)
        try:
            info = self._retry.call(lambda: self._info(reference, token), self.is_transient)
        except OfflineModeIsEnabled:
            return self._offline(reference)
        except (HTTPError, HFValidationError) as error:
            _refuse(error, reference.id)
            raise Unreachable(fault_of(error)) from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise Unreachable("its answer describes no repository") from error
        files = tuple(
            RemoteFile(
                *(file.rfilename, file.size, file.blob_id or ""),
                sha256=file.lfs.sha256 if file.lfs is not None else "",
            )
            for file in info.siblings or ()
            if is_adapter_file(file.rfilename, self._allow_pickle)
        )
        if not info.sha or any(not isinstance(file.size, int) for file in files):
            raise Unreachable("its answer lacks the commit, or the size of a file")
        return FoundAdapter(
            reference,
            f"hub:{self._api.endpoint}:{reference.id}@{info.sha}",
            files,
            folder=self._cached(reference.id, str(info.sha), files),
            open_to_all=not (info.private or info.gated),
        )

    @contextmanager
    def open(
        self, found: FoundAdapter, file: RemoteFile, start: int, token: Token
    ) -> Iterator[FileBody]:
        """Stream a file of the commit that was found."""
        commit = found.origin.rpartition("@")[2]
        url = hf_hub_url(
            found.reference.id, file.name, revision=commit, endpoint=self._api.endpoint
        )
        headers = {**build_hf_headers(token=_sent(token)), "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        with get_session().stream("GET", url, headers=headers, timeout=self._timeout) as response:
            try:
                hf_raise_for_status(response)
            except (HTTPError, HFValidationError) as error:
                if self.is_transient(error):
                    raise
                _refuse(error, found.reference.id)
                refuse(
                    AdapterRefusal.UNAVAILABLE,
                    f"adapter {found.reference.id!r} could not be read from the hub: try again "
                    f"({fault_of(error)})",
                    error,
                )
            first = start if response.status_code == 206 else 0
            yield FileBody(first, response.iter_bytes())

    def is_transient(self, error: Exception) -> bool:
        """Return whether it is a transient status, or a missing response."""
        response = getattr(error, "response", None)
        if response is not None:
            return response.status_code in _TRANSIENT
        return isinstance(error, HTTPError) and not isinstance(error, OfflineModeIsEnabled)

    @property
    def _timeout(self) -> Any:
        """Return seconds to connect, read, write and wait for a connection, in httpx's order."""
        connect, read = self._fetch.connect_timeout_s, self._fetch.read_timeout_s
        return (connect, read, read, read)

    def _info(self, reference: AdapterReference, token: Token) -> Any:
        info = self._api.model_info(
            reference.id,
            revision=reference.revision,
            files_metadata=True,
            token=token,
            timeout=self._timeout,
        )
        # A gated repository's description is public, its files are not.
        if info.gated:
            url = f"{self._api.endpoint}/api/models/{reference.id}/auth-check"
            headers = build_hf_headers(token=token)
            hf_raise_for_status(get_session().get(url, headers=headers, timeout=self._timeout))
        return info

    def _cached(self, repo: str, commit: str, files: tuple[RemoteFile, ...]) -> Path | None:
        """The commit's folder in the library's cache (never evicted); None if files are missing."""
        try:
            folder = snapshot_download(repo, revision=commit, local_files_only=True)
        except (LocalEntryNotFoundError, OSError):
            return None
        whole = all(_has(Path(folder), file) for file in files)
        return Path(folder) if whole else None

    def _offline(self, reference: AdapterReference) -> FoundAdapter:
        try:
            folder = Path(
                snapshot_download(
                    reference.id,
                    revision=reference.revision,
                    allow_patterns=[
                        CONFIG_NAME,
                        "adapter_model*",
                        MLX_NAME,
                        *TEMPLATE_NAMES,
                        _OTHERS,
                    ],
                    local_files_only=True,
                )
            )
        except (LocalEntryNotFoundError, HFValidationError, OSError) as error:
            refuse(
                AdapterRefusal.NOT_FOUND,
                f"adapter {reference.id!r} is not in the local hub cache, and this server does "
                "not call the hub (HF_HUB_OFFLINE): check the id, or use source `local`",
                error,
            )
        if not (folder / CONFIG_NAME).is_file():
            refuse(
                AdapterRefusal.NOT_FOUND,
                f"adapter {reference.id!r} has no {CONFIG_NAME}: not an adapter",
            )
        return FoundAdapter(reference, f"cached:{folder}", folder=folder, lasting=False)


def _has(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size


def _sent(token: Token) -> Token:
    """The token to send: the server's where it has one; a public adapter needs none."""
    return (get_token() or False) if token is True else token


def _check_token(token: Token, name: str) -> None:
    """Refuse a token that fits no header: the HTTP library would quote it in its error."""
    plain = isinstance(token, bool) or (token.isascii() and token.isprintable())
    if not plain or (isinstance(token, str) and (" " in token or len(token) > _LONGEST_TOKEN)):
        refuse(
            AdapterRefusal.FORBIDDEN,
            f"adapter {name!r}: the api_token has characters that no token of the hub has",
        )


def _refuse(error: Exception, name: str) -> None:
    """Raise AdapterError if the hub's error is about the adapter, or about the caller."""
    status = getattr(getattr(error, "response", None), "status_code", None)
    if isinstance(error, GatedRepoError):
        refuse(
            AdapterRefusal.FORBIDDEN,
            f"adapter {name!r} is gated: send an api_token that may read it",
            error,
        )
    missing = RepositoryNotFoundError | RevisionNotFoundError | EntryNotFoundError
    if isinstance(error, missing) or status in _MISSING:
        refuse(
            AdapterRefusal.NOT_FOUND,
            f"adapter {name!r} was not found on the hub, or it is private and the request "
            "has no api_token that may read it",
            error,
        )
    if isinstance(error, HFValidationError):
        refuse(AdapterRefusal.NOT_FOUND, f"{name!r} is not a valid adapter id: {error}", error)
    if status in _DENIED:
        refuse(
            AdapterRefusal.FORBIDDEN,
            f"adapter {name!r}: the hub refused this request ({status}): check the api_token",
            error,
        )
