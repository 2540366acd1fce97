"""What follows the last attention is computed for the tokens that are read, and for no others."""

import pytest
from torch import Tensor

from configs.wire.sampling import Sampling
from modeling.models.llama import FlashLlamaForCausalLM
from tests.modeling.parity.comparison import World
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, NUM_BLOCKS
from tests.modeling.runner.test_piecewise import make_runner, record_on_cpu
from tests.modeling.stepping import Answer, Asked, generate


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each tail computes, in the order of their calls."""
    found: list[int] = []
    tail = FlashLlamaForCausalLM.tail

    def counted(self: FlashLlamaForCausalLM, attended: Tensor, *rest: object) -> Tensor:
        found.append(len(attended))
        return tail(self, attended, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(FlashLlamaForCausalLM, "tail", counted)
    return found


def scores(answer: Answer) -> list[float]:
    """The logprobs of a prompt's own tokens."""
    return [each.logprob for report in answer.prompts for each in report.logprobs]


def prompt(length: int) -> list[int]:
    return [(7 * i) % 60 + 3 for i in range(length)]


def test_of_a_prompt_its_last_token_alone_is_computed(world: World, tails: list[int]) -> None:
    runner = make_runner(world, "llama", "gqa")
    asked = [Asked(prompt(40), num_tokens=2, chunk=16), Asked(prompt(9), num_tokens=2)]
    generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    # Steps of 16 + 9, 16 + 1, 8 and 1 tokens; of the first chunk of the longer one none is read.
    assert tails == [1, 1, 1, 1]


def test_a_step_in_which_no_prompt_ends_has_no_tail(world: World, tails: list[int]) -> None:
    runner = make_runner(world, "llama", "gqa")
    generate(runner, [Asked(prompt(40), num_tokens=1, chunk=16)], NUM_BLOCKS, BLOCK_SIZE)
    assert (runner.num_steps, tails) == (3, [1])


@pytest.mark.parametrize("captured", [False, True])
def test_a_prompt_that_is_reported_on_is_computed_whole(
    world: World, tails: list[int], captured: bool
) -> None:
    runner = make_runner(world, "llama", "gqa")
    asked = [Asked(prompt(12), num_tokens=2, sampling=Sampling(prompt_logprobs=1), chunk=8)]
    expected = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert tails == [8, 4, 1]
    if captured:
        runner._piecewise_graphs = record_on_cpu(runner, (4, 16))
        found = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
        assert found[0].tokens == expected[0].tokens
        assert scores(found[0]) == pytest.approx(scores(expected[0]), abs=1e-5)


def test_tails_are_recorded_in_few_sizes(world: World) -> None:
    runner = make_runner(world, "llama", "gqa")
    graphs = record_on_cpu(runner, (9, 40))
    assert graphs._tails is not None
    assert graphs._tails.sizes == (9, 16, 32, 40)
    other = make_runner(world, "gpt2", "by_layer")
    assert record_on_cpu(other, (9, 40))._tails is None
