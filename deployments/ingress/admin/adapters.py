"""Admin routes for adapters: /v1/adapters, and vLLM's load_lora_adapter and unload_lora_adapter.

Where any API key is configured, all of them need the admin key. Each command goes to every driver
replica.
"""

from collections.abc import Callable, Sequence
from typing import Annotated, Literal, TypedDict, get_args

import msgspec
from fastapi import APIRouter, Request
from pydantic import ConfigDict, Field
from starlette.responses import PlainTextResponse, Response

from configs.wire.adapters import AdapterReference, AdapterSource, parse_reference
from configs.wire.merging import MergeStrategy, SignMethod
from deployments.contract import (
    AdapterReport,
    AdapterStatus,
    AdapterTier,
    ErrorKind,
    ListAdapters,
    LoadAdapter,
    NameAdapter,
    PinAdapter,
    UnloadAdapter,
    UnnameAdapter,
    UnpinAdapter,
)
from deployments.engine_commands import EngineCommand
from deployments.ingress.access.keys import require
from deployments.ingress.adapter_names.references import full_name, parse_source
from deployments.ingress.generation.engine import EngineClient
from deployments.ingress.http.body_lists import Closed
from deployments.ingress.http.body_values import Typed
from deployments.ingress.http.errors import RequestError, invalid
from deployments.ingress.http.responses import json_response
from deployments.ingress.http.unicode import Unicode

_STATES: tuple[AdapterTier, ...] = get_args(AdapterTier)

Name = Annotated[Unicode, Field(min_length=1, max_length=1024)]


class AdapterResidency(msgspec.Struct):
    """An adapter on one replica; last_used: seconds since the epoch."""

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
    """A merge, as the fields of a request."""

    ids: list[str]
    weights: Sequence[float]
    merge_strategy: MergeStrategy
    density: float | None
    majority_sign_method: SignMethod | None


class AdapterReply(TypedDict):
    """An adapter on all replicas.

    state: the one nearest to the device. root: the target of a name from load_lora_adapter.
    source: None for a merge. Merges are listed while a replica has them in memory.
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
    """Every adapter that some replica knows."""

    object: Literal["list"]
    data: list[AdapterReply]


class _Body(Closed):
    model_config = ConfigDict(title="AdapterCommand")


class LoadBody(_Body):
    """POST /v1/adapters: fetch the adapter and stage it on every replica, now.

    id: "[source:]id[@revision]", or only the id beside `source` and `revision`.
    pin: keep it on the device.
    api_token: for the adapter's source; without one the server uses its own.
    """

    id: Name
    source: Unicode | None = None
    revision: Unicode | None = None
    pin: bool = False
    api_token: Unicode | None = None


class PinBody(_Body):
    """PATCH /v1/adapters/{id}: keep the adapter on the device, or stop doing so."""

    pinned: bool


class NameBody(Typed):
    """vLLM's load_lora_adapter.

    lora_path: a folder under the server's adapter roots, or "[source:]id[@revision]".
    load_inplace: the name may move from another adapter.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: Name
    lora_path: Name
    load_inplace: bool = False


class UnnameBody(Typed):
    """vLLM's unload_lora_adapter."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    lora_name: Name


class AllReplicas:
    """Runs commands on all replicas and merges their reports."""

    def __init__(self, engine: EngineClient) -> None:
        self.engine = engine
        self.source = engine.settings.default_source

    async def run(self, command: EngineCommand) -> list[AdapterReply]:
        """The adapters that the command is about; raises the first failure."""
        return self.rows(await self.engine.adapters(command))

    def rows(self, reports: Sequence[AdapterReport]) -> list[AdapterReply]:
        """The adapters of these reports; raises the first failure."""
        _raise_failure(reports)
        return _rows(reports, self.source)

    async def run_for(
        self, name: str, command: Callable[[AdapterReference], EngineCommand]
    ) -> Response:
        """Run the command for the adapter of this name and reply with its row."""
        rows = await self.run(command(_reference(name, self.source)))
        if not rows:
            raise RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"no replica knows an adapter `{name}`")
        return json_response(rows[0])


def routes(engine: EngineClient) -> APIRouter:
    """All admin routes for the adapters of this engine."""
    router = APIRouter(prefix="/v1")
    replicas = AllReplicas(engine)
    _add_adapters(router, replicas)
    _add_names(router, replicas)
    return router


def _add_adapters(router: APIRouter, replicas: AllReplicas) -> None:
    """Add the routes at /adapters."""

    @router.get("/adapters")
    async def listing(request: Request) -> Response:
        require(request, admin=True)
        reply: AdaptersReply = {"object": "list", "data": await replicas.run(ListAdapters())}
        return json_response(reply)

    @router.get("/adapters/{name:path}")
    async def one(request: Request, name: str) -> Response:
        require(request, admin=True)
        return await replicas.run_for(name, ListAdapters)

    @router.post("/adapters")
    async def load(request: Request, body: LoadBody) -> Response:
        require(request, admin=True)
        reference = _requested(body, replicas.source)
        command = LoadAdapter(reference, body.pin, body.api_token)
        return json_response((await replicas.run(command))[0])

    @router.patch("/adapters/{name:path}")
    async def pin(request: Request, name: str, body: PinBody) -> Response:
        require(request, admin=True)
        return await replicas.run_for(name, PinAdapter if body.pinned else UnpinAdapter)

    @router.delete("/adapters/{name:path}")
    async def unload(request: Request, name: str) -> Response:
        require(request, admin=True)
        return await replicas.run_for(name, UnloadAdapter)


def _add_names(router: APIRouter, replicas: AllReplicas) -> None:
    """Add vLLM's routes."""

    @router.post("/load_lora_adapter")
    async def load_lora_adapter(request: Request, body: NameBody) -> Response:
        require(request, admin=True)
        await replicas.run(await _naming(replicas.engine, body))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' added successfully.")

    @router.post("/unload_lora_adapter")
    async def unload_lora_adapter(request: Request, body: UnnameBody) -> Response:
        require(request, admin=True)
        await replicas.run(UnnameAdapter(_reference(body.lora_name, replicas.source)))
        return PlainTextResponse(f"Success: LoRA adapter '{body.lora_name}' removed successfully.")


def _reference(name: str, default_source: AdapterSource, field: str = "id") -> AdapterReference:
    try:
        return parse_reference(name, default_source)
    except ValueError as error:
        raise invalid(str(error), field) from error


def _requested(body: LoadBody, default_source: AdapterSource) -> AdapterReference:
    """The adapter to load. `id` may contain the source and the revision, but not other ones."""
    source = parse_source(body.source) if body.source is not None else default_source
    reference = _reference(body.id, source)
    if body.source is not None and reference.source is not source:
        raise invalid(f"`id` names the source {reference.source.value}, `source` another", "source")
    if body.revision is None:
        return reference
    if reference.revision not in (None, body.revision):
        raise invalid("`id` names a revision, `revision` another", "revision")
    return AdapterReference(reference.source, reference.id, body.revision)


async def _naming(engine: EngineClient, body: NameBody) -> NameAdapter:
    """The command of load_lora_adapter."""
    source = engine.settings.default_source
    await check_new_name(engine, body.lora_name)
    name = _reference(body.lora_name, source, "lora_name")
    is_folder = body.lora_path.startswith("/")
    target = body.lora_path if is_folder else _reference(body.lora_path, source, "lora_path")
    return NameAdapter(name, target, replace=body.load_inplace)


async def check_new_name(engine: EngineClient, name: str) -> None:
    """Refuse a name for an adapter that means a base model, or another base's adapter."""
    info, bases = await engine.info(), engine.settings.bases
    if name in (info.model_name, info.model_id) or name in bases:
        raise invalid(f"`{name}` is the base model's name: choose another", "lora_name")
    base, slash, rest = name.partition("/")
    if slash and base in bases:
        message = f"`{name}` means adapter `{rest}` of the base model `{base}`"
        raise invalid(f"{message}: send `{rest}` to /{base}/v1", "lora_name")


def _raise_failure(reports: Sequence[AdapterReport]) -> None:
    """Raise the first failure; its message says how many replicas failed."""
    failures = [report.failure for report in reports if report.failure is not None]
    found = [each for each in failures if each.kind is not ErrorKind.ADAPTER_NOT_FOUND]
    if len(failures) - len(found) < len(reports):
        # Replicas know different adapters: it is enough that one knows this one.
        failures = found
    if failures:
        error = RequestError.of(failures[0])
        if len(reports) > 1:
            error.message += f" (on {len(failures)} of {len(reports)} replicas)"
        raise error


def _rows(reports: Sequence[AdapterReport], default_source: AdapterSource) -> list[AdapterReply]:
    """One row for each name, from the statuses on each replica."""
    statuses: dict[AdapterReference, dict[str, AdapterStatus]] = {}
    for report in reports:
        for status in report.adapters:
            statuses.setdefault(status.reference, {})[report.replica] = status
    replicas = [report.replica for report in reports]
    rows = [_row(each, found, replicas, default_source) for each, found in statuses.items()]
    return sorted(rows, key=lambda row: (str(row["id"]), str(row["digest"])))


def _row(
    reference: AdapterReference,
    statuses: dict[str, AdapterStatus],
    replicas: Sequence[str],
    default_source: AdapterSource,
) -> AdapterReply:
    absent = AdapterStatus(reference, "absent")
    best = max(statuses.values(), key=lambda status: _STATES.index(status.state))
    uses = [status.last_used for status in statuses.values() if status.last_used is not None]
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
        "pinned": any(status.pinned for status in statuses.values()),
        "num_requests": sum(status.num_requests for status in statuses.values()),
        "last_used": max(uses, default=None),
        "replicas": {
            name: msgspec.convert(
                statuses.get(name, absent), AdapterResidency, from_attributes=True
            )
            for name in replicas
        },
    }


def _recipe(reference: AdapterReference, default_source: AdapterSource) -> MergeRecipe | None:
    """The fields of a request for this merge; None for other adapters."""
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
