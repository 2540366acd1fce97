"""Medusa heads on a GPU: in float32 they change no token, whether steps are captured or launched,
and guess what heads in plain torch do."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from configs.engine import AttentionKind, CudaGraphs, Device, EngineConfig
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from scheduler import speculation
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_medusa import (
    NUM_HEADS,
    WatchedRanks,
    check_guesses,
    with_heads,
    write_trained,
)
from tests.modeling.parity.test_speculation import REQUESTS
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.scheduled import generate_scheduled
from tests.modeling.stepping import Answer

pytestmark = pytest.mark.gpu


def answers(
    config: EngineConfig,
    graphs: CudaGraphs,
    adapters: Sequence[Path],
    num_drafts: int,
    group: TensorParallel | None = None,
) -> tuple[list[Answer], WatchedRanks]:
    """What all requests get, and the rank that it was generated on; group: None is one GPU."""
    ranks = group or SingleRank()
    changes = {"device": Device.CUDA, "attention": AttentionKind.TRITON, "cuda_graphs": graphs}
    own = config.model_copy(update=changes)
    run = WatchedRanks(
        lambda: load_paged(own, ranks, pick_device(own.device)).allocate(),
        adapters,
        7,
        group,
        num_drafts,
    )
    return generate_scheduled(run, REQUESTS), run


@pytest.mark.parametrize(
    ("own", "layers", "brings"),
    [(True, 1, True), (True, 2, False), (False, 1, True), (False, 1, False)],
)
def test_heads_guess_as_in_plain_torch_and_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool, layers: int, brings: bool
) -> None:
    """Greedy and sampled, over adapters and without, in chunks.

    own: of version 1. brings: an adapter has heads of its own.
    """
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    model = write_llama(tmp_path / "model", "gqa", **WIDE)
    recipes = [AdapterRecipe(r=8, seed=2), AdapterRecipe(r=3, target_modules=("q_proj",))]
    adapters = [write_adapter(tmp_path / f"a{i}", model, r) for i, r in enumerate(recipes)]
    plain, _ = answers(engine_config(model), CudaGraphs.DECODE, adapters, 0)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
    heads, wanted = write_trained(model, adapters, texts, tmp_path / "heads", own, layers, brings)
    config = with_heads(model, heads, int(brings))
    for graphs in (CudaGraphs.NONE, CudaGraphs.DECODE):
        made, run = answers(config, graphs, adapters, NUM_HEADS)
        assert (run.runner.num_captured > 5) == (graphs is CudaGraphs.DECODE)
        check_guesses(made, plain, run, wanted)
