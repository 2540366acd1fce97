"""Several base models behind one address: each has an application; this module chooses among them.

A request names its base by the first part of its path (/small/generate), by the header
x-loray-model, or by `model` in its JSON body: a base's name, an adapter's, or "base/adapter". A
request that names none goes to the first base.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Collection, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import msgspec
from fastapi import FastAPI
from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract import EngineInfo, ErrorKind
from deployments.ingress.access.keys import Grant, Keys, api_key
from deployments.ingress.adapter_names.references import listed_name
from deployments.ingress.admin.probes import MEASURED
from deployments.ingress.app import Lifespan
from deployments.ingress.generation.engine import EngineClient, IngressSettings
from deployments.ingress.http.bodies import BodyLimit, replaying
from deployments.ingress.http.error_responses import error_response, route_path
from deployments.ingress.http.errors import RequestError
from deployments.ingress.http.responses import json_response
from deployments.ingress.openai.pages import models_page

HEADER = "x-loray-model"
_MODELS, _HEALTH = "/v1/models", frozenset({"/health", "/ping"})
_ADMIN = ("/v1/adapters", "/v1/load_lora_adapter", "/v1/unload_lora_adapter")
_PUSH = "/v1/push_lora_adapter"
# All bases have the same files and batches.
_STORED = ("/v1/files", "/v1/batches")
_REFRESH_SECONDS = 5.0


def build_front(apps: Mapping[str, FastAPI], lifespan: Lifespan | None = None) -> FastAPI:
    """One application over those of the bases, by their names; the first is the default.

    lifespan: entered before theirs.
    """
    first = next(iter(apps.values()))

    @asynccontextmanager
    async def whole(front: FastAPI) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            if lifespan is not None:
                await stack.enter_async_context(lifespan(front))
            for app in apps.values():
                await stack.enter_async_context(app.router.lifespan_context(app))
            yield

    front = FastAPI(lifespan=whole, docs_url=None, redoc_url=None, openapi_url=None)
    # One set of metrics counts the requests of all bases.
    front.state.metrics = first.state.metrics.total
    front.state.bases = dict(apps)
    front.state.keys = _BatchKeys(apps)
    front.add_middleware(BaseDispatch, apps=apps)
    return front


class BaseDirectory:
    """The base of each model name, by what the drivers reported last."""

    def __init__(self, engines: Mapping[str, EngineClient]) -> None:
        self._engines = engines
        self._names: dict[str, tuple[EngineInfo, frozenset[str]]] = {}

    async def find(self, model: str, usable: Collection[str]) -> tuple[str, str] | None:
        """The base, and the model's name there; None if no base knows it.

        usable: the bases that the caller may use; of two adapters of one name, theirs is meant.
        """
        if model in self._engines:
            return model, await self._model_name(model)
        base, slash, rest = model.partition("/")
        if slash and base in self._engines:
            return base, rest
        found = self._known(model, usable)
        if found is None or self._engines[found].changed:
            # A name may be new, or its base may have it no longer: look again.
            fresh = (_look(engine) for engine in self._engines.values())
            await asyncio.gather(*fresh, return_exceptions=True)
            found = self._known(model, usable)
        return None if found is None else (found, model)

    @property
    def is_complete(self) -> bool:
        """Whether each base was described once."""
        return all(engine.latest is not None for engine in self._engines.values())

    async def _model_name(self, base: str) -> str:
        """What the application of a base calls its model; "" means it too."""
        engine = self._engines[base]
        if engine.latest is None:
            await asyncio.gather(_look(engine), return_exceptions=True)
        return "" if engine.latest is None else engine.latest.model_name

    def _known(self, model: str, usable: Collection[str]) -> str | None:
        for base, engine in self._engines.items():
            info = engine.latest
            if info and model in (info.model_name, info.model_id):
                return base
        having = [base for base in self._engines if model in self._adapters(base)]
        return next((base for base in having if base in usable), next(iter(having), None))

    def _adapters(self, base: str) -> frozenset[str]:
        """The names of a base's adapters; made once for each description."""
        info = self._engines[base].latest
        if info is None:
            return frozenset()
        cached = self._names.get(base)
        if cached is None or cached[0] is not info:
            source = self._engines[base].settings.default_source
            names = frozenset(listed_name(adapter, source) for adapter in info.adapters)
            cached = self._names[base] = (info, names)
        return cached[1]


class BaseDispatch:
    """Sends each request to the application of its base."""

    def __init__(self, app: ASGIApp, apps: Mapping[str, FastAPI]) -> None:
        self._app = app
        self._apps = apps
        self._first = next(iter(apps))
        engines = {name: each.state.engine for name, each in apps.items()}
        self._directory = BaseDirectory(engines)
        self._measured = {MEASURED: tuple(engines.values())}
        self._keys: dict[str, Keys] = {name: each.state.keys for name, each in apps.items()}
        limits = [_settings(each).api for each in apps.values()]
        self._reading = BodyLimit(
            self._by_body,
            max(each.max_body_bytes for each in limits),
            max(each.max_open_body_bytes for each in limits),
            max(each.max_json_depth for each in limits),
            max(each.max_json_objects for each in limits),
            max(each.body_timeout_s for each in limits),
        )

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Choose the base, and pass the request on."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        try:
            base, scope = self._by_address(scope)
            if base is not None:
                await self._pass(base, scope, receive, send)
            else:
                await self._without_address(scope, receive, send)
        except RequestError as error:
            await error_response(Request(scope), error)(scope, receive, send)

    def _by_address(self, scope: Scope) -> tuple[str | None, Scope]:
        """The base of the path or of the header, and the scope without it."""
        named = Headers(scope=scope).get(HEADER)
        if named is not None:
            if named not in self._apps:
                raise _unknown(named)
            return named, scope
        path = route_path(Request(scope))
        base, _, rest = path.removeprefix("/").partition("/")
        if base not in self._apps:
            return None, scope
        root = scope["path"].removesuffix(path)
        inner = f"{root}/{rest}"
        return base, {**scope, "path": inner, "raw_path": inner.encode()}

    async def _without_address(self, scope: Scope, receive: Receive, send: Send) -> None:
        path, method = route_path(Request(scope)), scope["method"]
        if method in ("GET", "HEAD") and path == _MODELS:
            await (await self._models(scope))(scope, receive, send)
        elif method in ("GET", "HEAD") and path in _HEALTH:
            await (await self._health(scope))(scope, receive, send)
        elif method in ("GET", "HEAD") and path.startswith(f"{_MODELS}/"):
            await self._model(scope, path.removeprefix(f"{_MODELS}/"), receive, send)
        elif path.startswith(_STORED):
            await self._apps[self._base_of_key(scope)](scope, receive, send)
        elif self._has_model(scope, path):
            await self._reading(scope, receive, send)
        else:
            await self._apps[self._first]({**scope, **self._measured}, receive, send)

    def _has_model(self, scope: Scope, path: str) -> bool:
        """Whether a body should be read for its model: only of callers with a key of some base."""
        if scope["method"] != "POST" or not path.startswith("/v1/"):
            return False
        if path == _PUSH or path.startswith(_ADMIN):
            return False
        return _batch_key(scope) is not None or bool(self._usable(scope))

    def _usable(self, scope: Scope) -> frozenset[str]:
        """The bases that the caller's key opens, or that of its batch."""
        batch, presented = _batch_key(scope), api_key(Request(scope))
        return frozenset(
            name
            for name, keys in self._keys.items()
            if (keys.grant(presented) if batch is None else keys.of_batch(batch)) is not None
        )

    def _base_of_key(self, scope: Scope) -> str:
        """A base that knows the caller's key, if any does; else one that needs none, or any."""
        presented = api_key(Request(scope))
        grants = {name: keys.grant(presented) for name, keys in self._keys.items()}
        allowed = {name: grant for name, grant in grants.items() if grant is not None}
        known = (name for name, grant in allowed.items() if grant.known)
        return next(known, next(iter(allowed), self._first))

    async def _pass(self, base: str, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a request on; one of a batch gets its key's permissions for this base."""
        key = _batch_key(scope)
        if key is not None:
            grant = self._keys[base].of_batch(key)
            if grant is None:
                message = f"the batch's API key is none of `{base}`'s"
                raise RequestError(ErrorKind.UNAUTHORIZED, message)
            scope = {**scope, "state": {**scope["state"], "grant": grant}}
        await self._apps[base](scope, receive, send)

    async def _by_body(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send a request whose body was read to the base that `model` names."""
        message = await receive()
        body: bytes = message["body"]
        model = _model_of(body)
        found = await self._directory.find(model, self._usable(scope)) if model else None
        of_batch = _batch_key(scope) is not None
        if of_batch and model and found is None and not self._directory.is_complete:
            # A batch has time: it sends the line again. Other callers get the first base's reply.
            reason = f"a base model that may have `{model}` does not answer yet"
            raise RequestError(ErrorKind.UNAVAILABLE, reason, retry_after_s=1.0)
        base, name = found or (self._first, model)
        if name is not None and name != model:
            body = _with_model(body, name)
        await self._pass(base, scope, replaying(body, receive), send)

    async def _model(self, scope: Scope, id: str, receive: Receive, send: Send) -> None:
        base, name = await self._directory.find(id, self._usable(scope)) or (self._first, id)
        root = scope["path"].removesuffix(route_path(Request(scope)))
        path = f"{root}{_MODELS}/{name}"
        await self._apps[base]({**scope, "path": path, "raw_path": path.encode()}, receive, send)

    async def _models(self, scope: Scope) -> Response:
        """The models of all bases that this caller may use; an adapter's name is listed once.

        Where two bases have adapters of one name, the later one's has its base before it.
        """
        replies = await self._replies(scope)
        listed = [
            (base, json.loads(body)) for base, (status, body) in replies.items() if status == 200
        ]
        if not listed:
            status, body = next(iter(replies.values()))
            return Response(body, status, media_type="application/json")
        rows: dict[str, Any] = {}
        for base, reply in listed:
            for row in reply["data"]:
                name = row["id"] if row["id"] not in rows else f"{base}/{row['id']}"
                rows[name] = {**row, "id": name, "display_name": name}
        return json_response(models_page(list(rows.values())))

    async def _health(self, scope: Scope) -> Response:
        """Healthy while any base is: /NAME/health is about one."""
        status, body = min((await self._replies(scope)).values())
        return Response(body, status, media_type="application/json" if body else "text/plain")

    async def _replies(self, scope: Scope) -> dict[str, tuple[int, bytes]]:
        """The replies of the bases that answer soon: one that starts or is down delays no other.

        RequestError if none does.
        """
        sent = {
            base: asyncio.create_task(_reply_of(app, scope)) for base, app in self._apps.items()
        }
        late: set[asyncio.Task[tuple[int, bytes]]] = set()
        try:
            _, late = await asyncio.wait(sent.values(), timeout=_REFRESH_SECONDS)
        finally:
            for task in sent.values():
                task.cancel()
        replies = {base: task.result() for base, task in sent.items() if task not in late}
        if not replies:
            raise RequestError(ErrorKind.UNAVAILABLE, "no base model answers yet: try again")
        return replies


class _BatchKeys:
    """The keys of all bases, for batches (`Keys.of_batch`)."""

    def __init__(self, apps: Mapping[str, FastAPI]) -> None:
        self._apps = apps

    def of_batch(self, name: str) -> Grant | None:
        """The permissions of a batch for some base that has a key of this name."""
        grants = (app.state.keys.of_batch(name) for app in self._apps.values())
        return next((grant for grant in grants if grant is not None), None)


def _batch_key(scope: Scope) -> str | None:
    """The name of the key of a batch whose request this is; None for a request from elsewhere."""
    grant = scope.get("state", {}).get("grant")
    return grant.name if isinstance(grant, Grant) else None


async def _look(engine: EngineClient) -> None:
    """Ask a base for its description, but not long: it may start, or be down."""
    async with asyncio.timeout(_REFRESH_SECONDS):
        await engine.info()


async def _reply_of(app: ASGIApp, scope: Scope) -> tuple[int, bytes]:
    """The status and the body of an application's reply to a request without a body."""
    status, body = 500, bytearray()

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]
        else:
            body.extend(message.get("body", b""))

    await app({**scope, "method": "GET"}, receive, send)
    return status, bytes(body)


def _model_of(body: bytes) -> str | None:
    """`model` of a JSON object; None for any other body, which the application refuses."""
    try:
        return msgspec.json.decode(body, type=_Named).model
    except (msgspec.DecodeError, RecursionError):
        return None


class _Named(msgspec.Struct):
    model: str | None = None


def _with_model(body: bytes, model: str) -> bytes:
    """The same JSON object with another `model`; all other values stay as they were written."""
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    fields["model"] = msgspec.Raw(msgspec.json.encode(model))
    return msgspec.json.encode(fields)


def _settings(app: FastAPI) -> IngressSettings:
    settings: IngressSettings = app.state.engine.settings
    return settings


def _unknown(base: str) -> RequestError:
    return RequestError(ErrorKind.ADAPTER_NOT_FOUND, f"there is no base model `{base}`")
