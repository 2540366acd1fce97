"""Merges through a whole engine on two ranks: PEFT's tokens, one copy for one recipe."""

import asyncio
from pathlib import Path

import pytest
import torch

from configs.wire.adapters import AdapterReference, AdapterSource
from configs.wire.merging import MergeRule, MergeStrategy
from configs.wire.sampling import Sampling, Stopping
from deployments.contract import Completion, ErrorKind, Failed, GenerateRequest, SequenceRequest
from deployments.driver.engine import DriverEngine
from deployments.rank.local import LocalRanks
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.deployments.driver.routing.stories import PATIENCE_S
from tests.deployments.rank.test_whole_ends import NOWHERE, NUM_TOKENS, config
from tests.modeling.merges import write_merged, write_part
from tests.oracle import prompt_truth

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

TIES = MergeStrategy.TIES
BLENDS: dict[str, MergeRule] = {
    "one,two": MergeRule((0.7, 0.6)),
    "two,one": MergeRule((1.0, -0.5)),
    "one,two,columns": MergeRule((1.0, 0.8, 0.6), TIES, 0.4),
}


def named(ids: str, rule: MergeRule) -> AdapterReference:
    parts = tuple(AdapterReference(AdapterSource.LOCAL, name) for name in ids.split(","))
    return AdapterReference(AdapterSource.LOCAL, ids, parts=parts, rule=rule)


def ask(name: str, prompt: list[int], adapter: AdapterReference | None) -> GenerateRequest:
    return GenerateRequest(
        name, [SequenceRequest(prompt, Sampling(), Stopping(NUM_TOKENS))], adapter
    )


def test_merges_answer_as_peft_beside_each_other_and_the_base(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", "gqa")
    oracles: list[Path | None] = [None]
    for ids, rule in BLENDS.items():
        parts = [write_part(tmp_path, model, name) for name in ids.split(",")]
        oracles.append(write_merged(tmp_path / "oracle" / ids, model, parts, rule))
    replies = [prompt_truth(model, oracle, 5 + i) for i, oracle in enumerate(oracles * 3)]
    adapters = [None, *(named(ids, rule) for ids, rule in BLENDS.items())] * 3
    torch.set_num_threads(1)

    async def story() -> tuple[list[Completion], int]:
        opened = config(tmp_path)
        engine = DriverEngine(opened, model, LocalRanks(opened))
        await engine.start()
        try:
            requests = [
                ask(f"r{i}", prompt, adapter)
                for i, ((prompt, _), adapter) in enumerate(zip(replies, adapters, strict=True))
            ]
            answers = await asyncio.gather(*(engine.generate(one, NOWHERE) for one in requests))
            return answers, len(await engine.adapter_views())
        finally:
            await engine.stop()

    answers, num_adapters = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    for answer, (_, truth) in zip(answers, replies, strict=True):
        assert answer.sequences[0].tokens == truth.tokens[:NUM_TOKENS]
    assert num_adapters == len(BLENDS), "one for each recipe; parts were never staged"


def test_a_part_that_cannot_be_merged_fails_its_own_request_alone(tmp_path: Path) -> None:
    model = write_llama(tmp_path / "model", "gqa")
    write_part(tmp_path, model, "one")
    dora = AdapterRecipe(extra={"use_dora": True})
    write_adapter(tmp_path / "dora", model, dora)
    torch.set_num_threads(1)

    async def story() -> list[Completion]:
        opened = config(tmp_path)
        engine = DriverEngine(opened, model, LocalRanks(opened))
        await engine.start()
        halves = MergeRule((0.5, 0.5))
        try:
            requests = [ask("bad", [5, 6], named("one,dora", halves)), ask("base", [5, 6], None)]
            return await asyncio.gather(*(engine.generate(one, NOWHERE) for one in requests))
        finally:
            await engine.stop()

    bad, base = asyncio.run(asyncio.wait_for(story(), PATIENCE_S))
    assert len(base.sequences[0].tokens) == NUM_TOKENS
    ending = bad.sequences[0].ending
    assert isinstance(ending, Failed)
    assert ending.kind is ErrorKind.ADAPTER_UNSUPPORTED
    assert "adapter 'dora' of the merge: use_dora" in ending.message
