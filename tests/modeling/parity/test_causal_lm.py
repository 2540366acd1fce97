"""Padded models: transformers + PEFT alone and the runner give the same tokens and logits."""

from typing import Any

import pytest
import torch
import transformers
from peft import PeftModel

from tests.checkpoints import oracle_greedy
from tests.modeling.padded import (
    RECIPES,
    PaddedWorld,
    compare_padded,
    generate_padded,
    padded_runner,
)
from tests.modeling.parity.comparison import BASE, WHOLE, Setting
from tests.modeling.stepping import Asked
from tests.oracle import NUM_TOKENS

MIXED = [BASE, "r4", "r16", "rows", "columns", "last_layer"]
"""The base model and adapters of different ranks and targets."""

FALCON_ALIBI = "falcon_alibi"


@pytest.fixture(scope="module")
def padded(tmp_path_factory: pytest.TempPathFactory) -> PaddedWorld:
    return PaddedWorld(tmp_path_factory.mktemp("padded"))


@pytest.mark.parametrize("kind", sorted(RECIPES.keys() - {FALCON_ALIBI}))
def test_together(padded: PaddedWorld, kind: str) -> None:
    """One batch of unequal lengths: rows join at different steps and leave at different steps."""
    compare_padded(padded, Setting("padded", kind, 1, MIXED, chunk=WHOLE))


@pytest.mark.parametrize("kind", ["bloom", "gptj"])
@pytest.mark.parametrize("names", [["r8"], MIXED])
def test_in_chunks(padded: PaddedWorld, kind: str, names: list[str]) -> None:
    """A scheduler that cuts prompts all the same gets the same tokens."""
    compare_padded(padded, Setting("padded", kind, 1, names, chunk=4))


@pytest.mark.parametrize("kind", ["bloom", "gptj"])
def test_alone(padded: PaddedWorld, kind: str) -> None:
    compare_padded(padded, Setting("padded", kind, 1, ["r8"], chunk=WHOLE))


@pytest.mark.parametrize("kind", sorted(RECIPES.keys() - {FALCON_ALIBI}))
def test_preempted(padded: PaddedWorld, kind: str) -> None:
    """Rows leave in the middle of their answers and join anew with all their tokens."""
    compare_padded(padded, Setting("padded", kind, 1, MIXED, chunk=WHOLE, rejoins_at=4))


def test_alibi_in_the_attention_that_is_served(padded: PaddedWorld) -> None:
    """The oracle's eager Falcon (transformers 5.23) adds ALiBi twice; what is served does not."""
    model, folder = padded.model(FALCON_ALIBI), padded.adapter(FALCON_ALIBI, "r8")
    setting = Setting("padded", FALCON_ALIBI, 1, [BASE, "r8"], chunk=WHOLE)
    seen = padded.record.begin(setting, model)
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
    seen.right.update(setting.names)
