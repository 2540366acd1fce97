"""Drafts on a GPU: in float32 they change no token, whether steps are captured or launched."""

from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from configs.engine import (
    AttentionKind,
    CudaGraphs,
    Device,
    SpeculationConfig,
    SpeculationKind,
)
from modeling.runner.cuda_graphs import DecodeGraphs, GraphOutput
from modeling.runner.load_paged import load_paged
from modeling.runner.loading import pick_device
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from scheduler.drafts import Drafter
from sharding.group import SingleRank
from tests.checkpoints import write_adapter, write_llama
from tests.fakes import EOS, token_id, write_tokenizer
from tests.modeling import constrained
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_speculation import REQUESTS, informed
from tests.modeling.runner.test_graphs_cuda import WIDE
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Answer, Asked

Run = Callable[..., GraphOutput | None]

pytestmark = pytest.mark.gpu


REPLAYS: Counter[int] = Counter()
"""Of steps with drafts, by the room of their rows."""


def counted(run: Run) -> Run:
    """DecodeGraphs.run that counts."""

    def replay(graphs: DecodeGraphs, *given: Any) -> GraphOutput | None:
        output = run(graphs, *given)
        REPLAYS[graphs.queries] += output is not None and graphs.queries > 1
        return output

    return replay


CONSTRAINED = constrained.REQUESTS[:-1]
"""Those that come to their length."""


def answers(
    root: Path, graphs: CudaGraphs, num_drafts: int, requests: Sequence[Asked] = REQUESTS
) -> tuple[list[Answer], int]:
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
    made = generate_scheduled(ranks, requests)
    accepted = [len(ranks.ended["r", index].skipped) for index in range(len(requests))]
    assert min(accepted) >= requests[0].num_tokens // 3 if num_drafts else not any(accepted)
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


def test_drafts_change_no_token_of_a_constrained_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("llguidance")
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(DecodeGraphs, "run", counted(DecodeGraphs.run))
    folder = tmp_path / "model"
    folder.mkdir()
    eos = token_id(write_tokenizer(folder), EOS)
    write_llama(folder, "gqa", **WIDE, vocab_size=336, eos_token_id=eos)
    for name in ("first", "second"):
        write_adapter(tmp_path / name, folder)
    plain, _ = answers(tmp_path, CudaGraphs.DECODE, 0, CONSTRAINED)
    texts = [[*r.prompt, *a.tokens] for r, a in zip(CONSTRAINED, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    for graphs in (CudaGraphs.NONE, CudaGraphs.DECODE):
        made, num_replays = answers(tmp_path, graphs, 5, CONSTRAINED)
        assert (num_replays > 5) == (graphs is CudaGraphs.DECODE), REPLAYS
        assert [answer.tokens for answer in made] == [answer.tokens for answer in plain]
