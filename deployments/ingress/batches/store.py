"""The files and batches of all API keys. Each key has a folder of its own, and sees no other.

    OWNER/files/ID.json, ID.data            a file's record and its bytes
    OWNER/batches/ID.json, ID.cancel        a batch's record, and the wish to end it
    OWNER/parts/ID/NUMBER-NAME              finished lines of a batch that runs
    open/OWNER.ID                           a batch that has not ended, for the runner

A batch's record has one writer: the route that makes it, then the runner.
"""

import asyncio
import hashlib
import logging
import re
import secrets
import time
from collections.abc import Callable, Sequence
from typing import IO, ParamSpec, TypeVar

import msgspec

from configs.batches import BatchesConfig
from deployments.contract import ErrorKind
from deployments.ingress.batches.records import ENDED, BatchRecord, FileRecord, OpenBatch
from deployments.ingress.batches.storage import Storage
from deployments.ingress.http.errors import RequestError, invalid

_OFF = "files and batches are off on this server: its operator can set `batches.storage`"
_DAY = 86_400
_PIECE_BYTES = 1 << 20
_READS = 5
_STORAGE_RETRY_S = 60.0
_ID = re.compile(r"(file-|batch_)[0-9a-f]{28}")

R = TypeVar("R", FileRecord, BatchRecord)
T = TypeVar("T")
A = ParamSpec("A")

logger = logging.getLogger("loray.ingress.batches")


async def from_store(call: Callable[A, T], *args: A.args, **kwargs: A.kwargs) -> T:
    """A reply of the store, from a thread; RequestError if its folder or bucket fails."""
    try:
        return await asyncio.to_thread(call, *args, **kwargs)
    except OSError as error:
        logger.warning("batches.storage: %s", error)
        raise RequestError(
            ErrorKind.UNAVAILABLE,
            "the server's storage of files and batches fails, or is full: try again later",
            retry_after_s=_STORAGE_RETRY_S,
        ) from error


class BatchStore:
    """All methods block, and may be called from any thread."""

    def __init__(self, config: BatchesConfig, clock: Callable[[], float] = time.time) -> None:
        """clock: seconds since the epoch."""
        self.config = config
        self._clock = clock
        self._opened: Storage | None = None

    @property
    def storage(self) -> Storage:
        """Where everything is; RequestError if nothing is to be kept."""
        if self.config.storage is None:
            raise invalid(_OFF)
        if self._opened is None:
            self._opened = Storage(self.config.storage)
        return self._opened

    @property
    def now(self) -> int:
        """Seconds since the epoch."""
        return int(self._clock())

    def add_file(
        self,
        owner: str,
        content: IO[bytes],
        filename: str,
        keep_s: int | None = None,
        output: bool = False,
    ) -> FileRecord:
        """Keep a file; output: it is the result of a batch, which is never refused."""
        if not output:
            self._check_room(owner)
        id, expires = self._new_id("file-"), self.now + (keep_s or self.config.keep_days * _DAY)
        with self.storage.writer(_data(owner, id)) as stream:
            while piece := content.read(_PIECE_BYTES):
                stream.write(piece)
        record = FileRecord(
            id=id,
            bytes=self.storage.size(_data(owner, id)),
            created_at=self.now,
            filename=filename,
            purpose="batch_output" if output else "batch",
            expires_at=expires,
        )
        self.storage.write(_record(owner, "files", id), msgspec.json.encode(record))
        return record

    def file(self, owner: str, id: str) -> FileRecord:
        """A file's record; RequestError if this owner has no such file."""
        return self._read(owner, "files", id, FileRecord)

    def content(self, owner: str, id: str) -> IO[bytes]:
        """A stream of a file's bytes; RequestError if this owner has no such file."""
        self.file(owner, id)
        return self.storage.open(_data(owner, id))

    def delete_file(self, owner: str, id: str) -> None:
        """Delete a file; RequestError if this owner has no such file."""
        self.file(owner, id)
        self._drop_file(owner, id)

    def files(self, owner: str, after: str | None, limit: int, newest: bool) -> list[FileRecord]:
        """Up to limit + 1 of the owner's files by age, from the one behind `after` on."""
        return self._page(owner, "files", after, limit, newest, FileRecord)

    def add_batch(
        self, owner: str, key: str, record: BatchRecord, output_keep_s: int | None
    ) -> None:
        """Keep a new batch, for the runner to find; RequestError if too many have not ended."""
        open_now = sum(each.owner == owner for each in self.open_batches())
        if open_now >= self.config.max_open:
            message = f"{open_now} batches have not ended: at most {self.config.max_open} may"
            raise RequestError(ErrorKind.QUOTA, f"{message} at once", retry_after_s=60.0)
        self.save_batch(owner, record)
        entry = OpenBatch(owner, record.id, key, output_keep_s)
        self.storage.write(_open(entry), msgspec.json.encode(entry))

    def new_batch_id(self) -> str:
        """An id that is not used yet."""
        return self._new_id("batch_")

    def batch(self, owner: str, id: str) -> BatchRecord:
        """A batch as its owner sees it; RequestError if this owner has no such batch."""
        record = self._read(owner, "batches", id, BatchRecord)
        if record.status not in ENDED and (since := self.cancelling_since(owner, id)) is not None:
            record.status, record.cancelling_at = "cancelling", since
        return record

    def batches(self, owner: str, after: str | None, limit: int) -> list[BatchRecord]:
        """Up to limit + 1 of the owner's batches, the newest first, from behind `after` on."""
        found = self._page(owner, "batches", after, limit, True, BatchRecord)
        return [self.batch(owner, each.id) for each in found]

    def save_batch(self, owner: str, record: BatchRecord) -> None:
        """Write a batch's record."""
        self.storage.write(_record(owner, "batches", record.id), msgspec.json.encode(record))

    def cancel(self, owner: str, id: str) -> BatchRecord:
        """Ask the runner to end a batch; nothing happens to one that has ended."""
        record = self.batch(owner, id)
        if record.status not in ENDED and record.status != "cancelling":
            self.storage.write(_cancel(owner, id), str(self.now).encode())
        return self.batch(owner, id)

    def cancelling_since(self, owner: str, id: str) -> int | None:
        """When its owner wished to end it, in seconds since the epoch."""
        since = self.storage.read(_cancel(owner, id))
        return None if since is None else int(since)

    def is_to_end(self, entry: OpenBatch) -> bool:
        """Whether a batch that has not ended was cancelled or has expired."""
        record = self.batch(entry.owner, entry.id)
        return record.status == "cancelling" or self.now >= record.expires_at

    def open_batches(self) -> list[OpenBatch]:
        """The batches of all owners that have not ended, the oldest first."""
        contents = (self.storage.read(f"open/{each.name}") for each in self.storage.objects("open"))
        found = [msgspec.json.decode(each, type=OpenBatch) for each in contents if each is not None]
        return sorted(found, key=lambda entry: entry.id)

    def close(self, entry: OpenBatch) -> None:
        """Forget the parts of a batch that has ended."""
        self.storage.delete_folder(parts_of(entry))
        self.storage.delete(_cancel(entry.owner, entry.id))
        self.storage.delete(_open(entry))

    def delete_expired(self) -> None:
        """Delete files and ended batches that were kept long enough; inputs that are used stay."""
        used = self._open_inputs()
        oldest = f"batch_{(self.now - self.config.keep_days * _DAY) * 1000:012x}"
        for owner in (each for each in self.storage.folders("") if each != "open"):
            for id in self._ids(owner, "files"):
                record = self._find(owner, "files", id, FileRecord)
                if id in used or record is None or record.expires_at is None:
                    continue
                if record.expires_at <= self.now:
                    self._drop_file(owner, id)
            for id in self._ids(owner, "batches"):
                if id < oldest and not self.storage.exists(f"open/{owner}.{id}"):
                    self.storage.delete(_record(owner, "batches", id))

    def _open_inputs(self) -> set[str]:
        """The input files of the batches that have not ended."""
        records = (
            self._find(each.owner, "batches", each.id, BatchRecord) for each in self.open_batches()
        )
        return {record.input_file_id for record in records if record is not None}

    def _check_room(self, owner: str) -> None:
        stored = [each for each in self.storage.objects(f"{owner}/files") if _is_data(each.name)]
        if len(stored) >= self.config.max_files:
            raise invalid(f"{len(stored)} files are kept already: delete some", "file")
        room = self.config.max_stored_bytes - self.config.max_file_bytes
        if sum(each.size for each in stored) > max(0, room):
            limit = self.config.max_stored_bytes
            raise invalid(f"almost {limit} bytes are kept already: delete some files", "file")

    def _drop_file(self, owner: str, id: str) -> None:
        self.storage.delete(_record(owner, "files", id))
        self.storage.delete(_data(owner, id))

    def _new_id(self, prefix: str) -> str:
        # By age, as listings are; the rest cannot be guessed.
        return f"{prefix}{int(self._clock() * 1000):012x}{secrets.token_hex(8)}"

    def _ids(self, owner: str, kind: str) -> list[str]:
        names = [each.name for each in self.storage.objects(f"{owner}/{kind}")]
        return [name.removesuffix(".json") for name in names if name.endswith(".json")]

    def _page(
        self, owner: str, kind: str, after: str | None, limit: int, newest: bool, type: type[R]
    ) -> list[R]:
        ids: Sequence[str] = self._ids(owner, kind)
        if after is not None:
            ids = [id for id in ids if (id < after if newest else id > after)]
        some = (ids[::-1] if newest else ids)[: limit + 1]
        found = (self._find(owner, kind, id, type) for id in some)
        return [record for record in found if record is not None]

    def _read(self, owner: str, kind: str, id: str, type: type[R]) -> R:
        record = self._find(owner, kind, id, type) if _ID.fullmatch(id) else None
        if record is None:
            noun = "file" if kind == "files" else "batch"
            raise RequestError(ErrorKind.NOT_FOUND, f"there is no {noun} `{id}`")
        return record

    def _find(self, owner: str, kind: str, id: str, type: type[R]) -> R | None:
        for _ in range(_READS):
            try:
                content = self.storage.read(_record(owner, kind, id))
                return None if content is None else msgspec.json.decode(content, type=type)
            except (msgspec.DecodeError, OSError):
                # Arrow takes an object's size first: one that was replaced meanwhile is cut.
                continue
        raise RequestError(ErrorKind.UNAVAILABLE, f"`{id}` cannot be read now", retry_after_s=1.0)


def owner_of(key: str) -> str:
    """The folder of an API key, by its name; all callers without a key have one together."""
    return hashlib.blake2b(key.encode(), digest_size=16).hexdigest()


def parts_of(entry: OpenBatch) -> str:
    """The folder of a batch's finished lines."""
    return f"{entry.owner}/parts/{entry.id}"


def _record(owner: str, kind: str, id: str) -> str:
    return f"{owner}/{kind}/{id}.json"


def _data(owner: str, id: str) -> str:
    return f"{owner}/files/{id}.data"


def _is_data(name: str) -> bool:
    return name.endswith(".data")


def _cancel(owner: str, id: str) -> str:
    return f"{owner}/batches/{id}.cancel"


def _open(entry: OpenBatch) -> str:
    return f"open/{entry.owner}.{entry.id}"
