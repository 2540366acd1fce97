"""A request's way back: each sequence ends once, and a slow socket delays a stream, no more."""

import asyncio
import socket
import struct

import msgspec

from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.contract import (
    Cancelled,
    Finished,
    GenerateRequest,
    ReplyAddress,
    SequenceRequest,
    TokenFrame,
)
from deployments.driver.streaming.connections import FrameSender, IngressConnections
from deployments.driver.streaming.streams import Streams
from deployments.frames import Finish
from deployments.ingress.generation.frames import RequestInboxes
from scheduler.events import Ended, NewTokens
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.deployments.driver.streaming.sockets import HERE, Sockets, heard


def request(name: str = "r", num: int = 1) -> GenerateRequest:
    return GenerateRequest(name, [SequenceRequest([1], Sampling(), Stopping(9))] * num)


def new(streams: Streams, start: int, *tokens: int, index: int = 0) -> None:
    streams.take(NewTokens(("r", index), start, list(tokens)))
    streams.flush()


def end(streams: Streams, *tokens: int, index: int = 0) -> None:
    ended = Ended(("r", index), FinishReason.LENGTH, list(tokens), None, 0, 0.0, None, None)
    streams.take(ended)


def test_frames_of_a_sequence_are_sent_while_another_runs() -> None:
    """There is no completion before the last of them ends."""

    async def story() -> None:
        sockets = Sockets(room=0)
        streams = Streams(sockets)
        inbox = sockets.inboxes[HERE].open("r", 2)
        completion = streams.open(request(num=2), HERE)
        new(streams, 0, 5, 6)
        new(streams, 0, 7, index=1)
        end(streams, 5, 6)
        sockets.room[HERE] = 3
        streams.resend(HERE)
        assert (heard(inbox), heard(inbox, 1)) == ([5, 6], [7])
        assert not completion.done()
        end(streams, 7, index=1)
        assert [s.ending for s in (await completion).sequences] == [
            Finished(FinishReason.LENGTH)
        ] * 2

    asyncio.run(story())


def test_a_replica_that_is_gone_costs_nothing() -> None:
    async def story() -> None:
        sockets = Sockets(room=0)
        streams = Streams(sockets)
        completion = streams.open(request(), HERE)
        new(streams, 0, 5, 6)
        assert streams._outbox.num_unsent == 2
        streams.abandon(HERE)
        new(streams, 2, 7)
        assert streams._outbox.num_unsent == 0
        assert (await completion).sequences[0].ending == Cancelled()
        assert streams.close("r") == [0]

    asyncio.run(story())


def test_stored_tokens_end_with_their_request_and_lost_replicas_get_none() -> None:
    async def story() -> None:
        sockets = Sockets(room=0)
        streams = Streams(sockets)
        streams.open(request(), HERE)
        new(streams, 0, 5, 6)
        streams.close("r")
        assert streams._outbox.num_unsent == 0
        sockets.room[HERE] = 9
        streams.open(request(), None)
        new(streams, 0, 5)
        assert sockets.frames == []
        assert streams.num_delayed == 1

    asyncio.run(story())


class Engine:
    """What an engine does with what comes back on its sockets."""

    def __init__(self) -> None:
        sender = FrameSender()
        self.connections = IngressConnections(sender, self)
        self.streams = Streams(sender)

    def on_room(self, address: ReplyAddress) -> None:
        self.streams.resend(address)

    def on_finish(self, finish: Finish) -> None:
        raise AssertionError(finish)

    def on_early_submit(self, request: GenerateRequest, address: ReplyAddress) -> None:
        raise AssertionError(request)

    def on_withdraw(self, request_id: str) -> None:
        raise AssertionError(request_id)

    def on_lost(self, address: ReplyAddress) -> None:
        self.streams.abandon(address)


def test_a_stream_continues_as_soon_as_a_full_socket_is_read() -> None:
    """Over a real socket, whose reader sleeps for a while and then reads everything."""
    length, parts = 50_000, 30

    async def story() -> None:
        reading, complete, checked = asyncio.Event(), asyncio.Event(), asyncio.Event()
        inboxes = RequestInboxes()
        inbox = inboxes.open("r", 1)

        async def read_late(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            await reading.wait()
            num_frames = 0
            while not complete.is_set():
                (size,) = struct.unpack("!I", await reader.readexactly(4))
                frame = await reader.readexactly(size)
                num_frames += 1
                if num_frames > 1:  # the first is the greeting
                    inboxes.deliver(msgspec.msgpack.decode(frame, type=TokenFrame))
                if len(inbox._channels[0].tokens) == parts * length:
                    complete.set()
            await checked.wait()
            writer.close()
            await writer.wait_closed()

        few = socket.create_server(("127.0.0.1", 0))
        few.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # Else it takes megabytes.
        server = await asyncio.start_server(read_late, sock=few)
        address = ReplyAddress("127.0.0.1", server.sockets[0].getsockname()[1], "hush")
        engine = Engine()
        await engine.connections.connect(address)
        completion = engine.streams.open(request(), address)
        for part in range(parts):
            new(engine.streams, part * length, *range(70_000, 70_000 + length))
        assert engine.streams.num_delayed > 0
        reading.set()
        await complete.wait()
        assert not completion.done()
        assert heard(inbox) == [*range(70_000, 70_000 + length)] * parts
        checked.set()
        assert (await completion).sequences[0].ending == Cancelled(), "the replica hung up"
        engine.connections.close()
        server.close()

    asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
