"""What attention reads of a group that forgets: rows that begin where it still needs a block."""

from typing import Any

import pytest
import torch

from configs.kv_groups import KvGroup
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.runner.block_tables import BatchSize
from modeling.runner.input_batch import InputBatch, StepInputs

GONE = -1


def state(*groups: KvGroup, strides: tuple[int, ...] = (1, 1)) -> InputBatch:
    size = BatchSize(4, 64, 4, groups, strides[: len(groups)])
    made = InputBatch(size, torch.device("cpu"))
    made.join([RequestJoin(slot, [5] * 40, 40, -1, Sampling()) for slot in range(4)])
    return made


def read(inputs: StepInputs, group: int) -> dict[str, Any]:
    own, (queries, keys) = inputs.groups[group], inputs.group_lengths[group]
    return {"tables": own.block_tables.tolist(), "queries": queries, "keys": keys}


def step(batch: InputBatch, *rows: StepRow) -> StepInputs:
    return batch.inputs(batch.layout(rows))


def test_each_group_gets_its_own_blocks_of_a_row() -> None:
    batch = state(KvGroup(4), KvGroup(8))
    inputs = step(batch, StepRow(0, 0, 9, [1, 2, 3, 4, 5], False))
    assert read(inputs, 0) == {"tables": [[1, 2, 3]], "queries": [9], "keys": [9]}
    assert read(inputs, 1) == {"tables": [[4, 5]], "queries": [9], "keys": [9]}
    inputs = step(batch, StepRow(0, 9, 8, [6, 7, 8], False))
    assert inputs.groups[0].block_tables.tolist() == [[1, 2, 3, 6, 7]]
    assert inputs.groups[1].block_tables.tolist() == [[4, 5, 8]]
    assert inputs.groups[1].slots.tolist() == [*range(41, 48), 64]


def test_a_windows_rows_begin_at_the_first_block_that_is_needed() -> None:
    batch = state(KvGroup(4, window=6))
    inputs = step(batch, StepRow(1, 20, 1, [GONE, GONE, GONE, 7, 8, 9], True),
                  StepRow(2, 0, 3, [1], False))  # fmt: skip
    # Position 20 sees 15 to 20: the last one of block 3, then blocks 4 and 5.
    assert read(inputs, 0) == {"tables": [[7, 8, 9], [1, 0, 0]], "queries": [1, 3], "keys": [9, 3]}
    inputs = step(batch, StepRow(1, 21, 1, [], True))
    assert read(inputs, 0) == {"tables": [[8, 9]], "queries": [1], "keys": [6]}


def test_a_row_across_chunks_is_as_many_rows() -> None:
    batch = state(KvGroup(4, chunk=8))
    inputs = step(
        batch, StepRow(3, 6, 13, [1, 2, 3, 4, 5], True), StepRow(0, 15, 1, [0, 9, 6, 7], True)
    )
    assert read(inputs, 0) == {
        "tables": [[6, 7], [1, 2], [3, 4], [5, 0]],
        "queries": [1, 2, 8, 3],
        "keys": [8, 8, 8, 3],
    }
    assert inputs.groups[0].cu_seqlens.tolist() == [0, 1, 3, 11, 14]
    assert inputs.layout.adapter_lengths == [1, 13]


def test_pages_of_shared_memory_are_strides_apart() -> None:
    batch = state(KvGroup(4), KvGroup(4, window=6), strides=(3, 5))
    inputs = step(batch, StepRow(0, 0, 5, [1, 2, 3, 4], False))
    assert inputs.groups[0].block_tables.tolist() == [[3, 6]]
    assert inputs.groups[1].block_tables.tolist() == [[15, 20]]
    assert inputs.groups[1].slots.tolist() == [60, 61, 62, 63, 80]
    assert batch.tables[1].dummy_slot(9) == 9 * 5 * 4


@pytest.mark.parametrize("group", [KvGroup(4, window=6), KvGroup(4, chunk=8), KvGroup(4)])
def test_no_row_has_more_pages_than_a_captured_step_has_room_for(group: KvGroup) -> None:
    batch = state(group)
    for position in range(40):
        blocks = [position // 4 + 1] if position % 4 == 0 else []
        layout = batch.layout([StepRow(0, position, 1, blocks, True)])
        assert layout.groups[0].tables.shape[1] <= batch.tables[0].max_pages
