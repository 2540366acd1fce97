"""Token frames: authentication, delivery, messages back, and lost connections."""

import asyncio
import contextlib
import socket
import struct

import msgspec
import pytest

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import (
    GenerateRequest,
    ReplyAddress,
    SequenceRequest,
    TokenFrame,
    TokenRun,
)
from deployments.driver.streaming.connections import FrameSender, IngressConnections
from deployments.frames import DriverHello, Finish, FrameReceiver
from tests.deployments.driver.routing.stories import until_true


class Recorder:
    """Records what arrives on a driver's connections."""

    def __init__(self) -> None:
        self.finishes: asyncio.Queue[Finish] = asyncio.Queue()
        self.ahead: asyncio.Queue[tuple[GenerateRequest, ReplyAddress]] = asyncio.Queue()
        self.withdrawn: asyncio.Queue[str] = asyncio.Queue()
        self.room: asyncio.Queue[ReplyAddress] = asyncio.Queue()
        self.lost: asyncio.Queue[ReplyAddress] = asyncio.Queue()

    def on_finish(self, finish: Finish) -> None:
        self.finishes.put_nowait(finish)

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        self.ahead.put_nowait((request, address))

    def on_withdraw(self, request_id: str) -> None:
        self.withdrawn.put_nowait(request_id)

    def on_room(self, address: ReplyAddress) -> None:
        self.room.put_nowait(address)

    def on_lost(self, address: ReplyAddress) -> None:
        self.lost.put_nowait(address)


class Driver(FrameSender):
    """A driver's sender and its connections."""

    def __init__(self, recorder: Recorder, replica: str = "") -> None:
        super().__init__()
        self._connections = IngressConnections(self, recorder, replica)
        self.connect, self.close = self._connections.connect, self._connections.close


def frame(*tokens: int) -> TokenFrame:
    return TokenFrame([TokenRun("r", 0, 0, list(tokens))])


def run(story: "asyncio.Future[None] | object") -> None:
    asyncio.run(asyncio.wait_for(story, 300))  # type: ignore[arg-type]


def test_frames_arrive_in_order_and_finishes_return() -> None:
    async def story() -> None:
        received: asyncio.Queue[TokenFrame] = asyncio.Queue()
        receiver, recorder = FrameReceiver(received.put_nowait), Recorder()
        address = await receiver.start("127.0.0.1")
        sender = Driver(recorder)
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


def packed(message: object) -> bytes:
    payload = msgspec.msgpack.encode(message)
    return struct.pack("!I", len(payload)) + payload


@pytest.mark.parametrize(
    "hello",
    [
        b"\x00\x00\x00\x05wrong",
        struct.pack("!I", 1 << 30),
        b"GET / HTTP/1.1\r\n\r\n",
        packed(DriverHello("wrong", "a replica")),
        packed({"replica": "a replica"}),
    ],
)
def test_unknown_connections_are_refused(hello: bytes) -> None:
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


def test_without_a_listener_frames_are_refused_at_once() -> None:
    async def story() -> None:
        recorder = Recorder()
        with socket.socket() as silent:
            silent.bind(("127.0.0.1", 0))  # no other process gets this port meanwhile
            address = ReplyAddress("127.0.0.1", silent.getsockname()[1], "hush")
            sender = Driver(recorder)
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
        sender = Driver(recorder)
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


def test_a_replica_that_ends_with_a_full_socket_is_reported_once() -> None:
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
        sender = Driver(recorder)
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


def request(prompt: list[int] | None = None) -> GenerateRequest:
    return GenerateRequest("r", [SequenceRequest(prompt or [1, 2], Sampling(), Stopping(5))])


def test_an_early_submit_reaches_the_named_replica() -> None:
    """It arrives unchanged."""
    red, blue = (AdapterReference(AdapterSource.HUB, name, "main") for name in ("red", "blue"))
    merge = AdapterReference(
        AdapterSource.LOCAL, "two", parts=(red, blue), rule=MergeRule(weights=(0.5, 0.25))
    )
    sampling = Sampling(
        temperature=1, top_k=7, top_p=0.5, seed=(1 << 64) - 1, logprobs=3, watermark=True,
        logit_bias=((3, -1.5), (4, 2.0)), masked_ids=(1, 2), masked_tokens=4, json_schema="{}",
        allowed_ids=(5,), bad_words=((6, 7), (8,)), free_until=(9,), free_from=1,
    )  # fmt: skip
    full = SequenceRequest([0, 70_000, 3], sampling, Stopping(9, (2, 7), 1))

    async def story() -> None:
        receiver = FrameReceiver(lambda frame: None)
        address = await receiver.start("127.0.0.1")
        recorders = {name: Recorder() for name in ("a", "b", "")}
        # The event loop holds tasks weakly: without the list, drivers could be collected here.
        drivers = [Driver(recorder, name) for name, recorder in recorders.items()]
        for driver in drivers:
            await driver.connect(address)
        sent = GenerateRequest("r", [full, *request().sequences], merge)
        # They dialled, but may not have been heard yet.
        await until_true(lambda: len(receiver._drivers) == 3)
        assert receiver.submit_early("b", sent)
        receiver.withdraw("b", "r")
        receiver.finish("r", 1, 3)
        assert await recorders["b"].ahead.get() == (sent, address)
        assert await recorders["b"].withdrawn.get() == "r"
        for recorder in recorders.values():
            assert await recorder.finishes.get() == Finish("r", 1, 3)
        assert recorders["a"].ahead.empty()
        assert recorders[""].ahead.empty()
        for unknown in ("c", ""):
            assert not receiver.submit_early(unknown, sent)
            receiver.withdraw(unknown, "r")
        await receiver.close()
        assert not receiver.submit_early("b", sent), "it hung up"
        receiver.withdraw("b", "r")
        for recorder in recorders.values():
            await recorder.lost.get()

    run(story())


def test_some_requests_are_not_submitted_early() -> None:
    long = request([100_000] * 20_000)
    longer = request([1] * 70_000)
    held = Sampling(grammar="start: " + "a" * 5_000)
    many = GenerateRequest("r", [SequenceRequest([1], held, Stopping(5))] * 16)
    secret = msgspec.structs.replace(request(), api_token="a client's own")
    impossible = request([1 << 70])
    no_text = msgspec.structs.replace(
        request(), adapter=AdapterReference(AdapterSource.LOCAL, "\ud800")
    )

    async def story() -> None:
        receiver, recorder = FrameReceiver(lambda frame: None), Recorder()
        address = await receiver.start("127.0.0.1")
        driver = Driver(recorder, "a")
        await driver.connect(address)
        await until_true(lambda: receiver.submit_early("a", request()))
        for sent in (long, longer, many, secret, impossible, no_text):
            assert not receiver.submit_early("a", sent)
        almost = request([100_000] * 12_000)
        assert receiver.submit_early("a", almost)
        assert (await recorder.ahead.get())[0] == request()
        assert (await recorder.ahead.get())[0] == almost
        await receiver.close()
        await recorder.lost.get()

    run(story())


def test_a_driver_that_does_not_read_gets_no_early_submits() -> None:
    async def story() -> None:
        receiver = FrameReceiver(lambda frame: None)
        address = await receiver.start("127.0.0.1")
        _, writer = await asyncio.open_connection(address.host, address.port, limit=1)
        writer.write(packed(DriverHello(address.secret, "a")))
        await until_true(lambda: receiver.submit_early("a", request()))
        large, count = request([100_000] * 12_000), 0
        while receiver.submit_early("a", large):
            count += 1
            await asyncio.sleep(0)
            assert count < 10_000
        writer.transport.abort()
        await receiver.close()

    run(story())


def test_of_two_connections_of_a_replica_the_later_counts() -> None:
    async def story() -> None:
        receiver, recorders = FrameReceiver(lambda frame: None), [Recorder(), Recorder()]
        address = await receiver.start("127.0.0.1")
        senders = [Driver(recorder, "a") for recorder in recorders]
        for sender, recorder in zip(senders, recorders, strict=True):
            await sender.connect(address)
            while recorder.finishes.empty():  # until it was heard
                receiver.finish("r", 0, 1)
                await asyncio.sleep(0)
        assert receiver.submit_early("a", request())
        await recorders[1].ahead.get()
        senders[0].close()
        await until_true(lambda: len(receiver._drivers) == 1)
        assert receiver.submit_early("a", request()), "the end of the first changes nothing"
        await recorders[1].ahead.get()
        senders[1].close()
        await until_true(lambda: not receiver._drivers)
        assert not receiver.submit_early("a", request())
        assert recorders[0].ahead.empty()
        await receiver.close()

    run(story())


def test_a_driver_continues_after_an_unknown_message() -> None:
    async def story() -> None:
        async def speak(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            for message in (["Unknown", 1], ["HeadStart", {"id": 7}], 5, ["Finish", "r", 0, 9]):
                writer.write(packed(message))
            await reader.read(1)
            await gone.wait()
            writer.close()

        gone, recorder = asyncio.Event(), Recorder()
        server = await asyncio.start_server(speak, "127.0.0.1", 0)
        address = ReplyAddress("127.0.0.1", server.sockets[0].getsockname()[1], "hush")
        driver = Driver(recorder)
        await driver.connect(address)
        assert await recorder.finishes.get() == Finish("r", 0, 9)
        assert recorder.ahead.empty()
        gone.set()
        await recorder.lost.get()
        server.close()

    run(story())
