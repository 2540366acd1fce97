"""What operators do with adapters: /v1/adapters, and vLLM's two routes for the same.

All of it needs the admin key where any key is configured, and reaches every driver replica.
"""

from collections.abc import Sequence
from typing import Annotated, Literal, TypedDict, get_args

from fastapi import APIRouter, Request
from pydantic import BaseModel, ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from configs.wire.adapters import AdapterReference, AdapterSource, parse_reference
from configs.wire.merging import MergeStrategy, SignMethod
from deployments.contract import (
    AdapterAction,
    AdapterCommand,
    AdapterReport,
    AdapterStatus,
    AdapterTier,
    ErrorKind,
)
from deployments.ingress.access.keys import require
from deployments.ingress.adapter_names.references import full_name, parse_source
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.unicode import Unicode

_STATES: tuple[AdapterTier, ...] = get_args(AdapterTier)

Name = Annotated[Unicode, Field(min_length=1, max_length=1024)]


class AdapterResidency(TypedDict):
    """What one replica has of an adapter, and does with it; last_used: seconds since the epoch."""

    state: AdapterTier
    digest: str | None
    host_bytes: int
    device_pages: int
    pinned: bool
    draining: bool
    running: int
    waiting: int
    num_requests: int
    last_used: float | None


class MergeRecipe(TypedDict):
    """A merge, in the words of a request."""

    ids: list[str]
    weights: Sequence[float]
    merge_strategy: MergeStrategy
    density: float | None
    majority_sign_method: SignMethod | None


class AdapterReply(TypedDict):
    """An adapter over all replicas; state: the best of theirs, root: what the name stands for.

    Merges are listed while a replica has them in memory; they have no source.
    """

    id: str
    object: Literal["adapter"]
    source: str | None
    adapter_id: str
    revision: str | None
    root: str | None
    merged_adapters: MergeRecipe | None
    state: AdapterTier
    digest: str | None
    rank: int | None
    bytes: int | None
    pinned: bool
    num_requests: int
    last_used: float | None
    replicas: dict[str, AdapterResidency]


class AdaptersReply(TypedDict):
    """Every adapter that a replica knows."""

    object: Literal["list"]
    data: list[AdapterReply]


class _Body(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", title="AdapterCommand")


class LoadBody(_Body):
    """POST /v1/adapters: fetch the adapter and stage it on every replica, now.

    id: "[source:]id[@revision]", or only the id with the other two fields. pin: keep it on the
    device. api_token: of whoever may read it at its source; without one the server's own.
    """

    id: Name
    source: Unicode | None = None
    revision: Unicode | None = None
    pin: bool = False
    api_token: Unicode | None = None


class PinBody(_Body):
    """PATCH /v1/adapters/{id}: keep the adapter on the device, or no longer."""

    pinned: bool


class NameBody(BaseModel):
    """vLLM's load_lora_adapter.

    lora_path: a folder under the server's adapter roots, or "[source:]id[@revision]".
    load_inplace: the name may move from what it means now.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnnameBody(BaseModel):
    """vLLM's unload_lora_adapter."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: Name


class _Desk:
    """Brings commands to all replicas, and their answers into one."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.source = engine.settings.default_source

    async def tell(self, command: AdapterCommand) -> list[AdapterReply]:
        """A row an adapter; the first failure is raised."""
        reports = await self.engine.adapters(command)
        _raise_failure(reports)
        return _rows(reports, self.source)

    async def tell_of(self, name: str, action: AdapterAction) -> Response:
        """The row of one adapter."""
        rows = await self.tell(AdapterCommand(action, _reference(name, self.source)))
        if not rows:
            raise RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"no replica knows an adapter `{name}`")
        return json_response(rows[0])


def routes(engine: EngineClient) -> APIRouter:
    """All control routes over this engine."""
    router = APIRouter(prefix="/v1")
    desk = _Desk(engine)
    _add_adapters(router, desk)
    _add_names(router, desk)
    return router


def _add_adapters(router: APIRouter, desk: _Desk) -> None:
    """What is there, and what is done to it."""

    @router.get("/adapters")
    async def listing(request: Request) -> Response:
        require(request, admin=True)
        reply: AdaptersReply = {"object": "list", "data": await desk.tell(_LIST)}
        return json_response(reply)

    @router.get("/adapters/{name:path}")
    async def one(request: Request, name: str) -> Response:
        require(request, admin=True)
        return await desk.tell_of(name, AdapterAction.LIST)

    @router.post("/adapters")
    async def load(request: Request, body: LoadBody) -> Response:
        require(request, admin=True)
        reference = _asked(body, desk.source)
        command = AdapterCommand(
            AdapterAction.LOAD, reference, pin=body.pin, api_token=body.api_token
        )
        return json_response((await desk.tell(command))[0])

    @router.patch("/adapters/{name:path}")
    async def pin(request: Request, name: str, body: PinBody) -> Response:
        require(request, admin=True)
        return await desk.tell_of(name, AdapterAction.PIN if body.pinned else AdapterAction.UNPIN)

    @router.delete("/adapters/{name:path}")
    async def unload(request: Request, name: str) -> Response:
        require(request, admin=True)
        return await desk.tell_of(name, AdapterAction.UNLOAD)


def _add_names(router: APIRouter, desk: _Desk) -> None:
    """Names that operators give, by vLLM's routes."""

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request, body: NameBody) -> Response:
        require(request, admin=True)
        await desk.tell(await _naming(desk.engine, body))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request, body: UnnameBody) -> Response:
        require(request, admin=True)
        name = _reference(body.lora_name, desk.source)
        await desk.tell(AdapterCommand(AdapterAction.UNNAME, name=name))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


_LIST = AdapterCommand(AdapterAction.LIST)


def _reference(name: str, default_source: AdapterSource, field: str = "id") -> AdapterReference:
    try:
        return parse_reference(name, default_source)
    except ValueError as error:
        raise invalid(str(error), field) from error


def _asked(body: LoadBody, default_source: AdapterSource) -> AdapterReference:
    """What is to be loaded; the id may name source and revision by itself."""
    named = parse_source(body.source) if body.source is not None else default_source
    reference = _reference(body.id, named)
    if body.source is not None and reference.source is not named:
        raise invalid(f"`id` names the source {reference.source.value}, `source` another", "source")
    if body.revision is None:
        return reference
    if reference.revision not in (None, body.revision):
        raise invalid("`id` names a revision, `revision` another", "revision")
    return AdapterReference(reference.source, reference.id, body.revision)


async def _naming(engine: EngineClient, body: NameBody) -> AdapterCommand:
    """What load_lora_adapter asks for; nothing can be called as the base model is."""
    source = engine.settings.default_source
    info = await engine.info()
    if body.lora_name in (info.model_name, info.model_id):
        raise invalid(f"`{body.lora_name}` is the base model's name: choose another", "lora_name")
    name = _reference(body.lora_name, source, "lora_name")
    folder = body.lora_path if body.lora_path.startswith("/") else None
    target = None if folder else _reference(body.lora_path, source, "lora_path")
    return AdapterCommand(
        AdapterAction.NAME, target, name=name, folder=folder, replace=body.load_inplace
    )


def _raise_failure(reports: Sequence[AdapterReport]) -> None:
    """Raise the first failure, told with how many replicas it is about."""
    failures = [report.failure for report in reports if report.failure is not None]
    absent = [one for one in failures if one.kind is ErrorKind.ADAPTER_NOT_FOUND]
    if len(absent) < len(reports):
        # Replicas differ in what they know; it is enough that one does.
        failures = [one for one in failures if one.kind is not ErrorKind.ADAPTER_NOT_FOUND]
    if failures:
        error = RequestError.of(failures[0])
        if len(reports) > 1:
            error.message += f" (on {len(failures)} of {len(reports)} replicas)"
        raise error


def _rows(reports: Sequence[AdapterReport], default_source: AdapterSource) -> list[AdapterReply]:
    """One row for each name, from what each replica says of it."""
    told: dict[AdapterReference, dict[str, AdapterStatus]] = {}
    for report in reports:
        for status in report.adapters:
            told.setdefault(status.reference, {})[report.replica] = status
    replicas = [report.replica for report in reports]
    rows = [_row(each, by_replica, replicas, default_source) for each, by_replica in told.items()]
    return sorted(rows, key=lambda row: (str(row["id"]), str(row["digest"])))


def _row(
    reference: AdapterReference,
    told: dict[str, AdapterStatus],
    replicas: Sequence[str],
    default_source: AdapterSource,
) -> AdapterReply:
    absent = AdapterStatus(reference, "absent")
    best = max(told.values(), key=lambda status: _STATES.index(status.state))
    uses = [status.last_used for status in told.values() if status.last_used is not None]
    return {
        "id": reference.id if reference.parts else full_name(reference, default_source),
        "object": "adapter",
        "source": None if reference.parts else reference.source.value,
        "adapter_id": reference.id,
        "revision": reference.revision,
        "root": None if best.target is None else full_name(best.target, default_source),
        "merged_adapters": _recipe(reference, default_source),
        "state": best.state,
        "digest": best.digest,
        "rank": best.rank,
        "bytes": best.bytes,
        "pinned": any(status.pinned for status in told.values()),
        "num_requests": sum(status.num_requests for status in told.values()),
        "last_used": max(uses, default=None),
        "replicas": {name: _residency(told.get(name, absent)) for name in replicas},
    }


def _recipe(reference: AdapterReference, default_source: AdapterSource) -> MergeRecipe | None:
    """What a request would ask for to get this merge; None for other adapters."""
    rule = reference.rule
    if rule is None:
        return None
    return {
        "ids": [full_name(part, default_source) for part in reference.parts],
        "weights": rule.weights,
        "merge_strategy": rule.strategy,
        "density": rule.density if rule.prunes else None,
        "majority_sign_method": rule.sign_method if rule.elects_signs else None,
    }


def _residency(status: AdapterStatus) -> AdapterResidency:
    """What one replica has and does of it."""
    return {
        "state": status.state,
        "digest": status.digest,
        "host_bytes": status.host_bytes,
        "device_pages": status.device_pages,
        "pinned": status.pinned,
        "draining": status.draining,
        "running": status.running,
        "waiting": status.waiting,
        "num_requests": status.num_requests,
        "last_used": status.last_used,
    }
