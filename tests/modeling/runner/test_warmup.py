"""Rehearsed steps are steps: a state takes them, within its places and its one spare page."""

import pytest
import torch

from configs.engine import SpeculationConfig, SpeculationKind
from modeling.runner.block_tables import BatchSize
from modeling.runner.input_batch import InputBatch
from modeling.runner.warmup import warmup_batches, widest_step

SIZES = [(BatchSize(16, 256, 16), 256), (BatchSize(1, 40, 8), 64), (BatchSize(2, 2, 1), 2)]
SIZES += [(BatchSize(256, 4096, 16), 8192), (BatchSize(3, 1000, 16), 5)]


@pytest.mark.parametrize(("size", "most"), SIZES)
def test_rehearsals_are_steps(size: BatchSize, most: int) -> None:
    state = InputBatch(size, torch.device("cpu"))
    tokens = set()
    for batch in warmup_batches(size, most, 7, [-1, 0]):
        state.join(batch.joins)
        layout = state.layout(batch.rows)
        assert len(layout.positions) <= most
        assert set(layout.groups[0].slots // size.block_size) == {7}
        assert len(layout.targets) == layout.num_rows
        tokens.add(len(layout.positions))
    assert max(tokens) > min(most, size.max_running * (size.max_total_tokens - 1)) / 2


@pytest.mark.parametrize(("size", "most"), SIZES)
def test_the_widest_step_fills_the_budget(size: BatchSize, most: int) -> None:
    state = InputBatch(size, torch.device("cpu"))
    speculation = SpeculationConfig(kind=SpeculationKind.PROMPT_LOOKUP, max_running=2)
    plain = widest_step(size, most, SpeculationConfig())
    assert not any(row.drafts for row in plain.rows)
    batch = widest_step(size, most, speculation)
    room = min(most // size.max_running, size.max_total_tokens) - 1
    drafts = min(size.max_running, 2) * min(room, speculation.max_tokens)
    state.join(batch.joins)
    layout = state.layout(batch.rows)
    assert layout.num_rows == size.max_running
    assert len(layout.targets) == size.max_running + drafts
    assert len(layout.positions) <= most
    blocks = [block for row in batch.rows for block in row.blocks]
    assert len(set(blocks)) == len(blocks) == max(blocks) + 1
