"""The bodies of pushes: a form with the files, or the name of a segment of shared memory.

Weights go to a file in memory while they arrive, so a push of any size takes a few MB here.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Annotated

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header
from starlette.requests import Request

from deployments.ingress.http.errors import invalid
from sources.base import MAX_CONFIG_BYTES
from sources.pushed import PIECE_BYTES, IncomingWeights, read_shared_memory

if TYPE_CHECKING:
    from python_multipart.multipart import MultipartCallbacks

_WRITE_BYTES = 4 * PIECE_BYTES
_MAX_FIELD_BYTES = MAX_CONFIG_BYTES
_MAX_HEADER_BYTES = 4096
_MAX_PARTS = 16
_FIELDS = ("lora_name", "load_inplace", "adapter_config")
WEIGHTS = "adapter_model"


class PushForm(msgspec.Struct, frozen=True):
    """The fields of a push besides its weights.

    lora_name: the adapter's. load_inplace: the name may be in use.
    adapter_config: the text of adapter_config.json.
    """

    lora_name: str
    load_inplace: bool
    adapter_config: bytes


class _SharedMemoryBody(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The JSON body of a push from shared memory; size: bytes, None for the whole segment."""

    lora_name: str
    adapter_config: msgspec.Raw
    shared_memory: str
    size: Annotated[int, msgspec.Meta(ge=1)] | None = None
    load_inplace: bool = False


async def read_push(request: Request, weights: IncomingWeights) -> PushForm:
    """Read a push; its weights go to `weights`. RequestError or AdapterError for a bad one."""
    kind, options = parse_options_header(request.headers.get("content-type"))
    if kind == b"application/json":
        return await _from_shared_memory(request, weights)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise invalid(
            "send a form (multipart/form-data) with lora_name, adapter_config and adapter_model, "
            "or JSON with `shared_memory`"
        )
    return await _from_form(request, boundary, weights)


async def _from_shared_memory(request: Request, weights: IncomingWeights) -> PushForm:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > _MAX_FIELD_BYTES:
            raise invalid(f"the body is longer than {_MAX_FIELD_BYTES} bytes", "adapter_config")
    try:
        read = msgspec.json.decode(body, type=_SharedMemoryBody)
    except (msgspec.DecodeError, RecursionError) as error:
        raise invalid(f"the body is not that of a push: {error}") from error
    name = read.lora_name
    await asyncio.to_thread(read_shared_memory, read.shared_memory, read.size, weights, name)
    return PushForm(name, read.load_inplace, bytes(read.adapter_config))


async def _from_form(request: Request, boundary: bytes, weights: IncomingWeights) -> PushForm:
    parts = _Parts()
    parser = MultipartParser(boundary, parts.callbacks())
    async with _writing(weights) as write:
        try:
            async for piece in request.stream():
                parser.write(piece)
                if parts.num_bytes >= _WRITE_BYTES:
                    await write(parts.take_pieces())
            parser.finalize()
        except FormParserError as error:
            raise invalid(f"the form is damaged: {error}") from error
        await write(parts.take_rest())
    return parts.form()


@asynccontextmanager
async def _writing(
    weights: IncomingWeights,
) -> AsyncIterator[Callable[[memoryview], "asyncio.Future[None]"]]:
    """A function that writes in a thread, one piece after another, while the next is received."""
    writing: asyncio.Task[None] | None = None

    async def write(piece: memoryview) -> None:
        nonlocal writing
        if writing is not None:
            await writing
        writing = asyncio.create_task(asyncio.to_thread(weights.write, piece))

    try:
        yield write  # type: ignore[misc]
        if writing is not None:
            await writing
    finally:
        if writing is not None and not writing.done():
            # The caller closes the file next: no thread may still write to it.
            with suppress(Exception):
                await writing


class _Parts:
    """The parts of a form, as its parser reports them; num_bytes: of weights that are here."""

    def __init__(self) -> None:
        self.num_bytes = 0
        self._weights: list[memoryview] = []
        self._fields: dict[str, bytearray] = {}
        self._name = ""
        self._header = bytearray()
        self._disposition = bytearray()
        self._num_parts = 0

    def callbacks(self) -> "MultipartCallbacks":
        """For the parser."""
        return {
            "on_part_begin": self._begin,
            "on_header_field": self._header_field,
            "on_header_value": self._header_value,
            "on_header_end": self._header_end,
            "on_headers_finished": self._headers_finished,
            "on_part_data": self._data,
        }

    def take_pieces(self) -> memoryview:
        """The whole pieces of the weights that arrived since the last call."""
        rest = self.num_bytes % PIECE_BYTES
        taken = self.take_rest()
        end = len(taken) - rest
        self._weights, self.num_bytes = [taken[end:]], rest
        return taken[:end]

    def take_rest(self) -> memoryview:
        """All weights that arrived since the last call."""
        taken = memoryview(b"".join(self._weights))
        self._weights, self.num_bytes = [], 0
        return taken

    def form(self) -> PushForm:
        """The fields; RequestError if one is missing."""
        for name in ("lora_name", "adapter_config", WEIGHTS):
            if name not in self._fields:
                raise invalid(f"the form has no part `{name}`", name)
        inplace = bytes(self._fields.get("load_inplace", b"false")).lower()
        if inplace not in (b"true", b"false"):
            raise invalid("`load_inplace` must be true or false", "load_inplace")
        try:
            name = self._fields["lora_name"].decode()
        except UnicodeDecodeError as error:
            raise invalid("`lora_name` must be UTF-8", "lora_name") from error
        return PushForm(name, inplace == b"true", bytes(self._fields["adapter_config"]))

    def _begin(self) -> None:
        self._num_parts += 1
        if self._num_parts > _MAX_PARTS:
            raise invalid(f"the form has more than {_MAX_PARTS} parts")
        self._disposition.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        _append(self._header, data[start:end], _MAX_HEADER_BYTES, "a part's headers")

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        if self._header.lower() == b"content-disposition":
            limit = _MAX_HEADER_BYTES
            _append(self._disposition, data[start:end], limit, "a part's headers")

    def _header_end(self) -> None:
        self._header.clear()

    def _headers_finished(self) -> None:
        _, options = parse_options_header(bytes(self._disposition))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        if self._name not in (*_FIELDS, WEIGHTS):
            raise invalid(f"the form has an unknown part `{self._name}`", self._name)
        if self._name in self._fields:
            raise invalid(f"the form has two parts `{self._name}`", self._name)
        self._fields[self._name] = bytearray()

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._name == WEIGHTS:
            self._weights.append(memoryview(data)[start:end])
            self.num_bytes += end - start
        else:
            _append(self._fields[self._name], data[start:end], _MAX_FIELD_BYTES, self._name)


def _append(to: bytearray, data: bytes, limit: int, name: str) -> None:
    if len(to) + len(data) > limit:
        raise invalid(f"{name} in the form is longer than {limit} bytes")
    to += data
