"""The driver's end of the frames' sockets: one connection to each ingress replica.

The sender never waits. It refuses a frame while a slow replica's buffer is full; `on_room` follows
when there is room again.
"""

import asyncio
import contextlib
import logging
from typing import NamedTuple, Protocol

import msgspec

from deployments.contract import GenerateRequest, ReplyAddress, TokenFrame
from deployments.early_submit import MAX_EARLY_BYTES, EarlySubmit
from deployments.frames import DriverHello, Finish, IngressMessage, read_frame, write_frame

_MAX_UNSENT_BYTES = 8 << 20
_MAX_MESSAGE_BYTES = MAX_EARLY_BYTES + 1024
_DIAL_SECONDS = 20.0

logger = logging.getLogger("loray.frames")


class _Connection(NamedTuple):
    """An open connection; `full` is set when a frame has filled its buffer."""

    writer: asyncio.StreamWriter
    full: asyncio.Event

    @property
    def has_room(self) -> bool:
        return self.writer.transport.get_write_buffer_size() <= _MAX_UNSENT_BYTES


class FrameSender:
    """Sends frames over the open connections; lives on the replica's event loop."""

    def __init__(self) -> None:
        self._open: dict[ReplyAddress, _Connection] = {}
        self._encoder = msgspec.msgpack.Encoder()

    def has_room(self, address: ReplyAddress) -> bool:
        """Whether `send` would take a frame now: the replica is connected, and not too slow."""
        connection = self._open.get(address)
        return connection is not None and connection.has_room

    def send(self, address: ReplyAddress, frame: TokenFrame) -> bool:
        """Send without waiting; False if the replica is slow or gone: nothing was sent."""
        connection = self._open.get(address)
        if connection is None or not connection.has_room:
            return False
        write_frame(connection.writer, self._encoder.encode(frame))
        if not connection.has_room:
            connection.full.set()
        return True

    def add(self, address: ReplyAddress, connection: _Connection) -> None:
        """Send this replica's frames over a new connection."""
        self._open[address] = connection

    def remove(self, address: ReplyAddress) -> None:
        """Send this replica no more frames."""
        self._open.pop(address, None)

    def is_open(self, address: ReplyAddress) -> bool:
        """Whether there is a connection to this replica."""
        return address in self._open


class IngressEvents(Protocol):
    """Takes what happens on the connections, and what ingress replicas send."""

    def on_finish(self, finish: Finish) -> None:
        """A stop string was matched."""
        ...

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        """This ingress replica sent a request before its call."""
        ...

    def on_withdraw(self, request_id: str) -> None:
        """The call of an early submit is not coming."""
        ...

    def on_room(self, address: ReplyAddress) -> None:
        """The ingress replica has room for frames, for the first time or again."""
        ...

    def on_lost(self, address: ReplyAddress) -> None:
        """The ingress replica is gone, and its clients with it."""
        ...


class IngressConnections:
    """Dials each ingress replica at its first request, and reads what it sends."""

    def __init__(self, sender: FrameSender, events: IngressEvents, replica: str = "") -> None:
        """replica: the unique id of this driver's replica, "" where it has none."""
        self._sender = sender
        self._events = events
        self._replica = replica
        self._dials: dict[ReplyAddress, asyncio.Task[None]] = {}
        self._connected: dict[ReplyAddress, asyncio.Future[None]] = {}

    async def connect(self, address: ReplyAddress) -> None:
        """Return when `address` takes frames, or dialling failed: the next call dials again."""
        if self._sender.is_open(address):
            return
        if address not in self._dials:
            loop = asyncio.get_running_loop()
            self._connected[address] = loop.create_future()
            self._dials[address] = loop.create_task(self._dial(address))
        await asyncio.shield(self._connected[address])

    def close(self) -> None:
        """Close all connections."""
        for task in self._dials.values():
            task.cancel()

    async def _dial(self, address: ReplyAddress) -> None:
        """Open one connection and read from it until it ends."""
        writer: asyncio.StreamWriter | None = None
        room_task: asyncio.Task[None] | None = None
        try:
            async with asyncio.timeout(_DIAL_SECONDS):
                reader, writer = await asyncio.open_connection(address.host, address.port)
            writer.transport.set_write_buffer_limits(_MAX_UNSENT_BYTES)
            hello = DriverHello(address.secret, self._replica)
            write_frame(writer, msgspec.msgpack.encode(hello))
            connection = _Connection(writer, asyncio.Event())
            # Registered before callers of `connect` resume: their requests must not lose frames.
            self._sender.add(address, connection)
            self._connected[address].set_result(None)
            room_task = asyncio.get_running_loop().create_task(
                self._report_room(address, connection)
            )
            self._events.on_room(address)
            await self._read(reader, address)
        except (OSError, asyncio.IncompleteReadError, TimeoutError) as end:
            logger.info("an ingress connection ended: %r", end)
            if self._sender.is_open(address):
                self._events.on_lost(address)
        finally:
            del self._dials[address]
            self._sender.remove(address)
            if not (connected := self._connected.pop(address)).done():
                connected.set_result(None)
            if room_task is not None:
                room_task.cancel()
            if writer is not None:
                with contextlib.suppress(RuntimeError):  # The event loop may be closing.
                    writer.close()

    async def _report_room(self, address: ReplyAddress, connection: _Connection) -> None:
        """Report, each time the buffer was full, that the replica has read most of it."""
        with contextlib.suppress(OSError):  # `_dial` reports a lost connection.
            while True:
                await connection.full.wait()
                connection.full.clear()
                await connection.writer.drain()
                self._events.on_room(address)

    async def _read(self, reader: asyncio.StreamReader, address: ReplyAddress) -> None:
        decoder = msgspec.msgpack.Decoder(IngressMessage)
        while True:
            frame = await read_frame(reader, _MAX_MESSAGE_BYTES)
            try:
                message = decoder.decode(frame)
            except msgspec.DecodeError as error:
                logger.warning("an ingress replica sent a message that is not known: %s", error)
                continue
            self._handle(message, address)

    def _handle(self, message: IngressMessage, address: ReplyAddress) -> None:
        if isinstance(message, Finish):
            self._events.on_finish(message)
        elif isinstance(message, EarlySubmit):
            self._events.on_early_submit(message.request, address)
        else:
            self._events.on_withdraw(message.request_id)
