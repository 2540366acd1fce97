"""Drafts on a GPU: in float32 they change no token, whether steps are captured or launched."""

from pathlib import Path

import pytest
import torch

from configs.engine import AttentionKind, CudaGraphs, Device
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from scheduler import drafts
from scheduler.drafts import Drafter
from sharding.group import SingleRank
from tests.checkpoints import write_adapter, write_llama
from tests.modeling.parity import engine_config
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer
from tests.modeling.test_parity_speculation import NUM_TOKENS, REQUESTS, informed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def answers(root: Path, graphs: CudaGraphs, num_drafts: int) -> tuple[list[Answer], int]:
    """What is answered, and how many steps were replayed."""
    config = engine_config(
        root / "model", device=Device.CUDA, attention=AttentionKind.TRITON, cuda_graphs=graphs
    )

    def start() -> ModelRunner:
        return load_paged(config, SingleRank(), pick_device(Device.CUDA)).allocate()

    ranks = Ranks(start, [root / "first", root / "second"], 7, None, num_drafts)
    made = generate_scheduled(ranks, REQUESTS)
    accepted = [len(ranks.ended["r", index].skipped) for index in range(len(REQUESTS))]
    assert min(accepted) >= NUM_TOKENS // 3 if num_drafts else not any(accepted)
    return made, ranks.runner.num_captured


def test_drafts_change_no_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafts, "LEAST_BESIDE", 0.0)
    write_llama(tmp_path / "model", "gqa", **WIDE)
    for name in ("first", "second"):
        write_adapter(tmp_path / name, tmp_path / "model")
    plain, _ = answers(tmp_path, CudaGraphs.ALL, 0)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(REQUESTS, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    for graphs in (CudaGraphs.NONE, CudaGraphs.ALL):
        made, num_captured = answers(tmp_path, graphs, 5)
        assert (num_captured > 0) == (graphs is CudaGraphs.ALL)
        assert [answer.tokens for answer in made] == [answer.tokens for answer in plain]
