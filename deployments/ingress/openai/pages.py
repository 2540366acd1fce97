"""Pages of listings in OpenAI's form."""

from collections.abc import Callable, Sequence
from typing import Any, Literal, TypedDict, TypeVar

from deployments.ingress.batches.records import BatchRecord, FileRecord
from deployments.ingress.openai.reply_types import ModelReply, ModelsReply

R = TypeVar("R", FileRecord, BatchRecord)


class FilesReply(TypedDict):
    """A page of the caller's files."""

    object: Literal["list"]
    data: list[FileRecord]
    first_id: str | None
    last_id: str | None
    has_more: bool


class BatchesReply(TypedDict):
    """A page of the caller's batches."""

    object: Literal["list"]
    data: list[BatchRecord]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(TypedDict):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: bool


def page(
    found: Sequence[R], limit: int, wanted: Callable[[R], bool] = lambda _: True
) -> dict[str, Any]:
    """A page of up to `limit` records; found: one more if there are more."""
    shown = [each for each in found[:limit] if wanted(each)]
    return {
        "object": "list",
        "data": shown,
        "first_id": shown[0].id if shown else None,
        "last_id": shown[-1].id if shown else None,
        "has_more": len(found) > limit,
    }


def models_page(models: list[ModelReply]) -> ModelsReply:
    """All models in one page; the base model is always among them."""
    return {
        "object": "list",
        "data": models,
        "first_id": models[0]["id"],
        "last_id": models[-1]["id"],
        "has_more": False,
    }
