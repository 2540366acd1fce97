"""Norms that sum over ranks, on a CPU, by Triton's interpreter: ranks in turn, and at once.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
import random
from multiprocessing import get_context
from time import sleep
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.activations import FP8
from sharding.group import LoneRank, Summand
from sharding.symmetric import MOST_ROWS, PeerBuffers, peer_bytes
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)

EPS = 1e-5
SUMS = 24
WAIT_S = 30.0


class RanksInTurn:
    """The buffers of several ranks in one process.

    Where a rank runs, the flags of those behind it are set for it: as if they had come already.
    """

    def __init__(self, size: int) -> None:
        memories = [torch.zeros(peer_bytes(size), dtype=torch.uint8) for _ in range(size)]
        addresses = [memory.data_ptr() for memory in memories]
        self.ranks = [LoneRank(rank, size) for rank in range(size)]
        self.buffers = [PeerBuffers(memory, addresses) for memory in memories]

    def take(self, parts: list[Tensor]) -> list[Summand]:
        """Each rank's summand, with its part written."""
        found = []
        for rank, buffers, part in zip(self.ranks, self.buffers, parts, strict=True):
            found.append(buffers.take(part.shape, part.dtype, rank))
            found[-1].partial.copy_(part)
        return found

    def arrive(self, rank: int, which: int, rows: int) -> None:
        """Set the flags of later ranks on this one."""
        self.buffers[rank].flags[which, rank + 1 :, :rows] = 1


@pytest.fixture
def add_rms_norm(monkeypatch: pytest.MonkeyPatch) -> Any:
    kernels = pytest.importorskip("modeling.layers.kernels.rows")
    launch = Interpreted(kernels._LAUNCH_ADD_RMS_NORM._kernel)
    monkeypatch.setattr(kernels, "_LAUNCH_ADD_RMS_NORM", launch)
    return kernels.add_rms_norm


def numbers(rows: int, width: int, dtype: torch.dtype) -> Tensor:
    """Random ones; whole ones in bfloat16, where the interpreter cuts numbers off."""
    if dtype is torch.bfloat16:
        return torch.randint(-8, 9, (rows, width)).to(dtype)
    return torch.randn(rows, width).to(dtype)


def in_order(parts: list[Tensor]) -> Tensor:
    """The sum in the order of ranks, rounded after each addition."""
    total = parts[0]
    for part in parts[1:]:
        total = total + part
    return total


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("size", "rows", "width"), [(2, 1, 64), (2, 3, 96), (4, 5, 40)])
def test_every_rank_gets_the_sum_and_its_norm(
    add_rms_norm: Any, dtype: torch.dtype, size: int, rows: int, width: int
) -> None:
    ranks = RanksInTurn(size)
    for turn in range(4):
        parts = [numbers(rows, width, dtype) for _ in range(size)]
        residual, weight = numbers(rows, width, dtype), numbers(1, width, dtype)[0]
        summands = ranks.take(parts)
        expected = add_rms_norm(in_order(parts), residual, weight, EPS)
        for rank, summand in enumerate(summands):
            ranks.arrive(rank, turn % 2, rows)
            found = add_rms_norm(summand.partial, residual, weight, EPS, summand=summand)
            # To the bit: so nothing changes where a sum and a norm become one launch.
            assert torch.equal(found[0], expected[0])
            assert torch.equal(found[1], expected[1])
            assert torch.equal(found[1], in_order(parts) + residual)
        for rank, buffers in enumerate(ranks.buffers):
            # What earlier ranks have set is reset; what ranks behind would have seen is not.
            flags = buffers.flags[turn % 2]
            assert not flags[: rank + 1].any()
            ranks.buffers[rank].flags.zero_()


def test_a_sum_without_a_residual_is_written_to_memory_of_its_own(add_rms_norm: Any) -> None:
    ranks = RanksInTurn(2)
    parts = [torch.randn(2, 32) for _ in range(2)]
    first, second = ranks.take(parts)
    weight = torch.randn(32)
    ranks.arrive(0, 0, 2)
    for summand in (first, second):
        normed, total = add_rms_norm(summand.partial, None, weight, EPS, summand=summand)
        assert torch.equal(total, in_order(parts))
        torch.testing.assert_close(normed, F.rms_norm(total, (32,), weight, EPS))
    assert torch.equal(first.partial, parts[0])


def test_inner_norms_and_rounding_are_those_of_the_sum(add_rms_norm: Any) -> None:
    ranks = RanksInTurn(2)
    parts = [numbers(3, 64, torch.float16) for _ in range(2)]
    residual, (weight, own) = numbers(3, 64, torch.float16), numbers(2, 64, torch.float16)
    inner = (own, 1e-6)

    def computed(x: Tensor, summand: Summand | None) -> list[Tensor]:
        codes, scales = torch.empty(3, 64, dtype=FP8), torch.empty(3, 1)
        rounded = (codes, scales)
        normed = add_rms_norm(
            x, residual, weight, EPS, inner=inner, rounded=rounded, summand=summand
        )
        return [*normed, codes.float(), scales]

    summand, _ = ranks.take(parts)
    ranks.arrive(0, 0, 3)
    expected = computed(in_order(parts), None)
    for one, other in zip(computed(summand.partial, summand), expected, strict=True):
        assert torch.equal(one, other)


def test_buffers_and_flags_alternate() -> None:
    ranks = RanksInTurn(2)
    first, second, third = (ranks.take([torch.zeros(1, 8)] * 2)[0] for _ in range(3))
    assert first.partial.data_ptr() == third.partial.data_ptr() != second.partial.data_ptr()
    assert torch.equal(first.peers, third.peers)
    assert not (first.peers == second.peers).any()
    assert ranks.buffers[0].flags.shape == (2, 2, MOST_ROWS)


def sums_of_rank(rank: int, size: int, buffers: PeerBuffers, add_rms_norm: Any) -> None:
    """A rank's sums, each compared; the other ranks make theirs at the same time."""
    delays = random.Random(rank)
    for number in range(SUMS):
        rows, generator = 1 + number % 3, torch.Generator().manual_seed(number)
        *parts, residual = torch.randn(size + 1, rows, 32, generator=generator)
        summand = buffers.take((rows, 32), torch.float32, LoneRank(rank, size))
        summand.partial.copy_(parts[rank])
        sleep(delays.choice((0.0, 0.0, 0.02)))
        _, total = add_rms_norm(summand.partial, residual, torch.ones(32), EPS, summand=summand)
        assert torch.equal(total, in_order(parts) + residual), number


def test_ranks_wait_for_each_other(add_rms_norm: Any) -> None:
    """In processes, which find all memory at the same addresses because they are forks."""
    memories = [torch.zeros(peer_bytes(2), dtype=torch.uint8) for _ in range(2)]
    for memory in memories:
        memory.share_memory_()  # type: ignore[no-untyped-call]
    addresses = [memory.data_ptr() for memory in memories]
    buffers = [PeerBuffers(memory, addresses) for memory in memories]
    create = get_context("fork").Process
    ranks = [create(target=sums_of_rank, args=(i, 2, buffers[i], add_rms_norm)) for i in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join(WAIT_S)
        process.kill()
        process.join()
    assert [process.exitcode for process in ranks] == [0, 0]
    assert not any(each.flags.any() for each in buffers)
