"""Sums that begin with a barrier and end without one, in every order in which ranks can run.

Each rank does the same work, one action after the other: it writes its summand, then the programs
of its kernel set their flags on the peers, wait for the peers' flags, reset those and read. All
interleavings are tried. That an action is seen by what follows it is the kernel's to assure.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import pytest
import torch

from sharding.group import LoneRank
from sharding.symmetric import PeerBuffers, peer_bytes


@dataclass(frozen=True)
class Sum:
    """A norm's: from which buffer, and of how many rows."""

    buffer: int
    rows: int


@dataclass(frozen=True)
class Apart:
    """A sum by `all_reduce`: it ends on a rank only once every rank has begun it."""


Work = Sequence[Sum | Apart]


@dataclass(frozen=True)
class Rank:
    """How far a rank is.

    item: the number of what it does. actions: done by each program of the sum; none before the
    summand is written. buffers: the number of the sum that each holds. flags: (buffer, peer, row)
    of those that are set here.
    """

    item: int = 0
    actions: tuple[int, ...] = ()
    buffers: tuple[int, int] = (-1, -1)
    flags: frozenset[tuple[int, int, int]] = frozenset()


Ranks = tuple[Rank, ...]


class Fault(Exception):
    """What goes wrong."""


def after(ranks: Ranks, number: int, work: Work, room: int) -> Iterator[Ranks]:
    """What each next action of a rank can lead to; room: of so many programs at a time."""
    own = ranks[number]
    if own.item == len(work):
        return
    item = work[own.item]
    if isinstance(item, Apart):
        if all(rank.item >= own.item for rank in ranks):
            yield changed(ranks, number, replace(own, item=own.item + 1))
        return
    if not own.actions:
        held = list(own.buffers)
        held[item.buffer] = own.item
        begun = replace(own, actions=item.rows * (0,), buffers=(held[0], held[1]))
        yield changed(ranks, number, begun)
        return
    all_actions = 3 * (len(ranks) - 1)
    unfinished = [row for row, done in enumerate(own.actions) if done < all_actions]
    if not unfinished:
        yield changed(ranks, number, replace(own, item=own.item + 1, actions=()))
    # Programs start in their order.
    for row in unfinished[:room]:
        found = acted(ranks, number, item, row)
        if found is not None:
            yield found


def acted(ranks: Ranks, number: int, item: Sum, row: int) -> Ranks | None:
    """A program's next action, if it can be done now: for each peer set, then wait, then read."""
    own = ranks[number]
    peers = [peer for peer in range(len(ranks)) if peer != number]
    kind, which = divmod(own.actions[row], len(peers))
    peer = peers[which]
    other = ranks[peer]
    actions = (*own.actions[:row], own.actions[row] + 1, *own.actions[row + 1 :])
    if kind == 0:
        flag = (item.buffer, number, row)
        if flag in other.flags:
            raise Fault("a flag is set twice")
        ranks = changed(ranks, peer, replace(other, flags=other.flags | {flag}))
    elif kind == 1:
        flag = (item.buffer, peer, row)
        if flag not in own.flags:
            return None
        own = replace(own, flags=own.flags - {flag})
    elif other.buffers[item.buffer] != own.item:
        raise Fault("another sum's numbers are read")
    return changed(ranks, number, replace(own, actions=actions))


def changed(ranks: Ranks, number: int, rank: Rank) -> Ranks:
    return (*ranks[:number], rank, *ranks[number + 1 :])


def run_in_every_order(work: Work, size: int, rooms: Sequence[int]) -> int:
    """Raise Fault if something can go wrong; return how many states there are."""
    begin = size * (Rank(),)
    seen, waiting = {begin}, [begin]
    while waiting:
        ranks = waiting.pop()
        found = [each for i in range(size) for each in after(ranks, i, work, rooms[i])]
        if not found:
            if any(rank.item < len(work) for rank in ranks):
                raise Fault("all wait")
            if any(rank.flags for rank in ranks):
                raise Fault("a flag stays set")
        new = set(found) - seen
        seen |= new
        waiting += new
    return len(seen)


def steps(*rows_of_sums: Sequence[int], apart: bool = True) -> list[Sum | Apart]:
    """Steps as a model takes their buffers, once each and in a row; each may begin with a sum."""
    size = 2
    memory = torch.zeros(peer_bytes(size), dtype=torch.uint8)
    buffers = PeerBuffers(memory, [memory.data_ptr()] * size)
    work: list[Sum | Apart] = []
    for rows_of_step in rows_of_sums:
        work += [Apart()] if apart else []
        for rows in rows_of_step:
            taken = buffers.take((rows, 8), torch.float32, LoneRank(0, size))
            work.append(Sum(int(taken.partial.data_ptr() != memory.data_ptr()), rows))
    return work


@pytest.mark.parametrize("rooms", [(2, 2), (1, 2), (2, 1)])
@pytest.mark.parametrize("rows", [(1, 1, 1, 1, 1), (2, 2, 2, 2), (2, 1, 2, 1), (1, 2, 1, 2)])
def test_nothing_is_overwritten_lost_or_waited_for_in_vain(
    rows: tuple[int, ...], rooms: tuple[int, int]
) -> None:
    assert run_in_every_order(steps(rows, apart=False), 2, rooms) > 50


def test_three_ranks() -> None:
    assert run_in_every_order(steps((1, 1, 1)), 3, (1, 1, 1)) > 1000


def replayed(apart: bool) -> list[Sum | Apart]:
    """Two replays of one step with three sums: the last one's buffer is the first one's."""
    return 2 * steps((1, 2, 1), apart=apart)


def test_a_sum_apart_is_between_steps_of_an_odd_number_of_sums() -> None:
    assert run_in_every_order(replayed(apart=True), 2, (2, 2)) > 50
    with pytest.raises(Fault, match=r"set twice|another sum's"):
        run_in_every_order(replayed(apart=False), 2, (2, 2))


def test_one_buffer_would_not_do() -> None:
    with pytest.raises(Fault, match=r"set twice|another sum's"):
        run_in_every_order([Sum(0, 1), Sum(0, 1)], 2, (1, 1))
