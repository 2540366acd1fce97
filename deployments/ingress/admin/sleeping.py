"""vLLM's routes by which trainers that share the GPU have the server give its memory back."""

from collections.abc import Sequence
from typing import Annotated, TypedDict

from fastapi import APIRouter, Query, Request
from starlette.responses import Response

from configs.wire.sleep import SleepMode
from deployments.engine_commands import SleepEngine, WakeEngine
from deployments.ingress.access.keys import require
from deployments.ingress.admin.adapters import AllReplicas
from deployments.ingress.admin.times import CommandTimes
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.errors import invalid
from deployments.ingress.http.responses import json_response

_LEVELS = ("1", "2")


class SleepingReply(TypedDict):
    """Whether the ranks of all replicas have given their memory back."""

    is_sleeping: bool


def routes(engine: EngineClient) -> APIRouter:
    """The routes, for callers with the admin key."""
    router = APIRouter()
    replicas = AllReplicas(engine)
    times = CommandTimes()

    @router.post("/sleep")
    async def sleep(request: Request, level: str = "1", mode: str = "abort") -> Response:
        require(request, admin=True)
        _require_one_of(_LEVELS, level, "level")
        _require_one_of(tuple(SleepMode), mode, "mode")
        await replicas.run(SleepEngine(times.next(), SleepMode(mode)))
        return Response()

    @router.post("/wake_up")
    async def wake_up(
        request: Request, tags: Annotated[list[str] | None, Query()] = None
    ) -> Response:
        require(request, admin=True)
        if tags:
            raise invalid("leave `tags` out: weights and KV cache wake together", "tags")
        await replicas.run(WakeEngine(times.next()))
        return Response()

    @router.get("/is_sleeping")
    async def is_sleeping(request: Request) -> Response:
        require(request, admin=True)
        reply: SleepingReply = {"is_sleeping": await engine.sleeping()}
        return json_response(reply)

    return router


def _require_one_of(known: Sequence[str], given: str, name: str) -> None:
    if given not in known:
        raise invalid(f"`{name}` must be one of {', '.join(known)}, not {given[:64]!r}", name)
