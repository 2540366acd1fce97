from typing import Any

import pytest
import torch

from configs.architectures.rope import POSITIONS_PER_SET
from configs.rope_sets import LONG, SHORT
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.runner.block_tables import BatchSize
from modeling.runner.input_batch import InputBatch, StepInputs

SIZE = BatchSize(max_running=4, max_total_tokens=40, block_size=8)


def make_state(*joins: RequestJoin) -> InputBatch:
    state = InputBatch(SIZE, torch.device("cpu"))
    state.join(joins)
    return state


def step(state: InputBatch, rows: list[StepRow]) -> StepInputs:
    return state.inputs(state.layout(rows))


def join(place: int, num_tokens: int, **fields: Any) -> RequestJoin:
    tokens = [100 * (place + 1) + i for i in range(num_tokens)]
    return RequestJoin(
        place, tokens, num_tokens, fields.get("slot", -1), fields.get("sampling", Sampling())
    )


def test_a_step_is_built_from_its_rows() -> None:
    warm = Sampling(temperature=1.0, seed=4)
    state = make_state(join(2, 11, slot=3, sampling=warm), join(0, 5))
    inputs = step(state, [StepRow(2, 0, 10, [7, 1], False), StepRow(0, 0, 5, [4], True)])
    assert inputs.input_ids.tolist() == [*range(300, 310), *range(100, 105)]
    assert inputs.positions.tolist() == [*range(10), *range(5)]
    assert inputs.groups[0].slots.tolist() == [*range(56, 64), 8, 9, *range(32, 37)]
    assert inputs.groups[0].cu_seqlens.tolist() == [0, 10, 15]
    assert inputs.groups[0].block_tables.tolist() == [[7, 1], [4, 0]]
    assert inputs.layout.adapter_lengths == [10, 5]
    assert inputs.group_lengths[0][1] == [10, 5]
    assert inputs.last_tokens.tolist() == [14]
    assert inputs.layout.sample_positions == [5]
    assert inputs.layout.adapter_slots == [3, -1]
    # The sample of place 0 is found by the next step, which also finishes the other's chunk.
    state.write(inputs.targets, torch.tensor([77]))
    inputs = step(state, [StepRow(0, 5, 1, [], True), StepRow(2, 10, 1, [], True)])
    assert inputs.input_ids.tolist() == [77, 310]
    assert inputs.groups[0].slots.tolist() == [37, 10]
    assert inputs.group_lengths[0][1] == [6, 11]
    assert inputs.last_tokens.tolist() == [0, 1]
    assert inputs.layout.sampling == [Sampling(), warm]
    assert inputs.groups[0].block_tables.dtype == inputs.groups[0].cu_seqlens.dtype == torch.int32


def test_positions_bear_the_rope_set_of_their_row_and_slots_do_not() -> None:
    state = make_state(join(0, 6), join(1, 3), join(2, 4))
    rows = [
        StepRow(0, 0, 5, [0], False, LONG),
        StepRow(1, 0, 2, [1], False, SHORT),
        StepRow(2, 0, 1, [2], False, LONG),
    ]
    inputs = step(state, rows)
    far = POSITIONS_PER_SET
    assert inputs.positions.tolist() == [far, *range(far, far + 5), 0, 1]
    assert inputs.groups[0].slots.tolist() == [16, *range(5), 8, 9]
    assert inputs.group_lengths[0][1] == [1, 5, 2]


def test_rows_of_one_token_come_first_and_samples_keep_the_plans_order() -> None:
    warm = Sampling(temperature=1.0, seed=4)
    state = make_state(join(0, 6), join(1, 4, slot=5), join(2, 8, sampling=warm), join(3, 3))
    state.layout([StepRow(1, 0, 3, [1], False), StepRow(3, 0, 2, [3], False)])
    rows = [
        StepRow(2, 0, 8, [2], True),
        StepRow(1, 3, 1, [], True),
        StepRow(0, 0, 5, [0], False),
        StepRow(3, 2, 1, [], True),
    ]
    layout = state.layout(rows)
    assert layout.most_queries == 0
    inputs = state.inputs(layout)
    assert inputs.layout.adapter_lengths == [1, 1, 8, 5]
    assert inputs.group_lengths[0][1] == [4, 3, 8, 5]
    assert inputs.input_ids.tolist() == [203, 402, *range(300, 308), *range(100, 105)]
    assert inputs.groups[0].slots.tolist() == [11, 26, *range(16, 24), *range(5)]
    assert inputs.groups[0].block_tables.tolist() == [[1], [3], [2], [0]]
    assert inputs.layout.adapter_slots == [5, -1, -1, -1]
    # The samples of places 2, 1 and 3, as the plan names them.
    assert inputs.last_tokens.tolist() == [9, 0, 1]
    assert inputs.layout.sample_positions == [8, 4, 3]
    assert inputs.layout.sampling == [warm, Sampling(), Sampling()]
    state.write(inputs.targets, torch.tensor([70, 71, 72]))
    rows = [StepRow(1, 4, 1, [], True), StepRow(2, 8, 1, [4], True), StepRow(3, 3, 1, [], True)]
    layout = state.layout(rows)
    assert layout.most_queries == 1
    assert state.inputs(layout).input_ids.tolist() == [71, 70, 72]


def test_a_step_in_which_a_row_does_not_sample_is_no_decode_step() -> None:
    state = make_state(join(0, 6), join(1, 4))
    rows = [StepRow(0, 0, 1, [0], False), StepRow(1, 0, 1, [1], True)]
    assert state.layout(rows).most_queries == 0


def test_blocks_come_as_they_are_needed() -> None:
    state = make_state(join(1, 8))
    step(state, [StepRow(1, 0, 8, [3], True)])
    inputs = step(state, [StepRow(1, 8, 1, [0], True)])
    assert inputs.groups[0].slots.tolist() == [0]
    assert inputs.groups[0].block_tables.tolist() == [[3, 0]]


def test_a_cached_prefix_starts_in_the_middle() -> None:
    state = make_state(join(1, 20))
    inputs = step(state, [StepRow(1, 16, 4, [3, 5, 6], True)])
    assert inputs.input_ids.tolist() == [216, 217, 218, 219]
    assert inputs.groups[0].slots.tolist() == [48, 49, 50, 51]
    assert inputs.group_lengths[0][1] == [20]


def test_who_joins_anew_starts_with_an_empty_table() -> None:
    state = make_state(join(1, 8, slot=2))
    step(state, [StepRow(1, 0, 8, [3], True)])
    state.join([join(1, 3)])
    inputs = step(state, [StepRow(1, 0, 3, [6], True)])
    assert inputs.groups[0].slots.tolist() == [48, 49, 50]
    assert inputs.layout.adapter_slots == [-1]


def test_the_longest_sequence_fits_exactly() -> None:
    state = make_state(join(3, 40))
    inputs = step(state, [StepRow(3, 0, 40, [0, 1, 2, 3, 4], True)])
    state.write(inputs.targets, torch.tensor([9]))
    assert inputs.layout.sample_positions == [40]


@pytest.mark.parametrize(
    "rows",
    [
        [StepRow(0, 0, 9, [1], True)],
        [StepRow(0, 0, 0, [1], True)],
        [StepRow(0, -1, 2, [1], True)],
        [StepRow(0, 39, 2, [0, 1, 2, 3, 4], True)],
        [StepRow(0, 0, 1, [0, 1, 2, 3, 4, 5], True)],
        [StepRow(0, 0, 1, [0], True), StepRow(0, 1, 1, [], True)],
    ],
    ids=["beyond its blocks", "nothing", "before 0", "too long", "too many blocks", "twice"],
)
def test_rows_that_cannot_be_are_stopped(rows: list[StepRow]) -> None:
    with pytest.raises(AssertionError):
        make_state(join(0, 9)).layout(rows)


@pytest.mark.parametrize("bad", [join(4, 3), join(0, 41), join(0, 0)])
def test_joins_that_cannot_be_are_stopped(bad: RequestJoin) -> None:
    with pytest.raises(AssertionError):
        make_state(bad)
