"""EAGLE-3 heads on a GPU: in float32 they change no token, whether steps, entries and guesses are
captured or launched, and guess what heads in plain torch do."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.engine import CudaGraphs
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner import layer_graphs, loading
from modeling.runner.paged import ModelRunner
from modeling.transfer import no_waits
from scheduler import speculation
from sharding.group import TensorParallel
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_eagle3 import MOST, NUM_DRAFTS, Trained
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.test_medusa_cuda import answers
from tests.sharding.cuda_ranks import run_cuda_ranks

pytestmark = pytest.mark.gpu


def trained_heads(folder: Path) -> tuple[Trained, list[Path]]:
    """Heads for a small Llama, trained on what it answers, and two adapters."""
    model = write_llama(folder / "model", "gqa", **{**WIDE, "num_hidden_layers": 6})
    recipes = [AdapterRecipe(r=8, seed=2), AdapterRecipe(r=3, target_modules=("q_proj",))]
    adapters = [write_adapter(folder / f"a{i}", model, r) for i, r in enumerate(recipes)]
    plain, _ = answers(engine_config(model), CudaGraphs.DECODE, adapters, 0)
    return Trained(folder, model, adapters, plain, MOST, False, (1, 2, 2)), adapters


def watched_chains(monkeypatch: pytest.MonkeyPatch) -> list[layer_graphs.ChainGraphs]:
    """A list that each chain of replays joins from now on."""
    chains: list[layer_graphs.ChainGraphs] = []
    run_chain = layer_graphs.ChainGraphs.run

    def watched(self: layer_graphs.ChainGraphs, *given: Any) -> Tensor:
        chains.append(self)
        return run_chain(self, *given)

    monkeypatch.setattr(layer_graphs.ChainGraphs, "run", watched)
    return chains


def test_heads_guess_as_in_plain_torch_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Greedy and sampled, over adapters and without, in chunks."""
    monkeypatch.setattr(loading, "LAUNCHED_ON", ("cpu", "cuda"))
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    chains = watched_chains(monkeypatch)
    trained, adapters = trained_heads(tmp_path)
    for graphs in (CudaGraphs.NONE, CudaGraphs.DECODE):
        made, run = answers(trained.config, graphs, adapters, NUM_DRAFTS)
        captured = graphs is CudaGraphs.DECODE
        assert (run.runner.num_captured > 5) == captured
        assert (len(chains) > 5) == captured
        trained.check(made, run)
    for sampling in (Sampling(), Sampling(temperature=0.7, top_p=0.9, seed=3)):
        guess_without_waiting(run.runner, sampling, 0)


def check_rank(
    trained: Trained, adapters: Sequence[Path], group: TensorParallel, device: torch.device
) -> None:
    """Compare one rank's answers and drafts, launched and captured; in a process of its own."""
    assert group.size > 1
    # Plain torch guesses for one row after the other: with all threads two ranks take minutes.
    torch.set_num_threads(1)
    loading.LAUNCHED_ON, speculation.MARGIN = ("cpu", device.type), 0.0
    for graphs in (CudaGraphs.NONE, CudaGraphs.DECODE):
        made, run = answers(trained.config, graphs, adapters, NUM_DRAFTS, group)
        assert (run.runner.num_captured > 5) == (graphs is CudaGraphs.DECODE)
        trained.check(made, run)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus(tmp_path: Path) -> None:
    """Tokens are those of one GPU without heads, guesses those of plain torch."""
    run_cuda_ranks(2, partial(check_rank, *trained_heads(tmp_path)))


def guesses(runner: ModelRunner, sampling: Sampling, slot: int = -1) -> list[list[list[int]]]:
    """Guesses behind a prompt, a decode step and a draft, of two requests each.

    slot: of the second one's adapter.
    """
    join = RequestJoin(0, [5, 9, 33], 3, -1, sampling)
    joins = [join, RequestJoin(1, [7, 8], 2, slot, sampling)]
    batches = [
        ForwardBatch(joins, [StepRow(0, 0, 3, [3], True), StepRow(1, 0, 2, [4], True)], 4),
        ForwardBatch([], [StepRow(0, 3, 1, [], True), StepRow(1, 2, 1, [], True)], 4),
        ForwardBatch(
            [], [StepRow(0, 4, 3, [], True, drafts=(1, 2)), StepRow(1, 3, 1, [], True)], 4
        ),
    ]
    found = [output.wait().guesses for output in [runner.step(batch) for batch in batches]]
    return [each for each in found if each is not None]


def guess_without_waiting(runner: ModelRunner, sampling: Sampling, slot: int = -1) -> None:
    """Behind a prompt, a decode step and a draft nothing waits for the device, after a first run.

    What the second run gets is what the first one got.
    """
    first = guesses(runner, sampling, slot)
    with no_waits():
        second = guesses(runner, sampling, slot)
    assert first == second
    assert [[len(each) for each in own] for own in first] == [[4, 4]] * 3
