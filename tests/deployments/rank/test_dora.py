"""DoRA through a whole engine on two ranks, which add what each knows of the rows' norms."""

import asyncio
from pathlib import Path

import torch

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import GenerateRequest, SequenceRequest
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.deployments.rank.test_whole_ends import NUM_TOKENS, ask, config
from tests.oracle import prompt_truth


def test_dora_answers_as_peft_and_is_staged_again(tmp_path: Path) -> None:
    """One slot for three adapters: each is dropped and staged anew, two of them with sums."""
    model = write_llama(tmp_path / "model", "gqa")
    folders: dict[str | None, Path | None] = {None: None}
    for seed, name in enumerate(("dora", "plain", "other")):
        extra = {} if name == "plain" else {"use_dora": True}
        folders[name] = write_adapter(tmp_path / name, model, AdapterRecipe(seed=seed, extra=extra))
    names = [*folders] * 2
    truths = [prompt_truth(model, folders[name], 6 + i) for i, name in enumerate(names)]
    sent = [
        GenerateRequest(
            f"r{i}",
            [SequenceRequest(prompt, Sampling(), Stopping(NUM_TOKENS))],
            None if name is None else AdapterReference(AdapterSource.LOCAL, name),
        )
        for i, (name, (prompt, _)) in enumerate(zip(names, truths, strict=True))
    ]
    opened = config(tmp_path, max_device_adapters=1, device_pages=2)
    torch.set_num_threads(1)
    answers = asyncio.run(asyncio.wait_for(ask(opened, tmp_path, sent), PATIENCE_S))
    for answer, (_, truth) in zip(answers, truths, strict=True):
        assert answer.sequences[0].tokens == truth.tokens[:NUM_TOKENS], answer
