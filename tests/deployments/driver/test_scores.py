"""Classification through a busy engine: beside generation, from the prefix cache, after preemption;
and what asks for something that a model or an adapter is not for."""

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Pooling, Sampling, Stopping
from configs.wire.tasks import TaskKind
from deployments.contract import (
    Completion,
    ErrorKind,
    Failed,
    Finished,
    GenerateRequest,
    SequenceRequest,
)
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from tests.checkpoints import write_adapter, write_llama
from tests.checkpoints_scores import (
    adapted_classifier,
    scores,
    write_classifier,
    write_score_adapter,
)
from tests.deployments.driver.routing.stories import NOWHERE, PATIENCE_S, pin, together
from tests.modeling.prompts import prompt_of
from tests.oracle import TOLERANCE, truth

VOCAB = 96
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def served(model: Path, story: Callable[[DriverEngine], Awaitable[None]], ranks: int = 1) -> None:
    config = EngineConfig.model_validate(
        {
            "model": {"id": str(model)},
            "device": "cpu",
            "tensor_parallel": ranks,
            "cache": {"num_blocks": 16, "block_size": 4},
            "limits": {"max_running": 8, "max_step_tokens": 10, "max_total_tokens": 64},
            "adapters": {"local_roots": [str(model.parent)], "default_source": "local"},
        }
    )

    async def serve() -> None:
        engine = DriverEngine(config, model, LocalRanks(config))
        await engine.start()
        try:
            await story(engine)
        finally:
            await engine.stop()

    asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))


def request(name: str, prompt: list[int], adapter: str | None, new: int = 0) -> GenerateRequest:
    sampling = Sampling() if new else Sampling(pooling=Pooling.SCORE)
    reference = None if adapter is None else AdapterReference(AdapterSource.LOCAL, adapter)
    return GenerateRequest(name, [SequenceRequest(prompt, sampling, Stopping(new))], reference)


@pytest.mark.parametrize("ranks", [1, 2])
def test_scores_beside_generation(tmp_path: Path, ranks: int) -> None:
    model = write_llama(tmp_path / "model")
    folders = {n: write_score_adapter(tmp_path / f"head{n}", model, n) for n in (1, 3)}
    own = write_adapter(tmp_path / "own", model)
    prompts = [prompt_of(9 + 3 * i, VOCAB) for i in range(3)]
    requests = [
        request(f"{i}{adapter}", prompt, adapter, new)
        for i, prompt in enumerate(prompts)
        for adapter, new in (("head1", 0), ("own", 14), ("head3", 0), (None, 14))
    ]

    async def story(engine: DriverEngine) -> None:
        await pin(engine, "head1", "head3", "own")
        answers = await asyncio.gather(*await together(engine, requests))
        assert (await engine.snapshot()).num_preemptions > 0, "the cache was large enough"
        again = [request(f"again{i}", prompts[0], "head1") for i in range(2)]
        found = [await engine.generate(each, NOWHERE) for each in again]
        assert found[1].sequences[0].cached_tokens == 8, "all whole blocks but the last token"
        for sent, answer in zip([*requests, *again], [*answers, *found], strict=True):
            check(sent, answer)

    def check(sent: GenerateRequest, answer: Completion) -> None:
        (outcome,), (sequence,) = answer.sequences, sent.sequences
        assert isinstance(outcome.ending, Finished), outcome.ending
        adapter = None if sent.adapter is None else sent.adapter.id
        if sequence.stopping.max_new_tokens:
            folder = None if adapter is None else own
            assert outcome.tokens == truth(model, folder, sequence.prompt).tokens[:14]
            return
        assert adapter is not None
        oracle = adapted_classifier(model, folders[int(adapter[-1])])
        found = np.frombuffer(outcome.embedding, "<f4")
        expected = scores(oracle, sequence.prompt).numpy()
        np.testing.assert_allclose(found, expected, atol=TOLERANCE)

    served(model, story, ranks)


async def fault(engine: DriverEngine, sent: GenerateRequest) -> str:
    (outcome,) = (await engine.generate(sent, NOWHERE)).sequences
    if isinstance(outcome.ending, Finished):
        return ""
    assert isinstance(outcome.ending, Failed)
    assert outcome.ending.kind is ErrorKind.VALIDATION
    return outcome.ending.message


def test_a_model_that_generates_says_what_classifies(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model")
    write_score_adapter(tmp_path / "head", model, 2)
    write_adapter(tmp_path / "own", model)
    prompt = prompt_of(9, VOCAB)

    async def story(engine: DriverEngine) -> None:
        assert (await engine.describe()).task.task is TaskKind.GENERATE
        for adapter in (None, "own"):
            message = await fault(engine, request("a", prompt, adapter))
            assert "Text generation models don't support classification: name an" in message
        message = await fault(engine, request("b", prompt, "head", 4))
        assert "adapter 'head' classifies (task_type SEQ_CLS) and does not generate" in message
        assert await fault(engine, request("c", prompt, "head")) == ""

    served(model, story)


def test_a_model_that_classifies_does_not_generate(tmp_path: Path) -> None:
    causal = write_llama(tmp_path / "causal")
    model = write_classifier(tmp_path / "model", causal, 3, id2label={0: "a", 1: "b", 2: "c"})
    prompt = prompt_of(9, VOCAB)

    async def story(engine: DriverEngine) -> None:
        info = await engine.describe()
        assert (info.task.task, info.task.labels) == (TaskKind.CLASSIFY, ("a", "b", "c"))
        assert info.startup_info["task"] == "classify"
        assert "Classify models don't" in await fault(engine, request("a", prompt, None, 4))
        assert await fault(engine, request("b", prompt, None)) == ""

    served(model, story)
