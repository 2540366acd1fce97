"""What follows the last attention is computed for the tokens that are read, and for no others."""

from collections.abc import Sequence
from typing import Any, cast

import pytest
from torch import Tensor, nn

from configs.wire.sampling import Sampling
from modeling.models.llama import FlashLlamaForCausalLM
from modeling.runner.paged import ModelRunner
from tests.modeling.parity.comparison import World
from tests.modeling.runner.test_cuda_graphs import BLOCK_SIZE, NUM_BLOCKS
from tests.modeling.runner.test_piecewise import make_runner, record_on_cpu
from tests.modeling.stepping import Answer, Asked, generate


@pytest.fixture
def tails(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many tokens each tail computes, in the order of their calls."""
    found: list[int] = []
    tail = FlashLlamaForCausalLM.tail

    def counted(self: FlashLlamaForCausalLM, left: Sequence[Tensor], *rest: Any) -> Tensor:
        found.append(len(left[0]))
        return tail(self, left, *rest)

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
    # Steps of 16 + 9, 16 + 1 and 8 tokens; that of one token, which is read, is computed whole.
    assert tails == [1, 1, 1]


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
    assert tails == []
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


def layer_tokens(runner: ModelRunner) -> dict[int, list[int]]:
    """How many tokens each layer's feed-forward computes in each step."""
    found: dict[int, list[int]] = {}
    for index, layer in enumerate(runner._parts.weights.model.decoder_layers):
        own = found.setdefault(index, [])

        def hook(_module: nn.Module, inputs: tuple[Tensor, ...], own: list[int] = own) -> None:
            own.append(inputs[0].shape[1])

        cast(nn.Module, layer.mlp).register_forward_pre_hook(hook)
    return found


def test_layers_that_share_keys_compute_what_is_read(world: World) -> None:
    """The last two of Gemma 4's store none, so of a prompt they are needed for its last token."""
    runner = make_runner(world, "generic", "gemma4_text")
    found = layer_tokens(runner)
    asked = [Asked(prompt(40), num_tokens=2, chunk=16), Asked(prompt(9), num_tokens=2)]
    generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    shared = max(found) - 1
    for index, tokens in found.items():
        assert tokens == ([1, 1, 1, 1] if index >= shared else [25, 17, 8, 1]), index


def test_two_prompts_that_end_in_one_step_keep_their_order(world: World) -> None:
    """Rows of one token come first in a step, answers in the order of the plan."""
    runner = make_runner(world, "generic", "gemma4_text")
    asked = [Asked(prompt(20), num_tokens=3), Asked(prompt(1), num_tokens=3), Asked(prompt(9), 3)]
    together = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    alone = [generate(runner, [each], NUM_BLOCKS, BLOCK_SIZE)[0] for each in asked]
    assert [each.tokens for each in together] == [each.tokens for each in alone]
    runner._piecewise_graphs = record_on_cpu(runner, (4, 40))
    replayed = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    assert [each.tokens for each in replayed] == [each.tokens for each in alone]


def test_models_without_shared_keys_are_computed_whole(world: World) -> None:
    runner = make_runner(world, "generic", "gemma3_text")
    assert runner._forward.split is None
