"""OpenAI's /v1/batches. A runner of its own computes them; these routes keep records."""

from collections.abc import Callable
from typing import Annotated, Literal

from fastapi import APIRouter, Query, Request
from pydantic import Field
from starlette.responses import Response

from deployments.ingress.access.keys import grant_of
from deployments.ingress.batches.lines import ENDPOINTS
from deployments.ingress.batches.records import BatchRecord
from deployments.ingress.batches.store import BatchStore, from_store, owner_of
from deployments.ingress.http.body_lists import Closed, at_most
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.unicode import Unicode
from deployments.ingress.openai.files import checked_keep
from deployments.ingress.openai.pages import page

_WINDOW_SECONDS = 86_400
_Key = Annotated[Unicode, Field(max_length=64)]
_Value = Annotated[Unicode, Field(max_length=512)]
_Metadata = Annotated[dict[_Key, _Value], Field(max_length=16), at_most(16)]


class OutputExpiresAfter(Closed):
    """For how long a batch's output is kept."""

    anchor: Unicode
    seconds: int


class BatchBody(Closed):
    """POST /v1/batches."""

    input_file_id: Unicode
    endpoint: Unicode
    completion_window: Literal["24h"]
    metadata: _Metadata | None = None
    output_expires_after: OutputExpiresAfter | None = None


def routes(store: BatchStore, wake: Callable[[], None]) -> APIRouter:
    """The routes over this store; wake: called when the runner is to look at the batches."""
    router = APIRouter(prefix="/v1/batches")

    @router.post("")
    async def create(request: Request, body: BatchBody) -> Response:
        key = grant_of(request).name
        record = await from_store(_create, store, key, body)
        wake()
        return json_response(record)

    @router.get("")
    async def batches(
        request: Request, after: str | None = None, limit: int = Query(20, ge=1, le=100)
    ) -> Response:
        owner = owner_of(grant_of(request).name)
        return json_response(page(await from_store(store.batches, owner, after, limit), limit))

    @router.get("/{id}")
    async def batch(request: Request, id: str) -> Response:
        owner = owner_of(grant_of(request).name)
        return json_response(await from_store(store.batch, owner, id))

    @router.post("/{id}/cancel")
    async def cancel(request: Request, id: str) -> Response:
        record = await from_store(store.cancel, owner_of(grant_of(request).name), id)
        wake()
        return json_response(record)

    return router


def _create(store: BatchStore, key: str, body: BatchBody) -> BatchRecord:
    if body.endpoint not in ENDPOINTS:
        known = ", ".join(sorted(ENDPOINTS))
        raise invalid(f"`endpoint` must be one of {known}", "endpoint")
    owner, after = owner_of(key), body.output_expires_after
    store.file(owner, body.input_file_id)
    now = store.now
    record = BatchRecord(
        id=store.new_batch_id(),
        endpoint=body.endpoint,
        input_file_id=body.input_file_id,
        created_at=now,
        expires_at=now + _WINDOW_SECONDS,
        metadata=body.metadata,
    )
    keep_s = None if after is None else checked_keep(after.anchor, after.seconds)
    store.add_batch(owner, key, record, keep_s)
    return record
