"""The base model's files in an S3 bucket, downloaded to a folder of this node.

The folder's name has a digest of the files' names and ETags, so that each version has one of its
own. Files are written whole or not at all: what is there is not downloaded again.
"""

import hashlib
import importlib
import logging
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

from filelock import FileLock

from configs.model import ModelConfig
from sources.base import RemoteFile
from sources.s3_client import S3Client, connect, error_code

SCHEME = "s3://"

_CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS = 5.0, 60.0, 5
_PIECE_BYTES = 32 << 20

logger = logging.getLogger("loray.sources")


class BucketUnreadable(OSError):
    """The bucket cannot be read; the message says why."""


class S3Model:
    """One base model under a prefix of a bucket."""

    def __init__(self, config: ModelConfig, patterns: Sequence[str]) -> None:
        """patterns: of the names of the model's files, which are directly under the prefix."""
        self._id = config.id
        bucket, _, prefix = config.id.removeprefix(SCHEME).strip("/").partition("/")
        self._bucket, self._prefix = bucket, f"{prefix}/" if prefix else ""
        self._patterns = patterns
        self._cache = Path(config.cache_dir).expanduser()
        self._client: S3Client = connect(
            config.s3, config.id, _CONNECT_SECONDS, _READ_SECONDS, _ATTEMPTS
        )

    def fetch(self, wanted: Sequence[str]) -> Path:
        """Return a folder with the model's files that match; those of other patterns may be there.

        If the service does not answer, it is the folder of the last version that was fetched here.
        Raises BucketUnreadable.
        """
        try:
            return self._fetch(wanted)
        except self._client.errors.ClientError as error:
            if self._client.is_transient(error):
                return self._last(error_code(error), error)
            raise BucketUnreadable(f"the service answers {error_code(error)}") from error
        except self._client.errors.BotoCoreError as error:
            return self._last(str(error), error)

    def _fetch(self, wanted: Sequence[str]) -> Path:
        files = self._listed()
        if not any(file.name == "config.json" for file in files):
            raise BucketUnreadable("there is no config.json under the prefix")
        folder = self._cache / self._version(files)
        folder.mkdir(parents=True, exist_ok=True)
        # Ranks and drivers of one node, or of several that share the folder, wait for each other.
        with FileLock(f"{folder}.lock"):
            missing = [file for file in _matching(files, wanted) if not _is_whole(folder, file)]
            self._download(missing, folder)
            if missing and self._listed() != files:
                for file in missing:
                    (folder / file.name).unlink()
                raise BucketUnreadable("its files changed while they were read: try again")
            if wanted == self._patterns:
                self._remember(folder)
        return folder

    def _listed(self) -> list[RemoteFile]:
        pages = self._client.api.get_paginator("list_objects_v2").paginate(
            Bucket=self._bucket, Prefix=self._prefix, Delimiter="/"
        )
        files = (
            RemoteFile(entry["Key"].removeprefix(self._prefix), entry["Size"], entry["ETag"])
            for page in pages
            for entry in page.get("Contents", ())
        )
        return sorted(_matching(files, self._patterns), key=lambda file: file.name)

    def _download(self, files: Iterable[RemoteFile], folder: Path) -> None:
        broken = importlib.import_module("boto3.exceptions").Boto3Error
        transfer = importlib.import_module("boto3.s3.transfer")
        config = transfer.TransferConfig(multipart_chunksize=_PIECE_BYTES)
        for file in files:
            logger.info("downloading %s (%d MiB) of %s", file.name, file.size >> 20, self._id)
            # boto3 writes to another name and moves the whole file.
            key = self._prefix + file.name
            try:
                self._client.api.download_file(
                    self._bucket, key, str(folder / file.name), Config=config
                )
            except broken as error:
                raise BucketUnreadable(f"{file.name} broke off: try again") from error

    def _version(self, files: Sequence[RemoteFile]) -> str:
        text = "\n".join(f"{file.name} {file.size} {file.tag}" for file in files)
        return f"{self._name}-{hashlib.sha256(text.encode()).hexdigest()[:16]}"

    @property
    def _name(self) -> str:
        """Name the bucket's prefix at this service, for files of the cache."""
        where = f"{self._client.api.meta.endpoint_url} {self._bucket} {self._prefix}"
        last = self._id.rstrip("/").rpartition("/")[2]
        return f"{last}-{hashlib.sha256(where.encode()).hexdigest()[:16]}"

    @property
    def _pointer(self) -> Path:
        """Name the folder of the last version."""
        return self._cache / f"{self._name}.last"

    def _remember(self, folder: Path) -> None:
        """Note the last version whose files are all here."""
        new = self._pointer.with_suffix(".new")
        new.write_text(folder.name, encoding="utf-8")
        new.replace(self._pointer)

    def _last(self, reason: str, error: Exception) -> Path:
        if not self._pointer.is_file():
            raise BucketUnreadable(f"the service does not answer: {reason}") from error
        folder = self._cache / self._pointer.read_text(encoding="utf-8")
        logger.warning("s3 does not answer (%s): %s is the last version", reason, folder)
        return folder


def _matching(files: Iterable[RemoteFile], patterns: Sequence[str]) -> list[RemoteFile]:
    return [file for file in files if _matches(file.name, patterns)]


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _is_whole(folder: Path, file: RemoteFile) -> bool:
    path = folder / file.name
    return path.is_file() and path.stat().st_size == file.size
