"""Padded models: transformers + PEFT alone and the runner give the same tokens and logits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from configs.sampling import Sampling
from tests.checkpoints import oracle_greedy
from tests.modeling.padded import RECIPES, PaddedWorld, generate_padded, padded_runner
from tests.modeling.parity import full_logprobs
from tests.modeling.stepping import Asked
from tests.oracle import NUM_TOKENS, TOLERANCE, prompt_truth

MIXED = [None, "r4", "r16", "rows", "columns", "last_layer"]
"""The base model and adapters of different ranks and targets."""

FALCON_ALIBI = "falcon_alibi"


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


@pytest.mark.parametrize("kind", sorted(RECIPES.keys() - {FALCON_ALIBI}))
def test_together(padded: PaddedWorld, kind: str) -> None:
    """One batch of unequal lengths: rows join at different steps and leave at different steps."""
    model = padded.model(kind)
    folders = [None if name is None else padded.adapter(kind, name) for name in MIXED]
    adapters = [folder for folder in folders if folder is not None]
    told = [prompt_truth(model, folder, 3 + 5 * i) for i, folder in enumerate(folders)]
    requests = [
        Asked(
            prompt=prompt,
            num_tokens=NUM_TOKENS - 3 * (i % 3),
            slot=-1 if folder is None else adapters.index(folder),
            sampling=Sampling(logprobs=truth.logits.shape[1]),
            joins_at=3 * i,
        )
        for i, (folder, (prompt, truth)) in enumerate(zip(folders, told, strict=True))
    ]
    answers = generate_padded(padded_runner(model, adapters), requests)
    for name, answer, (_, truth) in zip(MIXED, answers, told, strict=True):
        count = len(answer.tokens)
        assert answer.tokens == truth.tokens[:count], name
        error = float((full_logprobs(answer) - truth.logprobs[:count]).abs().max())
        assert error <= TOLERANCE, (name, error)


@pytest.mark.parametrize("kind", ["bloom", "gptj"])
def test_alone_and_in_chunks(padded: PaddedWorld, kind: str) -> None:
    """A scheduler that cuts prompts all the same gets the same tokens."""
    model = padded.model(kind)
    folder: Path = padded.adapter(kind, "r8")
    prompt, truth = prompt_truth(model, folder, 21)
    runner = padded_runner(model, [folder])
    asked = [Asked(prompt, NUM_TOKENS, slot=0, chunk=chunk) for chunk in (4, 10**6)]
    assert [a.tokens for a in generate_padded(runner, asked)] == [truth.tokens] * 2
    (alone,) = generate_padded(runner, asked[:1])
    assert alone.tokens == truth.tokens


def test_alibi_in_the_attention_that_is_served(padded: PaddedWorld) -> None:
    """The oracle's eager Falcon (transformers 5.23) adds ALiBi twice; what is served does not."""
    model, folder = padded.model(FALCON_ALIBI), padded.adapter(FALCON_ALIBI, "r8")
    served: Any = transformers.AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    adapted: Any = PeftModel.from_pretrained(served, str(folder)).eval()
    prompts = [list(range(5, 5 + length)) for length in (4, 13, 22)]
    told = [oracle_greedy(adapted, prompt, NUM_TOKENS) for prompt in prompts]
    with adapted.disable_adapter():
        told.append(oracle_greedy(adapted, prompts[1], NUM_TOKENS))
    asked = [Asked(prompt, NUM_TOKENS, slot=0, joins_at=i) for i, prompt in enumerate(prompts)]
    asked.append(Asked(prompts[1], NUM_TOKENS))
    answers = generate_padded(padded_runner(model, [folder]), asked)
    assert [answer.tokens for answer in answers] == told
