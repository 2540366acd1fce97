"""Penalties in both runners, which are a step ahead of the host: shown by whole sequences."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Sampling
from modeling.batch import ForwardBatch
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.group import SingleRank, TensorParallel
from tests.modeling.padded import PaddedWorld, generate_padded, padded_runner
from tests.modeling.parity.comparison import BLOCK_SIZE, NUM_BLOCKS, World, engine_config
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.stepping import Asked, generate
from tests.ranks import run_ranks

PROMPTS = [[5, 9, 33, 71, 8, 60, 12], [44, 3, 17], [80] * 19, [9, 8, 7, 6, 5]]
NO_REPEATS = Sampling(repetition_penalty=1e6, seed=1)
NO_OWN_REPEATS = Sampling(temperature=0.9, seed=2, frequency_penalty=2.0, presence_penalty=2.0)
SAMPLINGS = [
    NO_REPEATS,
    Sampling(),
    Sampling(temperature=0.7, seed=4, watermark=True, typical_p=0.9, min_p=0.01),
    NO_OWN_REPEATS,
]

Run = Callable[[list[Asked]], list[list[int]]]


def paged_runner(world: World, group: TensorParallel) -> ModelRunner:
    runner = load_paged(
        engine_config(world.model("llama", "gqa")), group, torch.device("cpu")
    ).allocate()
    return runner


@pytest.fixture(params=["paged", "padded"])
def run(request: pytest.FixtureRequest, world: World, tmp_path: Path) -> Run:
    if request.param == "padded":
        padded = padded_runner(PaddedWorld(tmp_path).model("gptj"), [])
        return lambda requests: [a.tokens for a in generate_padded(padded, requests)]
    paged = paged_runner(world, SingleRank())
    return lambda requests: [a.tokens for a in generate(paged, requests, NUM_BLOCKS, BLOCK_SIZE)]


def test_a_repetition_penalty_sees_every_token_in_time(run: Run) -> None:
    requests = [Asked(prompt, 20, sampling=NO_REPEATS, joins_at=i) for i, prompt in
                enumerate(PROMPTS)]  # fmt: skip
    for request, tokens in zip(requests, run(requests), strict=True):
        assert len({*tokens, *request.prompt}) == 20 + len(set(request.prompt))


def test_tokens_depend_on_their_request_alone(run: Run) -> None:
    requests = [Asked(prompt, 16, sampling=sampling, joins_at=3 - i) for i, (prompt, sampling) in
                enumerate(zip(PROMPTS, SAMPLINGS, strict=True))]  # fmt: skip
    assert run(requests) == [run([request])[0] for request in requests]


def test_masked_ids_come_only_later(run: Run) -> None:
    free = run([Asked(PROMPTS[0], 12)])[0]
    masked = Sampling(masked_ids=tuple(set(free)), masked_tokens=5)
    late = run([Asked(PROMPTS[0], 12, sampling=masked)])[0]
    assert not set(late[:5]) & set(free)


def test_ranks_agree(world: World) -> None:
    requests = [Asked(prompt, 12, sampling=sampling) for prompt, sampling in
                zip(PROMPTS, SAMPLINGS, strict=True)]  # fmt: skip

    def tokens(group: TensorParallel) -> list[list[int]]:
        answers = generate(paged_runner(world, group), requests, NUM_BLOCKS, BLOCK_SIZE)
        return [answer.tokens for answer in answers]

    (one,) = run_ranks(1, tokens)
    assert run_ranks(2, tokens) == [one, one]


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_a_preempted_request_continues_as_it_would(world: World, sampling: Sampling) -> None:
    """Its output is among the tokens that it joins with, and counts as output still."""
    runner = paged_runner(world, SingleRank())
    prompt = PROMPTS[1]
    [answer] = generate(runner, [Asked(prompt, 12, sampling=sampling)], NUM_BLOCKS, BLOCK_SIZE)
    for known in (1, 7):
        tokens = [*prompt, *answer.tokens[:known]]
        blocks = list(range(-(-len(tokens) // BLOCK_SIZE)))
        join = RequestJoin(1, tokens, len(prompt), -1, sampling)
        row = StepRow(1, 0, len(tokens), blocks, True)
        assert runner.step(ForwardBatch([join], [row])).wait().tokens == [answer.tokens[known]]


def test_replays_of_captured_steps_are_adjusted(world: World) -> None:
    runner = paged_runner(world, SingleRank())
    requests = [Asked(prompt, 12, sampling=sampling, joins_at=i) for i, (prompt, sampling) in
                enumerate(zip(PROMPTS, SAMPLINGS, strict=True))]  # fmt: skip
    expected = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    runner._decode_graphs = capture_on_cpu(runner)
    assert generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE) == expected
    assert runner.num_captured > 5


def test_a_batch_without_a_buffer_refuses(tmp_path: Path) -> None:
    model = padded_runner(PaddedWorld(tmp_path).model("gptj"), [])._model
    batch = model.batch([RequestJoin(0, [1, 2], 2, -1, NO_REPEATS)])
    with pytest.raises(ValueError, match="token buffer"):
        model.generate_token(batch)
