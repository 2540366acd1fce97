"""Sums over ranks inside kernels; `sharding.symmetric.PeerBuffers` says why they are right.

The programs of a launch take a row each. A program waits for the program of the same number on
each other rank. Programs start in the order of their numbers, so the lowest that has not ended
anywhere has started everywhere, or will: none waits for one that has no room.
"""

from typing import Any

import triton
import triton.language as tl

from sharding.symmetric import MOST_ROWS

FLAGS = tl.constexpr(MOST_ROWS)

Pointer = Any


@triton.jit  # type: ignore[untyped-decorator]
def table(addresses: "Pointer", ranks: tl.constexpr) -> "Any":
    """Load an address for each rank, as a tuple; nothing writes them."""
    found = ()
    for peer in tl.static_range(ranks):
        found += (tl.load(addresses + peer),)  # type: ignore[assignment]
    return found


@triton.jit  # type: ignore[untyped-decorator]
def meet(flags: "Any", rank: tl.constexpr, ranks: tl.constexpr) -> None:
    """Wait until this row's program has come here on every rank.

    All kernels that this one comes after must have ended: none of its own writes is published.

    flags: the address of each rank's int32 [ranks, FLAGS], one for each peer and row: 0, but 1
    from when the peer has set it until its owner has seen it.
    """
    row = tl.program_id(0)
    for peer in tl.static_range(ranks):
        if peer != rank:
            theirs = flags[peer].to(tl.pointer_type(tl.int32)) + rank * FLAGS + row
            # Relaxed, as torch's sums set theirs at their begin: what peers read here was written
            # by kernels that have ended (`gdc_wait`), so it is in memory. A release would wait
            # once more for it, 1.5 microseconds.
            tl.atomic_xchg(theirs, 1, sem="relaxed", scope="sys")
    for peer in tl.static_range(ranks):
        if peer != rank:
            own = flags[rank].to(tl.pointer_type(tl.int32)) + peer * FLAGS + row
            # Acquire: it drops what the L1 cache holds of the peers' memory from sums before.
            while tl.atomic_cas(own, 1, 0, sem="acquire", scope="sys") != 1:
                pass


@triton.jit  # type: ignore[untyped-decorator]
def sum_of_ranks(
    summands: "Any", dtype: tl.constexpr, offsets: "Any", inside: "Any", ranks: tl.constexpr
) -> "Any":
    """Sum numbers over ranks in their order, rounded to their type after each addition.

    That is how torch's one-shot sum adds. summands: the address of each rank's.
    """
    total = tl.load(_numbers(summands[0], dtype) + offsets, mask=inside, other=0.0)
    for peer in tl.static_range(1, ranks):
        other = tl.load(_numbers(summands[peer], dtype) + offsets, mask=inside, other=0.0)
        total = (total.to(tl.float32) + other.to(tl.float32)).to(dtype)
    return total


@triton.jit  # type: ignore[untyped-decorator]
def _numbers(address: "Any", dtype: tl.constexpr) -> "Pointer":
    # Buffers are aligned, which the compiler cannot know of an address that was loaded.
    return tl.multiple_of(address.to(tl.pointer_type(dtype)), 16)
