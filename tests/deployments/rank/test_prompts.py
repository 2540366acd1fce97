"""Prompt logprobs through a busy engine and its ranks."""

import asyncio
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import FinishReason, Pooling, Sampling, Stopping
from deployments.contract import Finished, GenerateRequest, SequenceOutcome, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.checkpoints_padded import ADAPTERS, write_padded
from tests.deployments.driver.routing.stories import PATIENCE_S, pin, together
from tests.modeling.prompts import prompt_of
from tests.oracle import TOLERANCE, final_states, prompt_logits, truth

VOCAB = 96
NUM_TOKENS = 20
ROUNDS = 3
SCORED = Sampling(prompt_logprobs=2)


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def sequences(prompt: list[int]) -> list[SequenceRequest]:
    """What each client asks about its prompt: five sequences of one request."""
    return [
        SequenceRequest(prompt, SCORED, Stopping(NUM_TOKENS)),
        SequenceRequest(prompt, SCORED, Stopping(0)),
        SequenceRequest(prompt, Sampling(), Stopping(NUM_TOKENS)),
        SequenceRequest(prompt, Sampling(pooling=Pooling.MEAN), Stopping(0)),
        SequenceRequest(prompt, Sampling(pooling=Pooling.LAST), Stopping(0)),
    ]


def check(
    model: Path, adapter: Path | None, prompt: list[int], found: list[SequenceOutcome]
) -> None:
    scored, alone, plain, mean, last = found
    assert all(each.ending == Finished(FinishReason.LENGTH) for each in found)
    expected = truth(model, adapter, prompt).tokens[:NUM_TOKENS]
    assert [each.tokens for each in found] == [expected, [], expected, [], []]
    logprobs = prompt_logits(model, adapter, prompt).double().log_softmax(-1)
    own = [float(logprobs[i, token]) for i, token in enumerate(prompt[1:])]
    for each in (scored, alone):
        assert each.prompt_logprobs is not None
        assert [one.logprob for one in each.prompt_logprobs] == pytest.approx(own, abs=TOLERANCE)
        assert all(len(one.top_ids) == 2 for one in each.prompt_logprobs)
    assert plain.prompt_logprobs is None
    states = final_states(model, adapter, prompt).numpy()
    for outcome, wanted in ((mean, states.mean(0)), (last, states[-1])):
        vector = np.frombuffer(outcome.embedding, "<f4")
        np.testing.assert_allclose(vector, wanted, atol=TOLERANCE)
    assert scored.embedding == b""


@pytest.mark.parametrize(("kind", "ranks"), [("llama", 1), ("llama", 2), ("bert", 1)])
def test_prompt_logprobs_are_whole_despite_preemptions(
    tmp_path: Path, kind: str, ranks: int
) -> None:
    model = tmp_path / "model"
    if kind == "llama":
        write_llama(model)
        recipe = AdapterRecipe(r=8, alpha=16.0, seed=12)
    else:
        write_padded(model, kind)
        recipe = ADAPTERS[kind]["r4"]
    folder = write_adapter(tmp_path / "own", model, recipe)
    sent = [
        (None if i % 2 else folder, prompt_of(9 + 4 * (i // 2), VOCAB)) for i in range(2 * ROUNDS)
    ]
    config = EngineConfig.model_validate(
        {
            "model": {"id": str(model)},
            "device": "cpu",
            "tensor_parallel": ranks,
            "cache": {"num_blocks": 20, "block_size": 4},
            "limits": {"max_running": 8, "max_step_tokens": 10, "max_total_tokens": 64},
            "adapters": {"local_roots": [str(tmp_path)], "default_source": "local"},
        }
    )

    async def serve() -> None:
        engine = DriverEngine(config, model, LocalRanks(config))
        await engine.start()
        try:
            requests = [
                GenerateRequest(
                    f"r{i}",
                    sequences(prompt),
                    None if adapter is None else AdapterReference(AdapterSource.LOCAL, "own"),
                )
                for i, (adapter, prompt) in enumerate(sent)
            ]
            await pin(engine, "own")
            answers = await asyncio.gather(*await together(engine, requests))
            assert (await engine.snapshot()).num_preemptions > 0, "the cache was large enough"
            for (adapter, prompt), answer in zip(sent, answers, strict=True):
                check(model, adapter, prompt, answer.sequences)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
