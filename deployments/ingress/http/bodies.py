"""Limits on requests. They are checked before parsing, which blocks the event loop."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import accumulate, compress, islice
from operator import xor

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from deployments.contract import ErrorKind
from deployments.ingress.http.error_responses import error_response, status_response
from deployments.ingress.http.errors import RequestError, invalid

_MARKS = b'"[]{}:'
_OTHERS = bytes(byte for byte in range(256) if byte not in _MARKS)
_QUOTES = bytes(byte == ord('"') for byte in range(256))
# An opening bracket adds a level, a closing one subtracts it (255 is -1 in eight bits).
_LEVELS = bytes.maketrans(_MARKS, b"\x00\x01\xff\x01\xff\x00")

_WITHOUT_BODY = frozenset({"GET", "HEAD", "OPTIONS"})
# Of a body's objects together. Each field costs about 1 us and 100 bytes.
_FIELDS_AN_OBJECT = 10
# A body of fewer bytes is read however many are open: most are.
_SMALL = 65_536
_RETRY_S = 5.0


class HeadAsGet:
    """Serves HEAD on every route with GET, like LoRAX; load balancers use it.

    The HTTP server drops the body, as it has read the method HEAD.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass a HEAD on as a GET."""
        if scope["type"] == "http" and scope["method"] == "HEAD":
            scope = {**scope, "method": "GET"}
        await self._app(scope, receive, send)


class HeaderLimit:
    """Replies with 431 to too many headers, or to a URL and headers that are too long."""

    def __init__(self, app: ASGIApp, max_bytes: int, max_headers: int) -> None:
        self._app = app
        self._max_bytes = max_bytes
        self._max_headers = max_headers

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request on, or reply with 431."""
        if scope["type"] == "http" and not self._fits(scope):
            message = (
                f"at most {self._max_headers} headers and {self._max_bytes} bytes of address and "
                "headers are read"
            )
            reply = status_response(Request(scope), 431, message)
            await reply(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _fits(self, scope: Scope) -> bool:
        headers = scope["headers"]
        address = len(scope.get("raw_path") or b"") + len(scope.get("query_string") or b"")
        total = address + sum(len(name) + len(value) for name, value in headers)
        return len(headers) <= self._max_headers and total <= self._max_bytes


class OpenBodies:
    """Counts the bytes of bodies from their arrival to the end of their requests.

    A request keeps its body and what was parsed of it until it ends.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._bytes = 0

    @contextmanager
    def one(self) -> Iterator[Callable[[int], bool]]:
        """A function that counts bytes of one body, and returns whether there is room for them."""
        own = 0

        def has_room_for(count: int) -> bool:
            nonlocal own
            own += count
            self._bytes += count
            return own <= _SMALL or self._bytes <= self._max_bytes

        try:
            yield has_room_for
        finally:
            self._bytes -= own


class BodyLimit:
    """Reads a whole body before it is parsed, and refuses one over a limit.

    413: longer than max_bytes, whatever its Content-Length. 408: not complete after `seconds`. 415:
    compressed. 429: the bodies of all open requests have more than max_open_bytes.
    Bad input: arrays and objects nested deeper than max_depth, more than max_objects of them, or a
    body that is not UTF-8.
    """

    def __init__(
        self,
        app: ASGIApp,
        max_bytes: int,
        max_open_bytes: int,
        max_depth: int,
        max_objects: int,
        seconds: float,
        streamed: frozenset[str] = frozenset(),
    ) -> None:
        """streamed: paths of routes that read and limit their bodies themselves."""
        self._app = app
        self._max_bytes = max_bytes
        # One body of the largest size has room at least.
        self._open = OpenBodies(max(max_open_bytes, max_bytes))
        self._max_depth = max_depth
        self._max_objects = max_objects
        self._seconds = seconds
        self._streamed = streamed

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the body on in one piece, or refuse it."""
        if scope["type"] != "http" or scope["method"] in _WITHOUT_BODY or self._is_streamed(scope):
            await self._app(scope, receive, send)
            return
        with self._open.one() as has_room_for:
            await self._serve(scope, receive, send, has_room_for)

    async def _serve(
        self, scope: Scope, receive: Receive, send: Send, has_room_for: Callable[[int], bool]
    ) -> None:
        request = Request(scope)
        announced = request.headers.get("content-length", "")
        if announced.isdecimal() and int(announced) > self._max_bytes:
            # Not read, so that a client which waits for `100 Continue` sends nothing.
            await self._too_long(request)(scope, receive, send)
            return
        try:
            async with asyncio.timeout(self._seconds):
                body = await self._read(receive, has_room_for)
        except TimeoutError:
            message = f"the body did not come within {self._seconds:g} s"
            reply = status_response(request, 408, message, {"Connection": "close"})
            await reply(scope, receive, send)
            return
        except RequestError as error:
            await error_response(request, error)(scope, receive, send)
            return
        if body is None:
            return
        refusal = self._refusal(request, body)
        if refusal is None:
            await self._app(scope, replaying(body, receive), send)
        else:
            await refusal(scope, receive, send)

    def _is_streamed(self, scope: Scope) -> bool:
        path: str = scope["path"]
        return path.removeprefix(scope.get("root_path", "")) in self._streamed

    async def _read(self, receive: Receive, has_room_for: Callable[[int], bool]) -> bytes | None:
        """The body, or a bit more than max_bytes of it; None if the client has left."""
        body = bytearray()
        while len(body) <= self._max_bytes:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            if not has_room_for(len(part)):
                text = "too many large requests are open: try again, or send a shorter one"
                raise RequestError(ErrorKind.OVERLOADED, text, retry_after_s=_RETRY_S)
            body += part
            if not message.get("more_body", False):
                break
        return bytes(body)

    def _too_long(self, request: Request) -> Response:
        return status_response(request, 413, f"the body is longer than {self._max_bytes} bytes")

    def _refusal(self, request: Request, body: bytes) -> Response | None:
        if len(body) > self._max_bytes:
            return self._too_long(request)
        if request.headers.get("content-encoding", "").lower() not in ("", "identity"):
            message = "compressed bodies are not read: send it without Content-Encoding"
            return status_response(request, 415, message)
        if b"\0" in body:
            # UTF-16 has zero bytes; its other bytes would look like brackets and quotes.
            return error_response(request, invalid("the body must be JSON in UTF-8"))
        # The common case is cheap: so few brackets, in strings or not, can break neither limit.
        max_fields = _FIELDS_AN_OBJECT * self._max_objects
        few = body.count(b"[") + body.count(b"{") <= min(self._max_depth, self._max_objects)
        if few and body.count(b":") <= max_fields:
            return None
        depth, objects, fields = nesting(body)
        if depth > self._max_depth:
            message = f"the body's arrays and objects lie more than {self._max_depth} deep"
            return error_response(request, invalid(message))
        if objects > self._max_objects:
            # pydantic takes about 10 us for each, and blocks the event loop.
            message = (
                f"the body has {objects} arrays and objects (messages, content parts, tools, "
                f"prompts); at most {self._max_objects} are read"
            )
            return error_response(request, invalid(message))
        if fields > max_fields:
            message = f"the body's objects have {fields} fields; at most {max_fields} are read"
            return error_response(request, invalid(message))
        return None


def bounded(receive: Receive, max_bytes: int, seconds: float) -> Receive:
    """A `receive` of a streamed body; HTTPException if it is too long, or takes too long.

    Made when the body begins.
    """
    total, deadline = 0, asyncio.get_running_loop().time() + seconds

    async def read() -> Message:
        nonlocal total
        try:
            async with asyncio.timeout_at(deadline):
                message = await receive()
        except TimeoutError as error:
            raise HTTPException(408, f"the body did not come within {seconds:g} s") from error
        total += len(message.get("body", b""))
        if total > max_bytes:
            raise HTTPException(413, f"the body is longer than {max_bytes} bytes")
        return message

    return read


def replaying(body: bytes, receive: Receive) -> Receive:
    """A `receive` that returns the body first, then later messages."""
    sent = False

    async def replay() -> Message:
        nonlocal sent
        if sent:
            return await receive()
        sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    return replay


def nesting(body: bytes) -> tuple[int, int, int]:
    """The deepest level of a body's arrays and objects, their number, and that of all fields.

    Each pass over the body runs in C, so a hostile body costs little more than a normal one.
    """
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    # Two adjacent quotes change nothing about what is inside or outside of strings.
    marks = unescaped.translate(None, delete=_OTHERS).replace(b'""', b"")
    outside = islice(accumulate(marks.translate(_QUOTES), xor, initial=1), 1, None)
    kept = bytes(compress(marks, outside))
    steps = kept.translate(_LEVELS)
    deepest = max(accumulate(memoryview(steps).cast("b")), default=0)
    return deepest, steps.count(1), kept.count(b":")
