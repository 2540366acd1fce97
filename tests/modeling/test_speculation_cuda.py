"""Drafts on a GPU: in float32 they change no token, whether steps are captured or launched."""

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.engine import (
    AttentionKind,
    CudaGraphs,
    Device,
    SpeculationConfig,
    SpeculationKind,
)
from modeling.runner.cuda_graphs import DecodeGraphs, GraphOutput
from modeling.runner.input_batch import StepLayout
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from scheduler.drafts import Drafter
from sharding.group import SingleRank
from tests.checkpoints import write_adapter, write_llama
from tests.modeling.parity import engine_config
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer
from tests.modeling.test_parity_speculation import NUM_TOKENS, REQUESTS, informed

Run = Callable[[DecodeGraphs, StepLayout], GraphOutput | None]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


REPLAYS: Counter[int] = Counter()
"""Of steps with drafts, by the room of their rows."""


def counted(run: Run) -> Run:
    """DecodeGraphs.run that counts."""

    def replay(graphs: DecodeGraphs, layout: StepLayout) -> GraphOutput | None:
        output = run(graphs, layout)
        REPLAYS[graphs.queries] += output is not None and graphs.queries > 1
        return output

    return replay


def answers(root: Path, graphs: CudaGraphs, num_drafts: int) -> tuple[list[Answer], int]:
    """What is answered, and how many steps with drafts were replayed whole."""
    config = engine_config(
        root / "model",
        device=Device.CUDA,
        attention=AttentionKind.TRITON,
        cuda_graphs=graphs,
        speculation=SpeculationConfig(kind=SpeculationKind.PROMPT_LOOKUP, max_tokens=5),
    )

    def start() -> ModelRunner:
        return load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()

    REPLAYS.clear()
    ranks = Ranks(start, [root / "first", root / "second"], 7, None, num_drafts)
    made = generate_scheduled(ranks, REQUESTS)
    accepted = [len(ranks.ended["r", index].skipped) for index in range(len(REQUESTS))]
    assert min(accepted) >= NUM_TOKENS // 3 if num_drafts else not any(accepted)
    return made, REPLAYS.total()


def test_drafts_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(DecodeGraphs, "run", counted(DecodeGraphs.run))
    write_llama(tmp_path / "model", "gqa", **WIDE)
    for name in ("first", "second"):
        write_adapter(tmp_path / name, tmp_path / "model")
    plain, _ = answers(tmp_path, CudaGraphs.ALL, 0)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    for graphs in (CudaGraphs.NONE, CudaGraphs.ALL):
        made, num_replays = answers(tmp_path, graphs, 5)
        assert (num_replays > 5) == (graphs is CudaGraphs.ALL), REPLAYS
        assert [answer.tokens for answer in made] == [answer.tokens for answer in plain]
