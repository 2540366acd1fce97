"""Token frames: strangers are refused, frames arrive, finishes come back, hang-ups are told."""

import asyncio
import contextlib
import socket
import struct

import pytest

from deployments.contract import ReplyAddress, TokenFrame, TokenRun
from deployments.frames import Finish, FrameReceiver, FrameSender


class Recorder:
    """Takes what comes back on a driver's connections."""

    def __init__(self) -> None:
        self.finishes: asyncio.Queue[Finish] = asyncio.Queue()
        self.room: asyncio.Queue[ReplyAddress] = asyncio.Queue()
        self.lost: asyncio.Queue[ReplyAddress] = asyncio.Queue()

    def on_finish(self, finish: Finish) -> None:
        self.finishes.put_nowait(finish)

    def on_room(self, address: ReplyAddress) -> None:
        self.room.put_nowait(address)

    def on_lost(self, address: ReplyAddress) -> None:
        self.lost.put_nowait(address)


def frame(*tokens: int) -> TokenFrame:
    return TokenFrame([TokenRun("r", 0, 0, list(tokens))])


def run(story: "asyncio.Future[None] | object") -> None:
    asyncio.run(asyncio.wait_for(story, 300))  # type: ignore[arg-type]


def test_frames_arrive_in_order_and_finishes_come_back() -> None:
    async def story() -> None:
        received: asyncio.Queue[TokenFrame] = asyncio.Queue()
        receiver, recorder = FrameReceiver(received.put_nowait), Recorder()
        address = await receiver.start("127.0.0.1")
        sender = FrameSender(recorder)
        await sender.connect(address)
        for token in range(50):
            assert sender.send(address, frame(token))
        tokens = [(await received.get()).runs[0].tokens[0] for _ in range(50)]
        assert tokens == list(range(50))
        receiver.finish("r", 0, 7)
        assert await recorder.finishes.get() == Finish("r", 0, 7)
        await receiver.close()
        assert await recorder.lost.get() == address
        assert not sender.send(address, frame(1))

    run(story())


@pytest.mark.parametrize(
    "hello", [b"\x00\x00\x00\x05wrong", struct.pack("!I", 1 << 30), b"GET / HTTP/1.1\r\n\r\n"]
)
def test_strangers_are_refused(hello: bytes) -> None:
    async def story() -> None:
        received: asyncio.Queue[TokenFrame] = asyncio.Queue()
        receiver = FrameReceiver(received.put_nowait)
        address = await receiver.start("127.0.0.1")
        reader, writer = await asyncio.open_connection(address.host, address.port)
        writer.write(hello)
        assert await reader.read() == b""
        writer.close()
        assert received.empty()
        await receiver.close()

    run(story())


def test_nobody_listening_refuses_frames_and_does_not_block() -> None:
    async def story() -> None:
        recorder = Recorder()
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # nobody else gets this port meanwhile
            address = ReplyAddress("127.0.0.1", silent.getsockname()[1], "hush")
            sender = FrameSender(recorder)
            await sender.connect(address)
        assert not sender.has_room(address)
        assert not sender.send(address, frame(1))
        assert recorder.lost.empty(), "a replica that was never reached has no requests to lose"

    run(story())


def test_a_slow_replica_refuses_frames_until_it_reads_again() -> None:
    """Its socket is full; the driver neither waits nor keeps more than the buffer."""

    async def story() -> None:
        recorder, reading, ended = Recorder(), asyncio.Event(), asyncio.Event()

        async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reading.wait()
            while await reader.read(1 << 20):
                pass
            writer.close()
            await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(read_late, "127.0.0.1", 0)
        address = ReplyAddress("127.0.0.1", server.sockets[0].getsockname()[1], "hush")
        sender = FrameSender(recorder)
        await sender.connect(address)
        assert await recorder.room.get() == address
        large = frame(*range(100_000))
        count = 0
        while sender.send(address, large):
            count += 1
        assert 0 < count < 200
        assert not sender.has_room(address)
        assert recorder.room.empty()
        reading.set()
        assert await recorder.room.get() == address
        assert sender.send(address, large)
        sender.close()
        await ended.wait()
        server.close()

    run(story())


def test_a_replica_that_ends_with_its_socket_full_is_told_of_once() -> None:
    async def story() -> None:
        recorder, gone, ended = Recorder(), asyncio.Event(), asyncio.Event()

        async def hang_up(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await gone.wait()
            writer.transport.abort()
            with contextlib.suppress(ConnectionError):
                await writer.wait_closed()
            ended.set()

        server = await asyncio.start_server(hang_up, "127.0.0.1", 0)
        address = ReplyAddress("127.0.0.1", server.sockets[0].getsockname()[1], "hush")
        sender = FrameSender(recorder)
        await sender.connect(address)
        await recorder.room.get()
        while sender.send(address, frame(*range(100_000))):
            pass
        gone.set()
        assert await recorder.lost.get() == address
        assert not sender.has_room(address)
        await ended.wait()
        sender.close()
        server.close()

    run(story())
