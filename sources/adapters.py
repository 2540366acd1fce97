"""Find an adapter's files at its source and fetch them to this node."""

import errno
import logging
import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from configs.adapters import AdaptersConfig
from configs.reading import FileChanged, NotRegular, OutsideRoot
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.base import (
    AdapterFolder,
    FoundAdapter,
    RemoteSource,
    Token,
    Unreachable,
    check_files,
    check_texts,
    refuse,
)
from sources.budget import DownloadBudget
from sources.cache import CacheFull, DiskCache
from sources.catalogue import CatalogueListing, read_catalogue
from sources.download import Download
from sources.files import check_headers, content_digest, fingerprint, is_mlx
from sources.hub import HubSource
from sources.local import LocalSource, origin_of
from sources.pushed import PushedFiles, PushedSource, is_pushed
from sources.retry import RetryPolicy
from sources.s3 import S3Source

logger = logging.getLogger("loray.sources")

_CACHE_ERRORS = frozenset({errno.EROFS, errno.EACCES, errno.EPERM, errno.ENOTDIR, errno.EEXIST})
"""Why a folder of downloads cannot be used."""

_DOWNLOAD_FACTOR = 10
"""A download may last this many times fetch_timeout_s, the longest wait of one request for it."""


class AdapterSources:
    """Resolves references and fetches adapters; every refusal is an AdapterError with a remedy.

    Calls block on disk or network; any thread may call.
    """

    def __init__(self, config: AdaptersConfig) -> None:
        """Check the config; no source is called yet."""
        self._config = config
        self._local = LocalSource(_roots(config), config.max_file_bytes)
        self._retry = RetryPolicy(config.fetch.attempts, config.fetch.backoff_s)
        hub = HubSource(config.hub_endpoint, config.fetch, config.allow_pickle, self._retry)
        self._remote: dict[AdapterSource, RemoteSource] = {AdapterSource.HUB: hub}
        self._s3: S3Source | None = None
        if config.s3 is not None:
            s3 = self._s3 = S3Source(config.s3, config.fetch, config.allow_pickle)
            self._remote[AdapterSource.S3] = s3
        self.pushed = PushedSource(PushedFiles(config.push, config.max_file_bytes))
        self._budget = DownloadBudget(config.fetch.download_bytes_per_hour)
        self.cache = DiskCache(Path(config.fetch.cache_dir).expanduser(), config.fetch.cache_bytes)

    def resolve(self, reference: AdapterReference, token: Token) -> FoundAdapter:
        """Return what the reference names now, without fetching its weights.

        Raises AdapterError if it is missing or the token may not read it, Unreachable if the
        source did not answer.
        """
        try:
            if reference.source is AdapterSource.LOCAL:
                return self._local.resolve(reference)
            if reference.source is AdapterSource.PUSHED:
                return self.pushed.resolve(reference)
            found = self._source(reference).resolve(reference, token)
            if found.folder is None:
                check_files(found, self._config.max_file_bytes)
            return found
        except (OSError, ValueError) as error:
            # Files that are deleted meanwhile, names that no file system allows.
            _refuse_unreadable(reference.id, error)

    def fetch(self, found: FoundAdapter, token: Token, payer: str | None = None) -> AdapterFolder:
        """Return the files on this node, downloaded if need be.

        payer: the API key whose download budget is charged; None for the operator's downloads,
        which are free. The caller calls `release` when the files are no longer read.
        """
        name = found.reference.id
        if found.folder is not None and self._is_foreign(found.folder):
            return self._converted(found, found.folder)
        if found.folder is not None:
            here = self._inspected(found.folder, found)
            if found.reference.source is AdapterSource.LOCAL:
                # The folder may have been rewritten since `resolve`.
                try:
                    here = replace(here, origin=origin_of(here.folder, here.fingerprint))
                except OSError as error:
                    _refuse_unreadable(name, error)
            return here
        try:
            if found.reference.source is AdapterSource.PUSHED:
                folder = self.pushed.fetch(found)
            else:
                folder = self.cache.hold(found.origin) or self._download(found, token, payer)
        except OSError as error:
            if error.errno in _CACHE_ERRORS:
                logger.warning("downloads cannot be kept: %s", error)
                reason = f"{os.strerror(error.errno)} (adapters.fetch.cache_dir)"
                message = f"adapter {name!r} cannot be kept on the server: {reason}"
                refuse(AdapterRefusal.UNAVAILABLE, message, error)
            _refuse_unreadable(name, error)
        try:
            return replace(self._inspected(folder, found), held=found.origin)
        except AdapterError:
            self._release(found.origin)
            raise

    def digest(self, folder: AdapterFolder, name: str) -> str:
        """Return the content's digest; AdapterError when the files are written to meanwhile."""
        try:
            digest = content_digest(folder)
            if fingerprint(folder.folder) != folder.fingerprint:
                raise FileChanged("its files change: try again when they are written")
            return digest
        except OSError as error:
            _refuse_unreadable(name, error)

    def release(self, folder: AdapterFolder) -> None:
        """End the use of these files, so that the cache may evict them."""
        if folder.held is not None:
            self._release(folder.held)

    def close(self) -> None:
        """Stop running downloads; later ones resume their partial files."""
        self._retry.stopping.set()

    def local_reference(self, folder: str) -> AdapterReference | None:
        """Return the reference of a folder under the local roots; None for any other path."""
        return self._local.reference_of(folder)

    def catalogue(self) -> CatalogueListing:
        """Return what the catalogue offers now; the config has one.

        Raises OSError, ValueError, AdapterError or Unreachable.
        """
        assert self._config.catalogue is not None
        location = self._config.catalogue.location
        return read_catalogue(location, self._s3, self._local_name)

    def _local_name(self, folder: Path) -> str:
        found = self._local.reference_of(str(folder))
        return f"local:{found.id if found else folder.name}"

    def known_local(self) -> list[str]:
        """Return the ids of the adapters directly under the local roots, for listings."""
        return self._local.listing()

    def _release(self, origin: str) -> None:
        if is_pushed(origin):
            self.pushed.release(origin)
        else:
            self.cache.release(origin)

    def _source(self, reference: AdapterReference) -> RemoteSource:
        source = self._remote.get(reference.source)
        if source is None:
            refuse(
                AdapterRefusal.UNSUPPORTED,
                f"adapter {reference.id!r}: this server has no source "
                f"{reference.source.value!r}: use hub or local, or configure adapters.s3",
            )
        return source

    def _download(self, found: FoundAdapter, token: Token, payer: str | None) -> Path:
        name = found.reference.id
        if payer is not None:
            self._charge(found, payer)
        deadline = time.monotonic() + _DOWNLOAD_FACTOR * self._config.fetch_timeout_s
        source = self._source(found.reference)
        download = Download(source, found, token, self._retry, deadline)
        try:
            return self.cache.store(found.origin, found.size, partial(self._write, download))
        except CacheFull as error:
            _refuse_full(name, found.size, error)
        except Unreachable as error:
            refuse(
                AdapterRefusal.UNAVAILABLE,
                f"adapter {name!r} could not be downloaded ({error}): try again",
                error,
            )
        except AdapterError:
            self.cache.discard(found.origin)
            raise

    def _charge(self, found: FoundAdapter, payer: str) -> None:
        """Refuse a download that the config or the payer's budget forbids."""
        name = found.reference.id
        if found.reference.source is AdapterSource.HUB and not self._config.fetch.hub_on_demand:
            refuse(
                AdapterRefusal.DENIED,
                f"adapter {name!r} is not on this server, which downloads none from the hub for "
                "requests (adapters.fetch.hub_on_demand): ask its operator to load it",
            )
        wait_s = self._budget.charge(payer, found.size)
        if wait_s:
            refuse(
                AdapterRefusal.QUOTA,
                f"adapter {name!r} has to be downloaded, and downloads of "
                f"{self._config.fetch.download_bytes_per_hour} bytes an hour "
                "(adapters.fetch.download_bytes_per_hour) are used up: try again in "
                f"{wait_s:.0f} s, or use an adapter that this server has already",
            )

    def _write(self, download: Download, folder: Path) -> None:
        download.into(folder)
        if self._is_foreign(folder):
            _convert(folder, folder, download.found.reference.id, None)

    def _is_foreign(self, folder: Path) -> bool:
        """Return whether the weights are to be converted: MLX's, or a pickle that is allowed."""
        if is_mlx(folder):
            return True
        names = (folder / "adapter_model.bin", folder / "adapter_model.safetensors")
        return self._config.allow_pickle and [p.is_file() for p in names] == [True, False]

    def _converted(self, found: FoundAdapter, folder: Path) -> AdapterFolder:
        """Convert the weights in a folder that must not be changed; the result is a cache entry."""
        name = found.reference.id
        try:
            files = fingerprint(folder)
            origin = origin_of(folder, files)
            size = sum(size for _, size, _ in files)
            made = self.cache.store(
                origin, size, lambda into: _convert(folder, into, name, found.root)
            )
        except (OSError, ValueError) as error:
            _refuse_unreadable(name, error)
        except CacheFull as error:
            _refuse_full(name, size, error)
        except AdapterError:
            self.cache.discard(origin)
            raise
        here = self._inspected(made, found)
        return replace(here, origin=origin, held=origin)

    def _inspected(self, folder: Path, found: FoundAdapter) -> AdapterFolder:
        try:
            files = fingerprint(folder)
            check_texts(((file, size) for file, size, _ in files), found.reference.id)
            root = found.root if folder == found.folder else None
            check_headers(folder, found.reference.id, root)
            return AdapterFolder(folder, files, found.origin, root=root)
        except OSError as error:
            _refuse_unreadable(found.reference.id, error)


def _roots(config: AdaptersConfig) -> tuple[str, ...]:
    """Return the local roots, with the folder of the catalogue."""
    catalogue = config.catalogue
    is_folder = catalogue is not None and Path(catalogue.location).is_dir()
    return (
        (*config.local_roots, catalogue.location) if catalogue and is_folder else config.local_roots
    )


def _convert(folder: Path, into: Path, name: str, root: Path | None) -> None:
    # Imported late: a driver that converts nothing needs no torch.
    if is_mlx(folder):
        from sources.mlx import convert
    else:
        from sources.pickled import convert

    convert(folder, into, name, root)


def _refuse_full(name: str, num_bytes: int, error: Exception) -> NoReturn:
    refuse(
        AdapterRefusal.UNAVAILABLE,
        f"adapter {name!r} with {num_bytes} bytes could not be kept: {error}; try again later, "
        "or give the server more room (adapters.fetch.cache_bytes)",
        error,
    )


def _refuse_unreadable(name: str, error: Exception) -> NoReturn:
    refusal = AdapterRefusal.UNAVAILABLE
    if isinstance(error, NotRegular):
        refusal = AdapterRefusal.UNSUPPORTED
    elif isinstance(error, OutsideRoot):
        refusal = AdapterRefusal.FORBIDDEN
    refuse(refusal, f"adapter {name!r} cannot be read: {error}", error)
