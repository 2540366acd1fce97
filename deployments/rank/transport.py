"""The socket between driver and ranks: length-prefixed msgpack, a shared secret, exact EOF.

A rank on the driver's own node connects through a Unix stream socket in Linux's abstract
namespace (no file is left behind); a rank elsewhere through TCP with NODELAY.
"""

import contextlib
import hmac
import logging
import selectors
import socket
import struct
import sys
import threading
import time
from collections.abc import Sequence

import msgspec

from deployments.rank.messages import Command, RankHello, Report

_LENGTH = struct.Struct("!I")
_MAX_HELLO_BYTES = 4096
_READ_BYTES = 1 << 20

logger = logging.getLogger("loray.rank.transport")


class RanksLost(Exception):
    """The group of ranks is unusable; the message names the rank and the symptom."""


class Address(msgspec.Struct, frozen=True):
    """Where a driver listens for its ranks: an abstract Unix name and a TCP port."""

    unix: str
    host: str
    port: int
    secret: str


class Channel:
    """One framed connection: `send` may be called by several threads, `receive` by one."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock
        self.max_frame_bytes = 2**31
        self._buffer = bytearray()
        self._send_lock = threading.Lock()
        if sock.family != socket.AF_UNIX:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        """The descriptor, for selectors."""
        return self._socket.fileno()

    def send(self, payload: bytes) -> None:
        """Send one frame whole; raises OSError when the peer is gone."""
        with self._send_lock:
            self._socket.sendall(_LENGTH.pack(len(payload)) + payload)

    def limit_sends(self, timeout_s: float) -> None:
        """Have `send` raise TimeoutError (an OSError) when the peer takes nothing for so long."""
        self._socket.settimeout(timeout_s)

    def receive(self) -> bytes | None:
        """Wait for the next frame; None at the end of the stream."""
        while (frame := self._take_frame()) is None:
            if not self._read_more():
                return None
        return frame

    def receive_available(self) -> tuple[list[bytes], bool]:
        """One read, then every whole frame; the flag is False when the peer is gone."""
        alive = self._read_more()
        frames = []
        while (frame := self._take_frame()) is not None:
            frames.append(frame)
        return frames, alive

    def close(self) -> None:
        """Close both directions; a blocked `receive` in another thread returns."""
        with contextlib.suppress(OSError):  # the peer may have been faster
            self._socket.shutdown(socket.SHUT_RDWR)
        self._socket.close()

    def _read_more(self) -> bool:
        try:
            chunk = self._socket.recv(_READ_BYTES)
        except OSError:
            return False  # the peer is gone, or this side was closed meanwhile
        self._buffer += chunk
        return bool(chunk)

    def _take_frame(self) -> bytes | None:
        if len(self._buffer) < _LENGTH.size:
            return None
        (length,) = _LENGTH.unpack_from(self._buffer)
        if length > self.max_frame_bytes:
            raise ConnectionError(f"a frame of {length} bytes is over the limit")
        end = _LENGTH.size + length
        if len(self._buffer) < end:
            return None
        frame = bytes(self._buffer[_LENGTH.size : end])
        del self._buffer[:end]
        return frame


class Listener:
    """The driver's listening socket for ranks: accepts exactly those that know the secret."""

    def __init__(self, host: str, secret: str) -> None:
        """Bind a TCP port on `host` and, on Linux, an abstract Unix name."""
        self._secret = secret
        self._selector = selectors.DefaultSelector()
        tcp = socket.create_server((host, 0))
        port = tcp.getsockname()[1]
        self._sockets = [tcp]
        unix = ""
        if sys.platform == "linux":
            unix = f"loray-{port}-{secret[:8]}"
            local = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            local.bind(f"\0{unix}")
            local.listen()
            self._sockets.append(local)
        for sock in self._sockets:
            self._selector.register(sock, selectors.EVENT_READ)
        self.address = Address(unix, host, port, secret)

    def accept(self, num_ranks: int, timeout_s: float) -> list[Channel]:
        """Wait for one connection of each rank, in rank order; RanksLost after timeout_s.

        A connection that sends its first message late or never does not delay the others.
        """
        channels: dict[int, Channel] = {}
        deadline = time.monotonic() + timeout_s
        while len(channels) < num_ranks:
            ready = self._selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                missing = sorted(set(range(num_ranks)) - set(channels))
                raise RanksLost(f"ranks {missing} did not connect within {timeout_s} s")
            for key, _ in ready:
                if isinstance(key.fileobj, socket.socket):
                    self._accept_one(key.fileobj)
                else:
                    self._admit(key.data, num_ranks, channels)
        return [channels[rank] for rank in range(num_ranks)]

    def close(self) -> None:
        """Stop listening; accepted channels live on."""
        for key in self._selector.get_map().values():
            if isinstance(key.data, Channel):
                key.data.close()
        self._selector.close()
        for sock in self._sockets:
            sock.close()

    def _accept_one(self, listener: socket.socket) -> None:
        """Accept a connection, whose first message must name its rank."""
        peer, _ = listener.accept()
        channel = Channel(peer)
        channel.max_frame_bytes = _MAX_HELLO_BYTES
        self._selector.register(channel, selectors.EVENT_READ, channel)

    def _admit(self, channel: Channel, num_ranks: int, channels: dict[int, Channel]) -> None:
        """Register a rank once its first message is complete; refuse any other connection."""
        try:
            frames, alive = channel.receive_available()
        except ConnectionError:
            frames, alive = [], False
        if alive and not frames:
            return
        self._selector.unregister(channel)
        rank = self._greet(frames[0]) if frames else None
        if rank is None or not 0 <= rank < num_ranks or rank in channels:
            logger.warning("refused a connection that is not a rank of this group")
            channel.close()
            return
        channel.max_frame_bytes = 2**31
        channels[rank] = channel

    def _greet(self, frame: bytes) -> int | None:
        """Return the rank that a first message is from; None if its secret is wrong."""
        try:
            hello = msgspec.msgpack.decode(frame, type=RankHello)
        except msgspec.DecodeError:
            return None
        known = hmac.compare_digest(hello.secret.encode(), self._secret.encode())
        return hello.rank if known else None


def dial(address: Address, rank: int, same_node: bool) -> Channel:
    """Connect a rank to its driver and introduce it."""
    if same_node and address.unix:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        sock.connect(f"\0{address.unix}")
    else:
        sock = socket.create_connection((address.host, address.port), timeout=30.0)
        sock.settimeout(None)
    channel = Channel(sock)
    channel.send(msgspec.msgpack.encode(RankHello(address.secret, rank)))
    return channel


class RankLinks:
    """The driver's ends of all ranks' channels; one thread sends and receives, any may wake."""

    def __init__(self, channels: Sequence[Channel], send_timeout_s: float = 30.0) -> None:
        """channels: connected, in rank order. send_timeout_s: a longer send is a loss."""
        self._channels = list(channels)
        self.num_ranks = len(self._channels)
        self._selector = selectors.DefaultSelector()
        self._encoder = msgspec.msgpack.Encoder()
        self._decoder: msgspec.msgpack.Decoder[Report] = msgspec.msgpack.Decoder(Report)
        self._loss: str | None = None
        self._woken = False
        self._wake_reader, self._wake_writer = socket.socketpair()
        self._wake_reader.setblocking(False)
        self._wake_writer.setblocking(False)
        self._selector.register(self._wake_reader, selectors.EVENT_READ, None)
        for rank, channel in enumerate(self._channels):
            channel.limit_sends(send_timeout_s)
            self._selector.register(channel, selectors.EVENT_READ, rank)

    def send(self, command: Command) -> None:
        """Send every rank the same bytes; RanksLost if one does not accept them."""
        payload = self._encoder.encode(command)
        for rank, channel in enumerate(self._channels):
            try:
                channel.send(payload)
            except OSError as error:
                raise RanksLost(f"rank-{rank} does not accept messages: {error}") from error

    def receive(self, timeout_s: float | None) -> list[Report]:
        """Wait until a rank reports, `wake` is called or timeout_s is over; RanksLost on EOF."""
        reports: list[Report] = []
        if self._loss is not None:
            raise RanksLost(self._loss)
        for key, _ in self._selector.select(timeout_s):
            if key.data is None:
                self._drain_wakes()
                continue
            frames, alive = self._channels[key.data].receive_available()
            reports += [self._decoder.decode(frame) for frame in frames]
            if not alive:
                raise RanksLost(f"rank-{key.data} closed its connection")
        return reports

    def report_loss(self, message: str) -> None:
        """Have the next `receive` raise RanksLost (Ray saw a rank die), from any thread."""
        self._loss = message
        self.wake()

    def wake(self) -> None:
        """Make a blocked `receive` return, from any thread; calls before it share one byte.

        Set the reason for the wake before the call: the woken thread may read it at once.
        """
        if self._woken:
            return
        self._woken = True
        # A full pipe has enough wakes in it already; a closed one has no reader.
        with contextlib.suppress(OSError):
            self._wake_writer.send(b"w")

    def close(self) -> None:
        """Close every channel; ranks see the end of their stream."""
        self._selector.close()
        for channel in self._channels:
            channel.close()
        self._wake_reader.close()
        self._wake_writer.close()

    def _drain_wakes(self) -> None:
        with contextlib.suppress(BlockingIOError):
            while self._wake_reader.recv(4096):
                continue
        # Only after the last byte is read: reset earlier, a byte sent in between could be drained
        # here with the flag set again, and every later wake would be lost.
        self._woken = False
