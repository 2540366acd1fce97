"""Captured mixed steps as CUDA graphs: what they leave is what launches leave."""

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from configs.engine import AttentionKind, CudaGraphs
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.runner.forward import prepare
from modeling.runner.paged import ModelRunner
from modeling.runner.piecewise import PiecewiseGraphs
from modeling.transfer import no_waits
from tests.checkpoints import write_adapter, write_llama
from tests.checkpoints_generic import write_generic
from tests.modeling.parity.comparison import FAMILIES, place_all
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, NUM_BLOCKS, requests
from tests.modeling.runner.test_graphs_cuda import (
    ENDS,
    KINDS,
    OPEN,
    WIDE,
    make_runner,
    write_kinds,
)
from tests.modeling.stepping import BlockPile, generate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore::UserWarning"),  # PEFT's, of biases
]


@pytest.fixture(scope="module", params=["flashinfer", "sdpa"])
def backend(request: pytest.FixtureRequest) -> str:
    """An attention that is launched between the segments."""
    if request.param == "flashinfer":
        pytest.importorskip("flashinfer")
    return str(request.param)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory, backend: str) -> ModelRunner:
    """One whose mixed steps are captured, with an adapter of each kind."""
    root = tmp_path_factory.mktemp("segments")
    write_llama(root / "model", "gqa", **WIDE)
    write_kinds(root)
    made = make_runner(root / "model", attention=backend, cuda_graphs=CudaGraphs.ALL)
    place_all(made, [root / name for name in KINDS])
    return made


def hidden_states(runner: ModelRunner, lengths: list[int], slots: list[int]) -> tuple[Any, Any]:
    """What a replay and what launches leave of one step: rows of these lengths and adapters.

    Each adapter is active from a third of its row on.
    """
    segments = runner._piecewise_graphs
    assert isinstance(segments, PiecewiseGraphs)
    joins = [
        RequestJoin(
            place,
            [(5 * i + place) % 60 + 3 for i in range(length)],
            length,
            slot,
            Sampling(),
            active_from=length // 3,
        )
        for place, (length, slot) in enumerate(zip(lengths, slots, strict=True))
    ]
    runner._input_batch.join(joins)
    pile = BlockPile(NUM_BLOCKS, BLOCK_SIZE, runner.report.kv_groups)
    rows = [
        StepRow(place, 0, length, pile.reach(place, length), True)
        for place, length in enumerate(lengths)
    ]
    layout = runner._input_batch.layout(rows)
    inputs = runner._input_batch.inputs(layout)
    found = []
    with torch.inference_mode():
        for replayed in (True, False):
            step = prepare(runner._backends, inputs)
            if replayed:
                hidden = segments.run(inputs, step, partial(runner._tail_step, layout))
            else:
                adapters = runner._step_adapters(layout)
                hidden = runner._forward.hidden(inputs, step, adapters)[inputs.tokens_read]
            assert hidden is not None
            found.append(hidden.float().clone())
    return found[0], found[1]


@pytest.mark.parametrize(
    ("lengths", "slots"),
    [
        ([64], [-1]),
        ([64], [0]),
        ([1, 1, 40], [0, -1, 0]),
        ([130], [0]),
        ([1, 7, 90], [-1, 0, -1]),
        ([64], [1]),
        ([1, 9, 1, 80], [2, 1, -1, 0]),
    ],
)
def test_hidden_states_of_replays_are_those_of_launches(
    runner: ModelRunner, lengths: list[int], slots: list[int]
) -> None:
    replayed, launched = hidden_states(runner, lengths, slots)
    error = (replayed - launched).norm() / launched.norm()
    # Products of other numbers of rows round otherwise in bfloat16.
    assert error < 3e-2, float(error)


@pytest.mark.parametrize("slots", [(-1,), (-1, 0, 1, 2)])
def test_every_step_is_captured(runner: ModelRunner, backend: str, slots: tuple[int, ...]) -> None:
    """And none waits for the device, once it is warm; SDPA's masks of mixed steps do."""
    generate(runner, requests(slots), NUM_BLOCKS, BLOCK_SIZE)
    runner.num_steps = runner.num_captured = 0
    with no_waits() if backend == "flashinfer" else nullcontext():
        generate(runner, requests(slots), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_steps == runner.num_captured > 20


def test_replays_embed_as_adapters_do(tmp_path: Path) -> None:
    write_llama(tmp_path / "model", "gqa", **WIDE)
    write_kinds(tmp_path)
    fields = {"adapters": OPEN, "cuda_graphs": CudaGraphs.ALL, "attention": "sdpa"}
    runner = make_runner(tmp_path / "model", **fields)
    place_all(runner, [tmp_path / name for name in ENDS])
    for lengths, slots in (([64], [0]), ([1, 9, 1, 80], [0, 1, -1, 2])):
        replayed, launched = hidden_states(runner, lengths, slots)
        error = (replayed - launched).norm() / launched.norm()
        # These adapters are strong: bfloat16 alone moves their states by 5 % from float32's.
        assert error < 8e-2, float(error)
    generate(runner, requests([-1, 0, 1, 2]), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_steps == runner.num_captured > 20


def test_replays_of_layers_that_share_keys_are_launches(tmp_path: Path) -> None:
    """The last layers compute what is read; their attention is launched for these tokens."""
    write_generic(tmp_path / "model", "gemma4_text")
    names = list(FAMILIES["generic"].adapters)[:2]
    for name in names:
        write_adapter(tmp_path / name, tmp_path / "model", FAMILIES["generic"].adapters[name])
    fields = {"attention": AttentionKind.AUTO, "cuda_graphs": CudaGraphs.ALL}
    runner = make_runner(tmp_path / "model", **fields)
    place_all(runner, [tmp_path / name for name in names])
    assert runner._forward.split is not None
    for lengths, slots in (([64], [-1]), ([1, 1, 40], [0, -1, 1]), ([9, 1, 1, 80], [0, 1, -1, 0])):
        replayed, launched = hidden_states(runner, lengths, slots)
        assert len(replayed) == len(lengths)
        error = (replayed - launched).norm() / launched.norm()
        assert error < 5e-2, (lengths, float(error))
    generate(runner, requests([-1, 0, 1]), NUM_BLOCKS, BLOCK_SIZE)
    runner.num_steps = runner.num_captured = 0
    generate(runner, requests([-1, 0, 1]), NUM_BLOCKS, BLOCK_SIZE)
    assert runner.num_steps == runner.num_captured > 20
