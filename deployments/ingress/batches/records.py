"""Files and batches in OpenAI's form, as they are stored and as replies have them."""

from typing import Literal

import msgspec

from deployments.ingress.batches.usage import BatchUsage

BatchStatus = Literal[
    "validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling",
    "cancelled",
]  # fmt: skip
ENDED: frozenset[BatchStatus] = frozenset({"failed", "completed", "expired", "cancelled"})


class FileRecord(msgspec.Struct, kw_only=True):
    """A file; bytes: its size, created_at, expires_at: seconds since the epoch."""

    id: str
    bytes: int
    created_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    expires_at: int | None = None
    object: Literal["file"] = "file"
    status: Literal["processed"] = "processed"


class LineFault(msgspec.Struct):
    """What is wrong with a line of a batch's input; line: its number, from 1."""

    code: str
    message: str
    line: int | None = None
    param: str | None = None


class BatchErrors(msgspec.Struct):
    """What is wrong with a batch's input."""

    data: list[LineFault] = []
    object: Literal["list"] = "list"


class RequestCounts(msgspec.Struct):
    """Requests of a batch; failed: those whose status is not 200."""

    total: int = 0
    completed: int = 0
    failed: int = 0


class BatchRecord(msgspec.Struct, kw_only=True):
    """A batch; times in seconds since the epoch, None for what has not happened.

    usage: the tokens of its results, when it has ended.
    """

    id: str
    endpoint: str
    input_file_id: str
    created_at: int
    expires_at: int
    status: BatchStatus = "validating"
    completion_window: str = "24h"
    metadata: dict[str, str] | None = None
    errors: BatchErrors | None = None
    output_file_id: str | None = None
    error_file_id: str | None = None
    in_progress_at: int | None = None
    finalizing_at: int | None = None
    completed_at: int | None = None
    failed_at: int | None = None
    expired_at: int | None = None
    cancelling_at: int | None = None
    cancelled_at: int | None = None
    request_counts: RequestCounts = msgspec.field(default_factory=RequestCounts)
    usage: BatchUsage | None = None
    object: Literal["batch"] = "batch"


class OpenBatch(msgspec.Struct, frozen=True):
    """A batch that has not ended; key: the name of the API key that it runs under."""

    owner: str
    id: str
    key: str
    output_keep_s: int | None = None
