"""Any request's tokens are the oracle's, whatever its parameters and however it is run.

The oracle is transformers with PEFT, the sampler's definition in float64, and the noise of
(seed, position, vocabulary id). Where it finds two tokens closer than 1e-3 either is right.
"""

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from configs.wire.sampling import Sampling
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from modeling.sampling.noise import exponential_noise, noise_keys
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import load_adapted_oracle, load_oracle, oracle_logits
from tests.modeling.parity.comparison import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    WHOLE,
    World,
    engine_config,
    place_all,
)
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.sampling.plain import PlainRow, plain_adjusted, plain_kept
from tests.modeling.stepping import Asked, generate
from tests.ranks import run_ranks

NUM_TOKENS = 10
TOLERANCE = 1e-3
PROMPTS = ([5, 9, 33, 71, 8, 60, 12], [44, 3, 17], [80] * 19)
ADAPTERS = ("r8", "rslora")
CPU = torch.device("cpu")


class Setup:
    """A model with two adapters, in runners of both kinds, and what the oracle says."""

    def __init__(self, world: World) -> None:
        self._model = world.model("llama", "gqa")
        folders = [world.adapter("llama", "gqa", name) for name in ADAPTERS]
        self._adapters = [folder for folder in folders if folder is not None]
        self.plain = self.runner(SingleRank())
        self.captured = self.runner(SingleRank())
        self.captured._decode_graphs = capture_on_cpu(self.captured)
        self._oracles = [load_adapted_oracle(self._model, folder) for folder in self._adapters]
        self._oracles.append(load_oracle(self._model))
        self.undecided = 0

    def runner(self, group: TensorParallel) -> ModelRunner:
        """A runner with the adapters at their slots."""
        runner = load_paged(engine_config(self._model), group, CPU).allocate()
        place_all(runner, self._adapters)
        return runner

    def check(self, requests: Sequence[Asked], answers: Sequence[Sequence[int]]) -> None:
        """Each token of each answer, given those before it."""
        for wanted, answer in zip(requests, answers, strict=True):
            assert len(answer) == NUM_TOKENS
            prompt = list(wanted.prompt)
            expected_logits = oracle_logits(self._oracles[wanted.slot], [*prompt, *answer])
            for index, token in enumerate(answer):
                row = PlainRow(wanted.sampling, prompt, list(answer[:index]))
                right = acceptable(expected_logits[len(row.tokens) - 1].double().tolist(), row)
                assert token in right, (wanted, index)
                self.undecided += len(right) > 1


def acceptable(logits: list[float], row: PlainRow) -> set[int]:
    """The tokens that the definition chooses, and those that rounding might choose."""
    adjusted, params = plain_adjusted(logits, row), row.params
    if not params.temperature:
        return _best(dict(enumerate(adjusted)))
    keys = noise_keys(
        np.array([params.seed], dtype=np.uint64), np.array([len(row.tokens)], dtype=np.int64)
    )
    noise = exponential_noise(torch.from_numpy(keys), len(logits))[0].double().log().tolist()
    right: set[int] = set()
    for shift, high_first in itertools.product((0.0, -1e-4, 1e-4), (False, True)):
        # What lies at the edge of what is kept may fall on either side of it.
        wanted = _shifted(params, shift)
        kept = plain_kept(adjusted, wanted, high_first)
        right |= _best({id: adjusted[id] / params.temperature - noise[id] for id in kept})
    return right


def _shifted(params: Sampling, shift: float) -> Sampling:
    """The same with its edges moved a little."""
    moved = {
        name: min(1.0, value * (1 + shift))
        for name in ("top_p", "min_p", "typical_p")
        if 0 < (value := getattr(params, name)) < 1
    }
    fields = {name: getattr(params, name) for name in Sampling.__struct_fields__}
    return Sampling(**{**fields, **moved})


def _best(values: dict[int, float]) -> set[int]:
    top = max(values.values())
    return {id for id, value in values.items() if value >= top - TOLERANCE}


@pytest.fixture(scope="module")
def setup(world: World) -> Setup:
    return Setup(world)


_penalty = st.sampled_from([0.0, 0.0, 0.7, -0.6, 2.0])
_ids = st.integers(0, 95)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 1.7]),
    seed=st.integers(0, 2**64 - 1),
    top_k=st.sampled_from([0, 0, 1, 5, 40]),
    top_p=st.sampled_from([1.0, 1.0, 0.93, 0.41]),
    min_p=st.sampled_from([0.0, 0.0, 0.023, 0.31]),
    typical_p=st.sampled_from([1.0, 1.0, 0.87, 0.33]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 1.3, 0.8]),
    frequency_penalty=_penalty,
    presence_penalty=_penalty,
    watermark=st.booleans(),
    logit_bias=st.dictionaries(_ids, st.sampled_from([-100.0, -3.0, 2.5]), max_size=3).map(
        lambda biases: tuple(biases.items())
    ),
    masked_ids=st.sampled_from([(), (3,), (0, 7, 11)]),
    masked_tokens=st.integers(0, 4),
    logprobs=st.sampled_from([-1, 0, 2]),
)


def requests_by(**how: st.SearchStrategy[Any]) -> st.SearchStrategy[Asked]:
    return st.builds(
        Asked,
        prompt=st.sampled_from(PROMPTS),
        num_tokens=st.just(NUM_TOKENS),
        slot=st.integers(-1, len(ADAPTERS) - 1),
        sampling=samplings,
        **how,
    )


requests_anyhow = requests_by(
    chunk=st.sampled_from([1, 3, 16, WHOLE]),
    joins_at=st.integers(0, 6),
    rejoins_at=st.one_of(st.none(), st.integers(1, NUM_TOKENS - 1)),
)

FEW = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)


def answers_of(runner: ModelRunner, requests: Sequence[Asked]) -> list[list[int]]:
    return [answer.tokens for answer in generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)]


def test_any_mix(setup: Setup) -> None:
    """Alone or together, in chunks, joining whenever, preempted amid the answer, replayed."""
    checked = 0
    setup.undecided = 0

    @FEW
    @given(st.lists(requests_anyhow, min_size=1, max_size=6), st.booleans())
    def run(requests: list[Asked], captured: bool) -> None:
        nonlocal checked
        runner = setup.captured if captured else setup.plain
        setup.check(requests, answers_of(runner, requests))
        checked += len(requests) * NUM_TOKENS

    run()
    assert setup.undecided < checked / 50


@settings(FEW, max_examples=3)
@given(requests=st.lists(requests_anyhow, min_size=4, max_size=6))
def test_two_ranks(setup: Setup, requests: list[Asked]) -> None:
    def tokens(group: TensorParallel) -> list[list[int]]:
        return answers_of(setup.runner(group), requests)

    first, second = run_ranks(2, tokens)
    assert first == second
    setup.check(requests, first)


def test_the_check_would_see_another_token(setup: Setup) -> None:
    request = Asked(PROMPTS[0], NUM_TOKENS, 0, Sampling(temperature=1.0, seed=7, top_p=0.9))
    [answer] = answers_of(setup.plain, [request])
    setup.check([request], [answer])
    for other in (replace(request, slot=1), replace(request, sampling=Sampling(seed=8))):
        with pytest.raises(AssertionError):
            setup.check([other], [answer])
