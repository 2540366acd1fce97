"""The ranks' socket: frames whole, strangers refused, deaths seen, wakes from any thread."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import msgspec
import pytest

from configs.wire.plan import RequestJoin, StepPlan, StepResult, StepRow
from configs.wire.sampling import Sampling
from deployments.rank.messages import RankHello, RunStep, StepDone, Stop
from deployments.rank.transport import Address, Channel, Listener, RankLinks, RanksLost, dial
from tests.deployments.driver.routing.stories import PATIENCE_S

SECRET = "a-secret-that-only-ranks-know"


@contextmanager
def linked(num_ranks: int, same_node: bool = True) -> Iterator[tuple[RankLinks, list[Channel]]]:
    """The driver's links and the ranks' ends, connected through a listener."""
    listener = Listener("127.0.0.1", SECRET)
    ends: dict[int, Channel] = {}

    def connect(rank: int) -> None:
        ends[rank] = dial(listener.address, rank, same_node)

    threads = [threading.Thread(target=connect, args=(rank,)) for rank in range(num_ranks)]
    for thread in threads:
        thread.start()
    links = RankLinks(listener.accept(num_ranks, PATIENCE_S))
    for thread in threads:
        thread.join()
    listener.close()
    yield links, [ends[rank] for rank in range(num_ranks)]
    links.close()
    for end in ends.values():
        end.close()


def plan(num_tokens: int) -> StepPlan:
    join = RequestJoin(3, list(range(num_tokens)), num_tokens, -1, Sampling(seed=2**64 - 1))
    return StepPlan(1, 7, [join], [StepRow(3, 0, num_tokens, [0, 1], True)], [], [])


@pytest.mark.parametrize("same_node", [True, False])
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_every_rank_gets_the_same_plan_and_rank_zero_answers(
    num_ranks: int, same_node: bool
) -> None:
    sent = plan(200_000)
    received: list[bytes | None] = [None] * num_ranks
    with linked(num_ranks, same_node) as (links, ends):

        def take(rank: int) -> None:
            received[rank] = ends[rank].receive()

        threads = [threading.Thread(target=take, args=(rank,)) for rank in range(num_ranks)]
        for thread in threads:
            thread.start()
        links.send(RunStep(sent))
        for thread in threads:
            thread.join()
        for frame in received:
            assert frame is not None
            assert msgspec.msgpack.decode(frame, type=RunStep | Stop) == RunStep(sent)
        answer = StepDone(StepResult(1, 7, [42]))
        ends[0].send(msgspec.msgpack.encode(answer))
        assert links.receive(PATIENCE_S) == [answer]


def test_a_dead_rank_is_seen_and_named() -> None:
    with linked(2) as (links, ends):
        ends[1].close()
        with pytest.raises(RanksLost, match="rank-1"):
            links.receive(PATIENCE_S)


def test_a_reported_loss_ends_a_blocked_receive() -> None:
    with linked(1) as (links, _):
        threading.Timer(0.05, links.report_loss, ["rank-0 died"]).start()

        def receive_on() -> None:
            while True:
                assert links.receive(None) == []

        with pytest.raises(RanksLost, match="rank-0 died"):
            receive_on()


def test_wakes_never_block_and_are_merged() -> None:
    with linked(1) as (links, _):
        for _ in range(100_000):
            links.wake()
        assert links.receive(PATIENCE_S) == []
        assert links.receive(0.0) == []


def knock(address: Address, greeting: bytes) -> bytes:
    with socket.create_connection((address.host, address.port)) as sock:
        sock.sendall(greeting)
        sock.shutdown(socket.SHUT_WR)
        return sock.recv(16)


@pytest.mark.parametrize(
    "greeting",
    [
        b"",
        b"\xff\xff\xff\xff",
        b"\x00\x00\x00\x04junk",
        len(h := msgspec.msgpack.encode(RankHello("wrong", 0))).to_bytes(4, "big") + h,
        len(h := msgspec.msgpack.encode(RankHello(SECRET, 9))).to_bytes(4, "big") + h,
    ],
)
def test_unknown_connections_are_refused_and_ranks_accepted(greeting: bytes) -> None:
    listener = Listener("127.0.0.1", SECRET)
    answers: list[bytes] = []
    ends: list[Channel] = []

    def come() -> None:
        answers.append(knock(listener.address, greeting))
        ends.append(dial(listener.address, 0, True))

    coming = threading.Thread(target=come)
    coming.start()
    channels = listener.accept(1, PATIENCE_S)
    coming.join()
    assert answers == [b""]
    assert len(channels) == 1
    listener.close()
    for channel in channels + ends:
        channel.close()


def test_silent_connections_delay_no_rank() -> None:
    listener = Listener("127.0.0.1", SECRET)
    address = listener.address
    with socket.create_connection((address.host, address.port)) as stranger:
        end = dial(address, 0, same_node=False)
        [channel] = listener.accept(1, PATIENCE_S)
        listener.close()
        assert stranger.recv(16) == b""
    end.send(b"here")
    assert channel.receive() == b"here"
    end.close()
    channel.close()


def test_a_rank_that_does_not_come_is_named() -> None:
    listener = Listener("127.0.0.1", SECRET)
    with pytest.raises(RanksLost, match=r"\[0, 1\]"):
        listener.accept(2, 0.05)
    listener.close()
