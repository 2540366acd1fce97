"""Adapters with their own heads through a whole engine replace each other on the device."""

import asyncio
from pathlib import Path

import pytest
import torch

from configs.engine import EngineConfig
from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import Completion, GenerateRequest, ReplyAddress, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.oracle import prompt_truth

NOWHERE = ReplyAddress("127.0.0.1", 1, "no listener")
NUM_TOKENS = 8


def config(root: Path, **adapters: object) -> EngineConfig:
    return EngineConfig.model_validate(
        {
            "model": {"id": str(root / "model")},
            "tensor_parallel": 2,
            "device": "cpu",
            "cache": {"num_blocks": 64},
            "limits": {"max_running": 8, "max_step_tokens": 64},
            "adapters": {"local_roots": [str(root)], "default_source": "local", **adapters},
        }
    )


def write(root: Path) -> dict[str, Path]:
    model = write_llama(root / "model", "odd_vocab")
    recipes = {
        name: AdapterRecipe(
            seed=seed, target_modules=["q_proj"], extra={"modules_to_save": ["lm_head"]}
        )
        for seed, name in enumerate(("red", "blue", "green"), 1)
    }
    return {name: write_adapter(root / name, model, recipe) for name, recipe in recipes.items()}


async def ask(
    engine_config: EngineConfig, root: Path, sent: list[GenerateRequest]
) -> list[Completion]:
    engine = DriverEngine(engine_config, root / "model", LocalRanks(engine_config))
    await engine.start()
    try:
        return await asyncio.gather(*(engine.generate(request, NOWHERE) for request in sent))
    finally:
        await engine.stop()


@pytest.mark.parametrize("copies", [1, 2])
def test_more_whole_heads_than_slots_are_served_exactly(tmp_path: Path, copies: int) -> None:
    folders = write(tmp_path)
    names = [None, *folders] * 2
    replies = [
        prompt_truth(tmp_path / "model", folders[name] if name else None, 5 + i)
        for i, name in enumerate(names)
    ]
    requests = [
        GenerateRequest(
            f"r{i}",
            [SequenceRequest(prompt, Sampling(), Stopping(NUM_TOKENS))],
            AdapterReference(AdapterSource.LOCAL, name) if name else None,
        )
        for i, (name, (prompt, _)) in enumerate(zip(names, replies, strict=True))
    ]
    opened = config(tmp_path, vocabulary=True, vocabulary_copies=copies)
    torch.set_num_threads(1)
    answers = asyncio.run(asyncio.wait_for(ask(opened, tmp_path, requests), PATIENCE_S))
    for answer, (_, truth) in zip(answers, replies, strict=True):
        assert answer.sequences[0].tokens == truth.tokens[:NUM_TOKENS]
