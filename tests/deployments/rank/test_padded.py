"""The driver's engine over a padded model, with a rank in this process."""

import asyncio
from pathlib import Path

import pytest
import torch

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import FinishReason, Sampling, Stopping
from deployments.contract import Finished, GenerateRequest, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from tests.checkpoints import write_adapter
from tests.checkpoints_padded import ADAPTERS, write_padded
from tests.deployments.driver.routing.stories import PATIENCE_S, pin, together
from tests.oracle import NUM_TOKENS, prompt_truth

NAMES = [None, "r4", "rows", "r16", None, "r4", "columns", "r16"]


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)


def engine_config(root: Path, **changes: object) -> EngineConfig:
    """Few blocks, so that requests are preempted and come back; a small budget of tokens."""
    return EngineConfig.model_validate(
        {
            "model": {"id": str(root / "bert")},
            "device": "cpu",
            "cache": {"num_blocks": 24, "block_size": 4},
            "limits": {"max_running": 6, "max_step_tokens": 24, "max_total_tokens": 96},
            "adapters": {"local_roots": [str(root)], "default_source": "local"},
            **changes,
        }
    )


def test_a_padded_model_serves_base_and_adapters_together(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = write_padded(tmp_path / "bert", "bert")
    adapters = dict.fromkeys(name for name in NAMES if name is not None)
    for name in adapters:
        write_adapter(tmp_path / name, model, ADAPTERS["bert"][name])
    replies = [
        prompt_truth(model, None if name is None else tmp_path / name, 3 + 5 * i)
        for i, name in enumerate(NAMES)
    ]
    counts = [NUM_TOKENS - 2 * (i % 4) for i in range(len(NAMES))]
    requests = [
        GenerateRequest(
            f"r{i}",
            [SequenceRequest(prompt, Sampling(), Stopping(counts[i]))],
            None if name is None else AdapterReference(AdapterSource.LOCAL, name),
        )
        for i, (name, (prompt, _)) in enumerate(zip(NAMES, replies, strict=True))
    ]

    async def serve() -> None:
        config = engine_config(tmp_path)
        engine = DriverEngine(config, model, LocalRanks(config))
        await engine.start()
        try:
            await pin(engine, *adapters)
            answers = await asyncio.gather(*await together(engine, requests))
            for count, answer, (_, truth) in zip(counts, answers, replies, strict=True):
                (sequence,) = answer.sequences
                assert sequence.ending == Finished(FinishReason.LENGTH)
                assert sequence.tokens == truth.tokens[:count]
                assert sequence.cached_tokens == 0
            assert engine._handle.loop._scheduler.snapshot().num_preemptions > 0
            info = await engine.describe()
            assert info.startup_info["attention"].startswith("padded (BertLMHeadModel")
        finally:
            await engine.stop()

    with caplog.at_level("INFO", "loray.modeling"):
        asyncio.run(asyncio.wait_for(serve(), PATIENCE_S))
    assert "BertLMHeadModel runs in transformers' padded code" in caplog.text


def test_two_ranks_are_refused_with_what_to_do(tmp_path: Path) -> None:
    write_padded(tmp_path / "bert", "bert")
    ranks = LocalRanks(engine_config(tmp_path, tensor_parallel=2))
    with pytest.raises(ValueError, match=r"tensor_parallel \(2\) must be 1"):
        ranks.start()
