"""The socket on which token frames travel from drivers to an ingress replica.

One connection from each driver to each ingress replica, length-prefixed msgpack, a greeting with a
secret first. The driver never waits for it: a frame that does not fit a slow replica's buffer is
refused, and the driver is told when there is room again. On the way back the ingress says where
a stop string ended a sequence, and sends requests ahead of the calls that bring them; its hanging
up tells the driver that the clients are gone.
"""

import asyncio
import contextlib
import hmac
import logging
import secrets
import struct
from collections.abc import Callable
from typing import Protocol

import msgspec

from deployments.contract import GenerateRequest, ReplyAddress, TokenFrame

_LENGTH = struct.Struct("!I")
_MAX_HELLO_BYTES = 1024
_MAX_FRAME_BYTES = 64 << 20
_MAX_UNSENT_BYTES = 8 << 20
_MAX_AHEAD_BYTES = 64 << 10
_MAX_WORD_BYTES = _MAX_AHEAD_BYTES + 1024
# A driver that was slow to greet would take the hang-up for the end of all its clients.
_GREETING_SECONDS = 60.0
_DIALLING_SECONDS = 20.0

logger = logging.getLogger("loray.frames")


class DriverHello(msgspec.Struct, frozen=True):
    """A driver's first word: the secret, and its replica's unique id ("" where there is none)."""

    secret: str
    replica: str = ""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep `at` generated tokens of this sequence and end it: a stop string was matched."""

    request_id: str
    index: int
    at: int


class EarlySubmit(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Begin this request; the call that brings it is on its way to the same driver."""

    request: GenerateRequest


class Withdraw(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """The call of a request with a head start is not coming: it goes elsewhere, or ended."""

    request_id: str


Word = Finish | EarlySubmit | Withdraw
"""What an ingress replica says to a driver."""


class FrameReceiver:
    """The ingress replica's end: takes frames from every driver that knows the secret."""

    def __init__(self, deliver: Callable[[TokenFrame], None]) -> None:
        """Frames go to `deliver`, on the event loop."""
        self._deliver = deliver
        self._secret = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        self._drivers: dict[asyncio.StreamWriter, str] = {}
        self._replicas: dict[str, asyncio.StreamWriter] = {}
        self._decoder = msgspec.msgpack.Decoder(TokenFrame)
        self._encoder = msgspec.msgpack.Encoder()

    async def start(self, host: str) -> ReplyAddress:
        """Listen on a free port of `host`; the address is what drivers are told."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return ReplyAddress(host, port, self._secret)

    def finish(self, request_id: str, index: int, at: int) -> None:
        """Tell every driver (those that do not run the request ignore it)."""
        for writer in self._drivers:
            _write_frame(writer, self._encoder.encode(Finish(request_id, index, at)))

    def submit_early(self, replica: str, request: GenerateRequest) -> bool:
        """Give a request a head start on the driver with this id; False: nothing was sent.

        What is large, or would wait for what was sent before it, goes with its call alone, and so
        does what bears a client's token.
        """
        writer = self._replicas.get(replica)
        if writer is None or writer.is_closing() or request.api_token is not None:
            return False
        if _least_bytes(request) > _MAX_AHEAD_BYTES:
            return False
        try:
            payload = self._encoder.encode(EarlySubmit(request))
        except (OverflowError, UnicodeEncodeError):
            return False  # The call itself says what is wrong with it.
        unsent = writer.transport.get_write_buffer_size()
        if unsent + len(payload) > _MAX_AHEAD_BYTES:
            return False
        _write_frame(writer, payload)
        return True

    def withdraw(self, replica: str, request_id: str) -> None:
        """Tell the driver with this id that the call of a head start is not coming."""
        writer = self._replicas.get(replica)
        if writer is not None and not writer.is_closing():
            _write_frame(writer, self._encoder.encode(Withdraw(request_id)))

    async def close(self) -> None:
        """Stop listening and hang up."""
        if self._server is not None:
            self._server.close()
        for writer in self._drivers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                hello = await _read_frame(reader, _MAX_HELLO_BYTES)
            replica = self._accept(hello)
            if replica is None:
                logger.warning("refused a connection that does not know the secret")
                return
            self._drivers[writer] = replica
            if replica:
                self._replicas[replica] = writer
            while True:
                self._deliver(self._decoder.decode(await _read_frame(reader, _MAX_FRAME_BYTES)))
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as end:
            logger.info("a driver's connection ended: %r", end)
        finally:
            replica = self._drivers.pop(writer, None)
            if replica is not None and self._replicas.get(replica) is writer:
                del self._replicas[replica]
            writer.close()

    def _accept(self, frame: bytes) -> str | None:
        """The replica id of who knows the secret."""
        try:
            hello = msgspec.msgpack.decode(frame, type=DriverHello)
        except msgspec.DecodeError:
            return None
        known = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        return hello.replica if known else None


class FrameEvents(Protocol):
    """What comes back on a driver's connections."""

    def on_finish(self, finish: Finish) -> None:
        """A stop string was matched."""
        ...

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        """A request came from this ingress replica ahead of its call."""
        ...

    def on_withdraw(self, request_id: str) -> None:
        """The call of a head start is not coming."""
        ...

    def on_room(self, address: ReplyAddress) -> None:
        """The ingress replica takes frames, again or for the first time."""
        ...

    def on_lost(self, address: ReplyAddress) -> None:
        """The ingress replica is gone, and its clients with it."""
        ...


class FrameSender:
    """The driver's end: one connection to each ingress replica, dialled at first use."""

    def __init__(self, events: FrameEvents, replica: str = "") -> None:
        """No connection yet; `replica` is the unique id of this driver's, where it has one."""
        self._events = events
        self._replica = replica
        self._writers: dict[ReplyAddress, asyncio.StreamWriter] = {}
        self._dials: dict[ReplyAddress, asyncio.Task[None]] = {}
        self._connected: dict[ReplyAddress, asyncio.Future[None]] = {}
        self._waiting_for_room: set[asyncio.Task[None]] = set()
        self._encoder = msgspec.msgpack.Encoder()

    async def connect(self, address: ReplyAddress) -> None:
        """Return once frames to `address` would arrive, or dialling failed; the next call dials."""
        if address in self._writers:
            return
        if address not in self._dials:
            loop = asyncio.get_running_loop()
            self._connected[address] = loop.create_future()
            self._dials[address] = loop.create_task(self._dial(address))
        await asyncio.shield(self._connected[address])

    def has_room(self, address: ReplyAddress) -> bool:
        """Whether a frame for this replica would be taken: it is there, and not too slow."""
        writer = self._writers.get(address)
        return writer is not None and _has_room(writer)

    def send(self, address: ReplyAddress, frame: TokenFrame) -> bool:
        """Send without waiting; False for a replica that is slow or gone: nothing was sent."""
        writer = self._writers.get(address)
        if writer is None or not _has_room(writer):
            return False
        _write_frame(writer, self._encoder.encode(frame))
        if not _has_room(writer):
            task = asyncio.get_running_loop().create_task(self._await_room(address, writer))
            self._waiting_for_room.add(task)
            task.add_done_callback(self._waiting_for_room.discard)
        return True

    def close(self) -> None:
        """Hang up everywhere."""
        for task in (*self._dials.values(), *self._waiting_for_room):
            task.cancel()

    async def _await_room(self, address: ReplyAddress, writer: asyncio.StreamWriter) -> None:
        """Tell when a slow replica has taken most of what waits for it."""
        with contextlib.suppress(OSError):  # `_dial` tells of that
            await writer.drain()
            self._events.on_room(address)

    async def _dial(self, address: ReplyAddress) -> None:
        """Hold one connection from its beginning to its end."""
        decoder = msgspec.msgpack.Decoder(Word)
        writer: asyncio.StreamWriter | None = None
        try:
            async with asyncio.timeout(_DIALLING_SECONDS):
                reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
            _write_frame(writer, self._encoder.encode(DriverHello(address.secret, self._replica)))
            self._writers[address] = writer
            self._connected[address].set_result(None)
            self._events.on_room(address)
            while True:
                frame = await _read_frame(reader, _MAX_WORD_BYTES)
                try:
                    word = decoder.decode(frame)
                except msgspec.DecodeError as error:
                    logger.warning("an ingress replica said what is no word: %s", error)
                    continue
                self._handle(word, address)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as end:
            logger.info("an ingress connection ended: %r", end)
            if address in self._writers:
                self._events.on_lost(address)
        finally:
            del self._dials[address]
            self._writers.pop(address, None)
            if not (connected := self._connected.pop(address)).done():
                connected.set_result(None)
            if writer is not None:
                with contextlib.suppress(RuntimeError):  # the loop may be closing
                    writer.close()

    def _handle(self, word: Word, address: ReplyAddress) -> None:
        if isinstance(word, Finish):
            self._events.on_finish(word)
        elif isinstance(word, EarlySubmit):
            self._events.on_early_submit(word.request, address)
        else:
            self._events.on_withdraw(word.request_id)


def _least_bytes(request: GenerateRequest) -> int:
    """A lower bound of its encoded size, without encoding: each sequence bears what all share."""
    total = 0
    for sequence in request.sequences:
        asked = sequence.sampling
        long = (sequence.prompt, asked.json_schema, asked.grammar, asked.logit_bias)
        total += sum(map(len, long))
    return total


def _has_room(writer: asyncio.StreamWriter) -> bool:
    return writer.transport.get_write_buffer_size() <= _MAX_UNSENT_BYTES


def _write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    writer.write(_LENGTH.pack(len(payload)) + payload)


async def _read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {limit}")
    return await reader.readexactly(length)
