"""Sums through a buffer, without GPUs: gloo adds up, and overwrites the buffer when it has."""

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import pytest
import torch
from torch import Tensor

from configs.engine import AllReduce
from configs.wire.sums import MeasuredSums
from sharding.all_reduce import (
    AllReduceError,
    correct_dtypes,
    of_rank_0,
    unreachable,
    with_symmetric_memory,
)
from sharding.group import ProcessGroupRanks, SingleRank, TensorParallel, memory_store
from sharding.symmetric import DoubleBuffer, Method, SizeTable, Sum, SymmetricRanks
from tests.checkpoints import write_llama
from tests.checkpoints_others import write_gpt2, write_gpt_neox
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks

HALF = 1 << 14
ONE, TWO, NCCL = Method.ONE_SHOT, Method.TWO_SHOT, Method.NCCL


class Twin:
    """A buffer's sums over gloo. What a peer might have overwritten by now is spoiled at once."""

    def __init__(self, group: TensorParallel, table: SizeTable) -> None:
        self.memory = torch.zeros(2 * HALF, dtype=torch.uint8)
        self.buffers = DoubleBuffer(self.memory)
        self.calls: list[Method] = []
        self._group = group
        sums = {method: self._sum(method) for method in (ONE, TWO)}
        self.ranks = SymmetricRanks(group, self.buffers, sums, table)
        self.ranks.serve(frozenset([torch.float32, torch.bfloat16]), "twin")

    def _sum(self, method: Method) -> Sum:
        def summed(x: Tensor) -> Tensor:
            assert self.buffers.holds(x)
            self.calls.append(method)
            out = self._group.all_reduce(x.clone())
            self.memory.fill_(0xFF)
            return out

        return summed


ALL_ONE_SHOT = SizeTable([(HALF, ONE)])


@pytest.mark.parametrize(
    "write",
    [write_llama, write_gpt2, write_gpt_neox],
    ids=["llama", "biases", "two summands at once"],
)
def test_a_model_steps_as_with_gloo_alone(tmp_path: Path, write: Callable[[Path], object]) -> None:
    write(tmp_path)
    rows = [(0, [3, 5, 7, 11]), (1, [2] * 9)]

    def logits(group: TensorParallel) -> list[Tensor]:
        return Stepper(load(tmp_path, group)).step(rows)

    def through_buffer(group: TensorParallel) -> tuple[list[Tensor], int]:
        twin = Twin(group, ALL_ONE_SHOT)
        return logits(twin.ranks), len(twin.calls)

    [expected, _] = run_ranks(2, logits)
    for found, count in run_ranks(2, through_buffer):
        assert count > 2
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other)


def test_the_method_goes_by_size_and_type() -> None:
    table = SizeTable([(64, ONE), (256, TWO), (512, NCCL)])

    def on_rank(group: TensorParallel) -> tuple[list[Method], list[float]]:
        twin = Twin(group, table)
        sizes = [16, 17, 64, 68, 257, 0]
        tensors = [torch.full((n,), 1.0 + group.rank) for n in sizes]
        tensors += [torch.full((16,), 3.0, dtype=torch.float16), torch.full((3, 2), 4.0)]
        sums = [twin.ranks.all_reduce(x) for x in tensors]
        return twin.calls, [float(x.double().sum()) for x in sums]

    # 17 floats are no multiple of 16 bytes; 1,028 bytes are beyond the table.
    expected = [3.0 * n for n in (16, 17, 64, 68, 257, 0)] + [96.0, 48.0]
    assert run_ranks(2, on_rank) == [([ONE, TWO], expected)] * 2


def test_a_sum_outlives_the_next_one() -> None:
    def on_rank(group: TensorParallel) -> list[float]:
        ranks = Twin(group, ALL_ONE_SHOT).ranks
        sums = []
        for i in range(5):
            room = ranks.output_buffer((4, 4), torch.float32)
            assert room is not None
            sums.append(ranks.all_reduce(room.fill_(float(i))))
        return [float(x.mean()) for x in sums]

    assert run_ranks(2, on_rank) == [[0.0, 2.0, 4.0, 6.0, 8.0]] * 2


def test_two_summands_may_be_held_at_once() -> None:
    buffers = DoubleBuffer(torch.zeros(2 * HALF, dtype=torch.uint8))
    one, two = (buffers.take((8,), torch.bfloat16).fill_(i) for i in (1, 2))
    assert buffers.holds(one)
    assert buffers.holds(two)
    assert (one == 1).all()
    assert not buffers.holds(one[1:])
    assert not buffers.holds(torch.zeros(8))
    assert buffers.take((8,), torch.bfloat16).data_ptr() == one.data_ptr()


@pytest.mark.parametrize(
    ("choices", "words"),
    [
        (
            [(1 << 13, ONE), (1 << 18, ONE), (1 << 20, TWO)],
            "one-shot to 256 KiB, two-shot to 1 MiB",
        ),
        ([(1 << 13, ONE), (1 << 14, NCCL)], "one-shot to 8 KiB"),
        ([(1 << 13, NCCL), (1 << 14, TWO)], "nccl to 8 KiB, two-shot to 16 KiB"),
        ([(1 << 13, NCCL)], ""),
    ],
)
def test_the_table_in_words(choices: Sequence[tuple[int, Method]], words: str) -> None:
    assert str(SizeTable(choices)) == ", ".join(filter(None, [words, "nccl above"]))


@pytest.mark.parametrize(
    ("devices_of", "reason"),
    [
        ([("a", 0), ("b", 0)], "2 hosts"),
        ([("a", 0), ("a", 0)], "NOSET_CUDA_VISIBLE_DEVICES"),
        ([("a", 0), ("a", 97)], "this rank sees"),
    ],
)
def test_ranks_that_cannot_reach_each_other_say_why(
    devices_of: list[tuple[str, int]], reason: str
) -> None:
    assert reason in str(unreachable(devices_of))


def test_ranks_that_must_and_cannot_say_why_and_what_to_do() -> None:
    """Both are on the same device here, so neither maps anything."""
    store, device = memory_store(), torch.device("cpu", 0)

    def on_rank(group: TensorParallel) -> tuple[str, str, str]:
        assert isinstance(group, ProcessGroupRanks)
        with pytest.raises(AllReduceError) as refused:
            with_symmetric_memory(group, store, device, AllReduce.SYMMETRIC)
        auto = with_symmetric_memory(group, store, device, AllReduce.AUTO)
        assert auto is group
        reason = auto.method
        return (
            str(refused.value),
            reason,
            with_symmetric_memory(group, store, device, AllReduce.NCCL).method,
        )

    for refused, reason, configured in run_ranks(2, on_rank):
        assert "Set all_reduce to auto or nccl" in refused
        assert reason.startswith("nccl (no symmetric memory: two ranks see their GPU")
        assert configured == "nccl (as configured)"


def test_all_ranks_sum_as_rank_0_knows() -> None:
    store = memory_store()
    known = MeasuredSums([(16, "nccl"), (32, "one-shot")], 4)

    def on_rank(group: TensorParallel) -> MeasuredSums | None:
        assert isinstance(group, ProcessGroupRanks)
        return of_rank_0(group, store, known if group.rank == 0 else None)

    assert run_ranks(2, on_rank) == [known, known]


def test_what_is_measured_is_what_a_later_group_needs() -> None:
    table = SizeTable([(64, ONE), (256, NCCL)])
    ranks = SymmetricRanks(
        SingleRank(), DoubleBuffer(torch.zeros(64, dtype=torch.uint8)), {}, table
    )
    known = ranks.measured
    assert known == MeasuredSums([(64, "one-shot"), (256, "nccl")], None)
    again = msgspec.json.decode(msgspec.json.encode(known), type=MeasuredSums)
    assert [(size, Method(method)) for size, method in again.methods] == list(table.choices)


def checked(group: TensorParallel, fault: Callable[[Tensor], None]) -> list[torch.dtype]:
    """The types that pass the comparison at start, where `fault` has its way with every sum."""
    assert isinstance(group, ProcessGroupRanks)
    buffers = DoubleBuffer(torch.zeros(1 << 24, dtype=torch.uint8))

    def summed(x: Tensor) -> Tensor:
        out = group.all_reduce(x.clone())
        fault(out)
        return out

    return correct_dtypes(group, buffers, {ONE: summed}, torch.device("cpu"))[0]


def test_a_type_that_the_operation_refuses_is_not_served() -> None:
    def refuse(sum_: Tensor) -> None:
        if sum_.dtype is torch.float16:
            raise RuntimeError("not implemented for 'Half'")

    served = [torch.bfloat16, torch.float32]
    assert run_ranks(2, lambda group: checked(group, refuse)) == [served] * 2


def test_one_wrong_number_on_one_rank_rules_the_method_out_on_all() -> None:
    def on_rank(group: TensorParallel) -> list[torch.dtype]:
        def spoil(sum_: Tensor) -> None:
            if group.rank == 1 and sum_.dtype is torch.bfloat16 and len(sum_) == 4096:
                sum_[3] += 1

        return checked(group, spoil)

    assert run_ranks(2, on_rank) == [[torch.float16, torch.float32]] * 2
