"""The sockets on which token frames travel from drivers to an ingress replica.

One connection from each driver to each ingress replica; messages are length-prefixed msgpack. The
driver greets first, with a secret. Frames go to the ingress; it sends back where a stop string
ended a sequence, and early submits. When it closes the connection, its clients are gone.
This file has the format and the ingress's end; driver/streaming/connections.py is the driver's.
"""

import asyncio
import hmac
import logging
import secrets
import struct
from collections.abc import Callable

import msgspec

from deployments.contract import GenerateRequest, ReplyAddress, TokenFrame
from deployments.early_submit import MAX_EARLY_BYTES, EarlySubmit, Withdraw, encode_early_submit

_LENGTH = struct.Struct("!I")
_MAX_HELLO_BYTES = 1024
_MAX_FRAME_BYTES = 64 << 20
# Long: a closed connection means to the driver that all its clients are gone.
_GREETING_SECONDS = 60.0

logger = logging.getLogger("loray.frames")


class DriverHello(msgspec.Struct, frozen=True):
    """A driver's first message.

    secret: of the ingress replica's `ReplyAddress`. replica: the driver's unique id, "" if none.
    """

    secret: str
    replica: str = ""


class Finish(msgspec.Struct, frozen=True, array_like=True, tag=True):
    """Keep the first `at` generated tokens of a sequence and end it: a stop string matched."""

    request_id: str
    index: int
    at: int


IngressMessage = Finish | EarlySubmit | Withdraw
"""What an ingress replica sends to a driver."""


class FrameReceiver:
    """The ingress replica's end: receives frames from every driver that knows the secret."""

    def __init__(self, deliver: Callable[[TokenFrame], None]) -> None:
        """deliver: called with each frame, on the event loop."""
        self._deliver = deliver
        self._secret = secrets.token_urlsafe(32)
        self._server: asyncio.Server | None = None
        self._drivers: dict[asyncio.StreamWriter, str] = {}
        self._replicas: dict[str, asyncio.StreamWriter] = {}
        self._decoder = msgspec.msgpack.Decoder(TokenFrame)
        self._encoder = msgspec.msgpack.Encoder()

    async def start(self, host: str) -> ReplyAddress:
        """Listen on a free port of `host`; drivers dial the address that this returns."""
        self._server = await asyncio.start_server(self._serve, host, 0)
        port = self._server.sockets[0].getsockname()[1]
        return ReplyAddress(host, port, self._secret)

    def finish(self, request_id: str, index: int, at: int) -> None:
        """Send a `Finish` to every driver; those that do not run the request ignore it."""
        for writer in self._drivers:
            write_frame(writer, self._encoder.encode(Finish(request_id, index, at)))

    def submit_early(self, replica: str, request: GenerateRequest) -> bool:
        """Submit a request early to the driver with this id; False: nothing was sent.

        Nothing is sent where it would wait for earlier messages: the call would be as fast.
        """
        writer = self._replicas.get(replica)
        if writer is None or writer.is_closing():
            return False
        payload = encode_early_submit(request)
        if payload is None:
            return False
        unsent = writer.transport.get_write_buffer_size()
        if unsent + len(payload) > MAX_EARLY_BYTES:
            return False
        write_frame(writer, payload)
        return True

    def withdraw(self, replica: str, request_id: str) -> None:
        """Send the driver with this id a `Withdraw`: the call of an early submit is not coming."""
        writer = self._replicas.get(replica)
        if writer is not None and not writer.is_closing():
            write_frame(writer, self._encoder.encode(Withdraw(request_id)))

    async def close(self) -> None:
        """Stop listening and close all connections."""
        if self._server is not None:
            self._server.close()
        for writer in self._drivers:
            writer.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                hello = await read_frame(reader, _MAX_HELLO_BYTES)
            replica = self._accept(hello)
            if replica is None:
                logger.warning("refused a connection that does not know the secret")
                return
            self._drivers[writer] = replica
            if replica:
                self._replicas[replica] = writer
            while True:
                self._deliver(self._decoder.decode(await read_frame(reader, _MAX_FRAME_BYTES)))
        except (ConnectionError, asyncio.IncompleteReadError, TimeoutError) as end:
            logger.info("a driver's connection ended: %r", end)
        finally:
            replica = self._drivers.pop(writer, None)
            if replica is not None and self._replicas.get(replica) is writer:
                del self._replicas[replica]
            writer.close()

    def _accept(self, frame: bytes) -> str | None:
        """The greeting's replica id; None if the secret is wrong."""
        try:
            hello = msgspec.msgpack.decode(frame, type=DriverHello)
        except msgspec.DecodeError:
            return None
        known = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        return hello.replica if known else None


def write_frame(writer: asyncio.StreamWriter, payload: bytes) -> None:
    """Write one length-prefixed message without waiting."""
    writer.write(_LENGTH.pack(len(payload)) + payload)


async def read_frame(reader: asyncio.StreamReader, limit: int) -> bytes:
    """Read one message; ConnectionError for one of more than `limit` bytes."""
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if length > limit:
        raise ConnectionError(f"a frame of {length} bytes is over the limit of {limit}")
    return await reader.readexactly(length)
