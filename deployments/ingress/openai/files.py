"""OpenAI's /v1/files: inputs and outputs of batches. Each API key sees its own."""

from collections.abc import Iterator
from typing import IO, Any, Literal

from fastapi import APIRouter, Query, Request
from starlette.concurrency import iterate_in_threadpool
from starlette.datastructures import FormData, UploadFile
from starlette.responses import Response, StreamingResponse

from deployments.ingress.access.keys import grant_of
from deployments.ingress.batches.records import FileRecord
from deployments.ingress.batches.store import BatchStore, from_store, owner_of
from deployments.ingress.http.bodies import bounded
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.responses import json_response
from deployments.ingress.openai.pages import DeletedFile, page

PATH = "/v1/files"
_MAX_FIELD_BYTES = 4096
_FORM_BYTES = 1 << 16  # Around the file: the form's other fields and its borders.
_UPLOAD_SECONDS = 600.0
_MAX_NAME = 255
_PIECE_BYTES = 1 << 16
_SHORTEST_KEEP, _LONGEST_KEEP = 3600, 30 * 86_400
UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": ["batch"]},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer"},
                    },
                }
            }
        },
    }
}
"""The body of an upload, for /openapi.json."""


def routes(store: BatchStore) -> APIRouter:
    """The routes over this store."""
    router = APIRouter(prefix=PATH)

    @router.post("", openapi_extra=UPLOAD)
    async def upload(request: Request) -> Response:
        _ = store.storage  # Refuses before it reads the body, if nothing is to be kept.
        most = store.config.max_file_bytes + _FORM_BYTES
        streamed = Request(request.scope, bounded(request.receive, most, _UPLOAD_SECONDS))
        fields = {"max_files": 1, "max_fields": 8, "max_part_size": _MAX_FIELD_BYTES}
        async with streamed.form(**fields) as form:
            file, keep_s = _checked(form)
            owner, name = owner_of(grant_of(request).name), (file.filename or "")[:_MAX_NAME]
            record = await from_store(store.add_file, owner, file.file, name, keep_s)
        return json_response(record)

    @router.get("")
    async def files(
        request: Request,
        after: str | None = None,
        limit: int = Query(1000, ge=1, le=10_000),
        order: Literal["asc", "desc"] = "desc",
        purpose: str | None = None,
    ) -> Response:
        owner = owner_of(grant_of(request).name)
        most = min(limit, store.config.max_files)
        found = await from_store(store.files, owner, after, most, order == "desc")
        return json_response(page(found, most, lambda each: purpose in (None, each.purpose)))

    @router.get("/{id}")
    async def file(request: Request, id: str) -> Response:
        return json_response(await _record(request, id))

    @router.get("/{id}/content")
    async def content(request: Request, id: str) -> Response:
        record = await _record(request, id)
        stream = await from_store(store.content, owner_of(grant_of(request).name), id)
        pieces = iterate_in_threadpool(_pieces(stream))
        headers = {"content-length": str(record.bytes)}
        return StreamingResponse(pieces, headers=headers, media_type="application/octet-stream")

    @router.delete("/{id}")
    async def delete(request: Request, id: str) -> Response:
        await from_store(store.delete_file, owner_of(grant_of(request).name), id)
        gone: DeletedFile = {"id": id, "object": "file", "deleted": True}
        return json_response(gone)

    async def _record(request: Request, id: str) -> FileRecord:
        return await from_store(store.file, owner_of(grant_of(request).name), id)

    return router


def _checked(form: FormData) -> tuple[UploadFile, int | None]:
    """The file of an upload, and for how many seconds it is to be kept."""
    file, purpose = form.get("file"), form.get("purpose")
    if not isinstance(file, UploadFile):
        raise invalid("`file` must be a file", "file")
    if purpose != "batch":
        raise invalid("`purpose` must be batch: files have no other use here", "purpose")
    anchor, seconds = form.get("expires_after[anchor]"), form.get("expires_after[seconds]")
    if anchor is None and seconds is None:
        return file, None
    return file, checked_keep(anchor, seconds)


def checked_keep(anchor: object, seconds: object) -> int:
    """The seconds of an `expires_after`."""
    if anchor != "created_at":
        raise invalid("`expires_after.anchor` must be created_at", "expires_after")
    digits = str(seconds)
    known = digits.isascii() and digits.isdecimal() and len(digits) < 10
    if not known or not _SHORTEST_KEEP <= int(digits) <= _LONGEST_KEEP:
        message = f"`expires_after.seconds` must be in [{_SHORTEST_KEEP}, {_LONGEST_KEEP}]"
        raise invalid(message, "expires_after")
    return int(digits)


def _pieces(stream: IO[bytes]) -> Iterator[bytes]:
    with stream:
        while piece := stream.read(_PIECE_BYTES):
            yield piece
