"""Constrained answers with drafts are those without, token by token."""

from functools import partial
from pathlib import Path

import pytest
import torch

from configs import grammars
from configs.wire.sampling import FinishReason, Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from scheduler import speculation
from scheduler.drafts import Drafter
from scheduler.events import ConstraintFailure, Ended
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import write_adapter, write_llama
from tests.fakes import EOS, token_id, write_tokenizer
from tests.modeling.constrained import NUM_TOKENS, PROMPTS, REQUESTS, SCHEMA
from tests.modeling.parity.comparison import engine_config
from tests.modeling.parity.test_speculation import informed
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.scheduled import Ranks, generate_scheduled
from tests.modeling.stepping import Asked
from tests.ranks import run_ranks

pytest.importorskip("llguidance")


class Setup:
    """A model with a tokenizer that spells JSON, and two adapters over it."""

    def __init__(self, root: Path) -> None:
        root.mkdir(exist_ok=True)
        eos = token_id(write_tokenizer(root), EOS)
        self.config = engine_config(write_llama(root, vocab_size=336, eos_token_id=eos))
        self.adapters = [write_adapter(root / name, root) for name in ("first", "second")]

    def answers(
        self,
        requests: list[Asked],
        drafts: int,
        group: TensorParallel,
        lost_at: int | None = None,
        captured: bool = False,
    ) -> list[Ended]:
        def start() -> ModelRunner:
            runner = load_paged(self.config, group, torch.device("cpu")).allocate()
            if captured:
                runner._decode_graphs, *checked = [
                    capture_on_cpu(runner, queries=queries) for queries in (1, 4, 6)
                ]
                runner._checked_graphs = tuple(checked)
            return runner

        ranks = Ranks(start, self.adapters, 7, group, drafts)
        generate_scheduled(ranks, requests, lost_at)
        assert (ranks.runner.num_captured > 5) == captured
        return [ranks.ended["r", index] for index in range(len(requests))]


@pytest.mark.parametrize(
    ("ranks", "lost_at", "sure", "captured"),
    [(1, 12, speculation.SURE, True), (2, None, 0.0, False)],
)
def test_drafts_change_no_token_of_a_constrained_answer(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    ranks: int,
    lost_at: int | None,
    sure: float,
    captured: bool,
) -> None:
    """Greedy, drawn and penalised, over adapters and without, behind a free part, to its end.

    lost_at, sure, captured: as in parity/test_speculation.py. One matcher meets its limits: with
    drafts at the same token as without.
    """
    monkeypatch.setattr(speculation, "SURE", sure)
    monkeypatch.setattr(speculation, "MARGIN", 0.0)
    monkeypatch.setattr(grammars, "GRAMMAR_ROW_ITEMS", 40)
    setup = Setup(tmp_path / "model")
    alone = SingleRank()
    [free] = setup.answers([Asked(PROMPTS[0], NUM_TOKENS)], 0, alone)
    thinks = Sampling(json_schema=SCHEMA, free_until=(free.tokens[6],))
    requests = [*REQUESTS, Asked(PROMPTS[0], NUM_TOKENS, sampling=thinks)]
    plain = setup.answers(requests, 0, alone)
    assert isinstance(plain[7].ending, ConstraintFailure)
    assert 3 < len(plain[7].tokens) < NUM_TOKENS
    texts = [[*asked.prompt, *own.tokens] for asked, own in zip(requests, plain, strict=True)]
    monkeypatch.setattr(Drafter, "find", informed(texts))
    work = partial(setup.answers, requests, 5, lost_at=lost_at, captured=captured)
    for made in run_ranks(ranks, work):
        assert [each.tokens for each in made] == [each.tokens for each in plain]
        assert [each.ending for each in made] == [each.ending for each in plain]
        whole = [each for each in made if each.ending is FinishReason.LENGTH]
        assert len(whole) == len(requests) - 1
        assert min(len(each.skipped) for each in whole) >= NUM_TOKENS // 3
