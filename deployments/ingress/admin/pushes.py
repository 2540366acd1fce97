"""The route by which trainers push an adapter's weights: no disk, no other service."""

import asyncio
from functools import partial
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from starlette.requests import ClientDisconnect
from starlette.responses import Response

from configs.wire.adapters import AdapterError, AdapterReference, AdapterSource, parse_reference
from deployments.contract import ErrorKind, PushAdapter, PushedContent
from deployments.ingress.access.keys import require
from deployments.ingress.admin.adapters import AdapterReply, AllReplicas, check_new_name
from deployments.ingress.admin.push_bodies import read_push
from deployments.ingress.admin.times import CommandTimes
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.sse import ClientGone
from sources.pushed import PushedFiles

PATH = "/v1/push_lora_adapter"
_MAX_NAME = 1024
_YOUNGER = (
    "a younger push of '{}' is served: if no other trainer sent it, a clock was set back or the "
    "nodes' differ; push again later"
)

_FIELDS: dict[str, Any] = {
    "lora_name": {"type": "string"},
    "load_inplace": {"type": "boolean", "default": False},
}
_FORM = {
    "type": "object",
    "required": ["lora_name", "adapter_config", "adapter_model"],
    "properties": {
        **_FIELDS,
        "adapter_config": {"type": "string"},
        "adapter_model": {"type": "string", "format": "binary"},
    },
}
_JSON = {
    "type": "object",
    "required": ["lora_name", "adapter_config", "shared_memory"],
    "properties": {
        **_FIELDS,
        "adapter_config": {"type": "object"},
        "shared_memory": {"type": "string"},
        "size": {"type": "integer", "nullable": True},
    },
}
_BODY = {
    "content": {"application/json": {"schema": _JSON}, "multipart/form-data": {"schema": _FORM}},
    "required": True,
}


def routes(engine: EngineClient) -> APIRouter:
    """The route, for callers with the admin key."""
    router = APIRouter()
    pushes = _Pushes(engine)

    @router.post(PATH, openapi_extra={"requestBody": _BODY})
    async def push_lora_adapter(request: Request) -> Response:
        require(request, admin=True)
        return await pushes.take(request)

    return router


class _Pushes:
    """Reads one push after another: together they need no more memory than one."""

    def __init__(self, engine: EngineClient) -> None:
        settings = engine.settings
        self._engine = engine
        self._replicas = AllReplicas(engine)
        self._files = PushedFiles(settings.push, settings.max_file_bytes)
        self._seconds = settings.api.body_timeout_s
        self._lock = asyncio.Lock()
        self._times = CommandTimes()

    async def take(self, request: Request) -> Response:
        """Read a push, have all replicas serve it, and reply with its row."""
        try:
            async with self._lock:
                push = await self._receive(request)
            try:
                return json_response(await self._serve(push))
            finally:
                # Drivers of this node hold what they serve; nothing else is kept.
                await asyncio.to_thread(partial(self._files.release, push.digest, forget=True))
        except AdapterError as error:
            raise RequestError(ErrorKind(error.refusal.value), error.message) from error

    async def _receive(self, request: Request) -> PushAdapter:
        """The command for the drivers; its files stay in this memory until `release`."""
        try:
            with self._files.incoming("pushed") as weights:
                async with asyncio.timeout(self._seconds):
                    form = await read_push(request, weights)
                name = await self._name(form.lora_name)
                store = partial(self._files.store, name.id, form.adapter_config, weights)
                digest = await asyncio.to_thread(store)
                return PushAdapter(name, digest, self._times.next(), form.load_inplace)
        except ClientDisconnect as gone:
            raise ClientGone from gone
        except TimeoutError as error:
            message = f"the body did not come within {self._seconds:g} s (api.body_timeout_s)"
            raise invalid(message) from error

    async def _serve(self, command: PushAdapter) -> AdapterReply:
        reports = await self._engine.adapters(command)
        if any(report.lacks_files for report in reports):
            content = await asyncio.to_thread(self._files.content, command.digest)
            assert content is not None, "this process holds it"
            # The replicas that have it already ignore an equal push.
            command = msgspec.structs.replace(command, content=PushedContent(*content))
            reports = await self._engine.adapters(command)
        row = self._replicas.rows(reports)[0]
        if row["digest"] != command.digest:
            raise RequestError(ErrorKind.UNAVAILABLE, _YOUNGER.format(command.name.id))
        return row

    async def _name(self, text: str) -> AdapterReference:
        """The name that clients will use; it has no source of its own, and no revision."""
        try:
            name = parse_reference(text, self._replicas.source)
        except ValueError as error:
            raise invalid(str(error), "lora_name") from error
        await check_new_name(self._engine, text)
        sources = (self._replicas.source, AdapterSource.PUSHED)
        if name.source not in sources or name.revision is not None or len(text) > _MAX_NAME:
            raise invalid(
                f"a pushed adapter's name has at most {_MAX_NAME} characters, no source and no "
                f"revision: not `{text[:_MAX_NAME]}`",
                "lora_name",
            )
        return name
