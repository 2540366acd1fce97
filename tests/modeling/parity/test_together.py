"""Requests that arrive together and share a prefix: one computes it, in the step of the others."""

import pytest
import torch

from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import TensorParallel
from tests.modeling.parity.comparison import BASE, BLOCK_SIZE, Setting, World, engine_config, judge
from tests.modeling.scheduled import Ranks
from tests.modeling.stepping import Answer, Asked
from tests.oracle import NUM_TOKENS, Truth, truth

SHARED = 2 * BLOCK_SIZE
TAILS = (5, 1, 9)
"""Tokens of each prompt behind the shared ones."""


def clear_prompt(world: World, family: str, variant: str, tail: int) -> tuple[list[int], Truth]:
    """A prompt on which rounding has no say, and the answer."""
    head = torch.randint(30, 96, (SHARED,), generator=torch.Generator().manual_seed(1)).tolist()
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        prompt = [*head, *torch.randint(30, 96, (tail,), generator=generator).tolist()]
        try:
            return prompt, truth(world.model(family, variant), None, prompt)
        except AssertionError:
            continue
    raise AssertionError("rounding has a say on all prompts: choose another head")


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    [
        ("llama", "gqa", 1),
        ("llama", "gqa", 2),
        ("gpt2", "plain", 1),
        ("generic", "gemma2", 1),
        ("generic", "olmo2", 2),
    ],
)
def test_the_answers_are_those_of_each_alone(
    world: World, family: str, variant: str, ranks: int
) -> None:
    model = world.model(family, variant)
    prompts, told = zip(*(clear_prompt(world, family, variant, t) for t in TAILS), strict=True)
    whole = Sampling(logprobs=told[0].logits.shape[1])
    asked = [Asked(prompt, NUM_TOKENS, sampling=whole) for prompt in prompts]

    def answers(group: TensorParallel) -> list[Answer]:
        def start() -> ModelRunner:
            return load_paged(engine_config(model), group, torch.device("cpu")).allocate()

        run = Ranks(start)
        for index, each in enumerate(asked):
            run.ask(index, each)
        run.run()
        names = [("r", index) for index in range(len(asked))]
        assert [run.ended[name].cached_tokens for name in names] == [0, SHARED, SHARED]
        return [run.answers[name] for name in names]

    setting = Setting(family, variant, ranks, [BASE] * len(asked), lengths=[SHARED])
    judge(world.record.begin(setting, model), world.run(ranks, answers), told)
