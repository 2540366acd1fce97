"""Adapters in S3 buckets, under configured roots only, with the server's own credentials."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from typing import Any, NoReturn

from configs.adapters import FetchConfig, S3Config
from configs.wire.adapters import AdapterError, AdapterReference, AdapterRefusal, AdapterSource
from sources.base import (
    FileBody,
    FoundAdapter,
    RemoteFile,
    Token,
    Unreachable,
    is_adapter_file,
    refuse,
)
from sources.s3_client import connect, error_code

_PIECE_BYTES = 1 << 16
_MISSING = frozenset({"NoSuchBucket", "NoSuchKey", "404"})
_CHANGED = frozenset({"PreconditionFailed", "412"})
_FORBIDDEN = frozenset(
    {"AccessDenied", "403", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken"}
)


class S3Source:
    """One S3 service; boto3 itself repeats requests, with exponential back-off and jitter."""

    def __init__(self, config: S3Config, fetch: FetchConfig, allow_pickle: bool) -> None:
        """Make the client; ImportError names the package to install if boto3 is missing."""
        self._roots = config.roots
        self._allow_pickle = allow_pickle
        self._service = connect(
            config,
            "adapters.s3",
            fetch.connect_timeout_s,
            fetch.read_timeout_s,
            fetch.attempts,
        )
        self._client, self._errors = self._service.api, self._service.errors

    def resolve(self, reference: AdapterReference, token: Token) -> FoundAdapter:
        """Return the files directly under the id's prefix; a file's tag is its ETag."""
        bucket, prefix = self._location(reference)
        with self._answering(reference.id):
            listed = self._client.list_objects_v2(Bucket=bucket, Prefix=prefix, Delimiter="/")
            files = tuple(
                RemoteFile(name, entry["Size"], entry["ETag"])
                for entry in _entries(listed)
                if is_adapter_file(name := entry["Key"].removeprefix(prefix), self._allow_pickle)
            )
        if not files:
            refuse(
                AdapterRefusal.NOT_FOUND,
                f"adapter {reference.id!r} was not found: s3 has no files of an adapter there",
            )
        tags = ",".join(f"{file.name}={file.tag}" for file in files)
        endpoint = self._client.meta.endpoint_url
        return FoundAdapter(reference, f"s3:{endpoint}/{bucket}/{prefix}:{tags}", files)

    def tags(self, prefix: str) -> dict[str, dict[str, str]]:
        """Return the ETags of the adapter files in each folder under a prefix."""
        bucket, path = self._location(AdapterReference(AdapterSource.S3, prefix))
        found: dict[str, dict[str, str]] = {}
        pages = self._client.get_paginator("list_objects_v2")
        with self._answering(prefix):
            for page in pages.paginate(Bucket=bucket, Prefix=path):
                for entry in _entries(page):
                    folder, _, name = entry["Key"].removeprefix(path).partition("/")
                    if is_adapter_file(name, self._allow_pickle):
                        found.setdefault(folder, {})[name] = entry["ETag"]
        return found

    def text(self, prefix: str, name: str, max_bytes: int) -> str | None:
        """Return a small UTF-8 file under a prefix; None if there is none."""
        bucket, path = self._location(AdapterReference(AdapterSource.S3, prefix))
        try:
            with self._answering(prefix):
                response = self._client.get_object(Bucket=bucket, Key=path + name)
                with closing(response["Body"]) as body:
                    data: bytes = body.read(max_bytes + 1)
        except AdapterError as error:
            if error.refusal is AdapterRefusal.NOT_FOUND:
                return None
            raise
        if len(data) > max_bytes:
            raise ValueError(f"{prefix}/{name} has more than {max_bytes} bytes")
        return data.decode("utf-8")

    @contextmanager
    def _answering(self, name: str) -> Iterator[None]:
        """Turn boto3's errors into AdapterError and Unreachable."""
        try:
            yield
        except self._errors.ClientError as error:
            if self.is_transient(error):
                raise Unreachable(f"s3 answered {error_code(error)}") from error
            self._refuse(error, name)
        except self._errors.BotoCoreError as error:
            self._refuse_unanswered(error, name)
        except (KeyError, ValueError) as error:
            raise Unreachable("its answer is no listing of files") from error

    @contextmanager
    def open(
        self, found: FoundAdapter, file: RemoteFile, start: int, token: Token
    ) -> Iterator[FileBody]:
        """Stream a file; refuses another version than the one that was found."""
        bucket, prefix = self._location(found.reference)
        ranged = {"Range": f"bytes={start}-"} if start else {}
        # boto3 has repeated it: what it raises is not to be tried once more.
        with self._answering(found.reference.id):
            response = self._client.get_object(
                Bucket=bucket, Key=prefix + file.name, IfMatch=file.tag, **ranged
            )
        with closing(response["Body"]) as body:
            first = start if "ContentRange" in response else 0
            yield FileBody(first, body.iter_chunks(_PIECE_BYTES))

    def is_transient(self, error: Exception) -> bool:
        """Return whether it is a transient status, or a broken connection."""
        return self._service.is_transient(error)

    def _location(self, reference: AdapterReference) -> tuple[str, str]:
        """Return bucket and prefix (with a final "/") of an id; refuses paths outside the roots."""
        name = reference.id.removeprefix("s3://").rstrip("/")
        if reference.revision is not None:
            name = f"{name}@{reference.revision}"
        parts = name.split("/")
        if not all(part not in ("", ".", "..") for part in parts):
            refuse(AdapterRefusal.NOT_FOUND, f"{reference.id!r} is not a path in a bucket")
        if not any(f"{name}/".startswith(f"{root}/") for root in self._roots):
            if reference.id.startswith("s3://"):
                refuse(
                    AdapterRefusal.FORBIDDEN,
                    f"adapter {reference.id!r} is not under the server's adapters.s3.roots",
                )
            name = f"{self._roots[0]}/{name}"
        bucket, _, prefix = name.partition("/")
        return bucket, f"{prefix}/" if prefix else ""

    def _refuse(self, error: Any, name: str) -> NoReturn:
        code = error_code(error)
        if code in _MISSING:
            refuse(AdapterRefusal.NOT_FOUND, f"adapter {name!r} was not found in s3", error)
        if code in _FORBIDDEN:
            refuse(
                AdapterRefusal.FORBIDDEN,
                f"adapter {name!r}: s3 refused the server's credentials ({code})",
                error,
            )
        changed = "it changed while it was read: " if code in _CHANGED else ""
        refuse(
            AdapterRefusal.UNAVAILABLE,
            f"adapter {name!r} could not be read from s3: {changed}try again ({code})",
            error,
        )

    def _refuse_unanswered(self, error: Exception, name: str) -> NoReturn:
        if self.is_transient(error):
            raise Unreachable(f"s3 gave no answer ({type(error).__name__})") from error
        if isinstance(error, self._errors.ParamValidationError):
            refuse(AdapterRefusal.NOT_FOUND, f"{name!r} is not a path in a bucket", error)
        refuse(
            AdapterRefusal.UNAVAILABLE,
            f"adapter {name!r}: the server has no credentials for s3, or no region; see boto3's "
            "configuration",
            error,
        )


def _entries(listed: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    """Return the files of a listing; KeyError for an answer that is none, as a page of HTML."""
    if "Name" not in listed:
        raise KeyError("Name")
    found: Sequence[Mapping[str, Any]] = listed.get("Contents", ())
    return found
