"""Prompt logprobs and embeddings of the padded runner are those of transformers and PEFT."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from configs.wire.plan import RequestJoin
from configs.wire.sampling import Pooling, Sampling
from modeling.models.causal_lm import CausalLM
from modeling.models.padded import prompts
from modeling.models.padded.prompts import WHOLE, CausalLMPrompts
from tests.checkpoints import oracle_logits
from tests.modeling.models.foreign_models import ForeignModel, foreign
from tests.modeling.models.sweep_truth import load
from tests.modeling.models.tiny_causal import ORIGINAL, write_tiny
from tests.modeling.padded import PaddedWorld, generate_padded, padded_runner
from tests.modeling.prompts import Prompts, check_answers, prompt_of, questions
from tests.modeling.stepping import Asked

VOCAB = 96
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions a slice."""
    monkeypatch.setattr(prompts, "SLICE_BYTES", 4 * 4 * VOCAB)


@pytest.mark.parametrize("rejoins_at", [None, 2])
@pytest.mark.parametrize("kind", ["bloom", "gemma2", "gptj", "gpt2"])
def test_as_transformers_and_peft(padded: PaddedWorld, kind: str, rejoins_at: int | None) -> None:
    model, adapter = padded.model(kind), padded.adapter(kind, "r8")
    told: Prompts = [(None, prompt_of(9, VOCAB)), (adapter, prompt_of(13, VOCAB))]
    asked = questions(told, 5, rejoins_at)
    runner = padded_runner(model, [adapter])
    assert runner._prompts.slice_length == 4
    check_answers(model, told, asked, generate_padded(runner, asked))


@pytest.mark.parametrize("kind", ["olmo2", "phi3"])
def test_a_slice_is_computed_with_the_whole_prompts_frequencies(tmp_path: Path, kind: str) -> None:
    """Longrope chooses by the largest position, which lies in another slice."""
    model = write_tiny(tmp_path, kind, "longrope")
    prompts = [prompt_of(length, VOCAB) for length in (7, ORIGINAL, ORIGINAL + 1, 30)]
    sampling = Sampling(prompt_logprobs=0)
    asked = [Asked(prompt, 2, sampling=sampling, joins_at=i) for i, prompt in enumerate(prompts)]
    runner = padded_runner(model)
    assert runner._prompts.slice_length == 4
    for prompt, answer in zip(prompts, generate_padded(runner, asked), strict=True):
        logprobs = oracle_logits(load(model), prompt).log_softmax(-1)
        found = {part.first + i: each.logprob for part in answer.prompts
                 for i, each in enumerate(part.logprobs)}  # fmt: skip
        assert found == {
            at: pytest.approx(float(logprobs[at - 1, prompt[at]]), abs=1e-4)
            for at in range(1, len(prompt))
        }


def test_code_that_cannot_go_on_is_asked_for_whole_prompts() -> None:
    class OneByOne(ForeignModel):
        """Takes one token at a time behind a cache."""

        def forward(self, input_ids: Tensor, *args: Any, **options: Any) -> Any:
            past = options.get("past_key_values")
            if past is not None and input_ids.shape[1] > 1:
                raise ValueError("one token at a time, please")
            return super().forward(input_ids, *args, **options)

    able = CausalLMPrompts(CausalLM(foreign(ForeignModel()), 0, CPU), VOCAB)
    unable = CausalLMPrompts(CausalLM(foreign(OneByOne()), 0, CPU), VOCAB)
    assert (able.slice_length, unable.slice_length) == (4, WHOLE)
    scored = Sampling(prompt_logprobs=1)
    asked = [(0, RequestJoin(0, [5, 9, 3, 7, 2, 8, 1], 7, -1, scored))]
    parts = [each.score(asked, lambda slot: None) for each in (able, unable)]
    for one, other in zip(parts[0].tensors, parts[1].tensors, strict=True):
        torch.testing.assert_close(one, other)


def test_code_that_shows_no_states_gives_no_embedding() -> None:
    prompts = CausalLMPrompts(CausalLM(foreign(ForeignModel()), 0, CPU), VOCAB)
    pooled = Sampling(pooling=Pooling.MEAN)
    told = prompts.score([(3, RequestJoin(0, [5, 9], 2, -1, pooled))], lambda slot: None)
    (answer,) = told.reports(told.tensors)
    assert (answer.row, answer.logprobs, answer.embedding) == (3, [], b"")
