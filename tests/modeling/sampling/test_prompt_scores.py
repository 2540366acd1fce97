"""Prompt logprobs and embeddings of the paged runner are those of transformers and PEFT."""

from functools import partial
from pathlib import Path

import pytest
import torch

from configs.engine import EngineConfig
from configs.wire.plan import RequestJoin, StepRow
from configs.wire.sampling import Pooling, Sampling
from modeling.batch import ForwardBatch
from modeling.runner.load_paged import load_paged
from modeling.sampling import prompt_scores as prompts
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import LLAMA
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    WHOLE,
    Setting,
    World,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.prompts import Prompts, check_answers, prompt_of, questions
from tests.modeling.runner.test_cuda_graphs import capture_on_cpu
from tests.modeling.stepping import Answer, Asked, generate
from tests.ranks import run_ranks
from tests.sweeps import swept, swept_rows

VOCAB = 96
CPU = torch.device("cpu")

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")


@pytest.fixture(autouse=True)
def short_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """Four positions a slice, so that chunks take several."""
    monkeypatch.setattr(prompts, "SLICE_BYTES", 4 * 4 * VOCAB)


def compare(world: World, setting: Setting) -> None:
    family, variant = setting.family, setting.variant
    model = world.model(family, variant)
    given: Prompts = [
        (world.adapter(family, variant, name), prompt_of(9 + 4 * i, VOCAB))
        for i, name in enumerate(setting.names)
    ]
    adapters = [folder for folder, _ in given if folder is not None]
    requests = questions(given, setting.chunk, setting.rejoins_at)
    config = engine_config(model)
    ends = {"vocabulary": setting.vocabulary, "vocabulary_copies": setting.copies}
    opened = config.adapters.model_copy(update=ends)
    config = config.model_copy(update={"adapters": opened})
    for answers in run_ranks(setting.ranks, partial(_answers, config, adapters, requests)):
        check_answers(model, given, requests, answers)


def _answers(
    config: EngineConfig, adapters: list[Path], requests: list[Asked], group: TensorParallel
) -> list[Answer]:
    runner = load_paged(config, group, CPU).allocate()
    poison(runner)
    place_all(runner, adapters)
    answers = generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE)
    runner.check()
    return answers


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_in_chunks_and_mixed_batches(world: World, ranks: int) -> None:
    compare(world, Setting("llama", "gqa", ranks, [BASE, "r8", "rows"]))


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_after_preemption(world: World, ranks: int) -> None:
    """A request preempted while it generates reports its prompt once more."""
    compare(world, Setting("llama", "gqa", ranks, [BASE, "columns"], rejoins_at=2))


@pytest.mark.parametrize("ranks", swept([1, 2], lambda ranks: ranks == 2))
def test_adapters_on_embedding_and_head(world: World, ranks: int) -> None:
    names = [BASE, "everything", "head"]
    compare(world, Setting("vocabulary", "tied", ranks, names, vocabulary=True))


def test_whole_heads_and_embeddings_of_adapters(world: World) -> None:
    names = [BASE, "whole_head", "whole_embedding"]
    compare(world, Setting("gpt2_ends", "plain", 2, names, vocabulary=True, copies=2))


def test_whole_prompts(world: World) -> None:
    compare(world, Setting("llama", "gqa", 1, ["r8", BASE, "r24"], chunk=WHOLE))


@pytest.mark.parametrize(
    ("family", "variant"),
    swept_rows(
        [("gpt2", "plain"), ("opt", "plain"), ("gpt_neox", "parallel"), ("relative", "granite")],
        lambda family, _: family in ("gpt2", "relative"),
    ),
)
def test_other_families(world: World, family: str, variant: str) -> None:
    compare(world, Setting(family, variant, 2, [BASE, "r16"]))


def test_logits_are_read_in_slices_and_only_for_rows_that_need_them(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = load_paged(engine_config(world.model("llama", "gqa")), SingleRank(), CPU).allocate()
    seen: list[int] = []
    model = runner._forward.model
    head = model.head

    def watched(hidden: torch.Tensor, adapter_data: object) -> torch.Tensor:
        seen.append(len(hidden))
        return head(hidden, None)

    monkeypatch.setattr(model, "head", watched)
    scored = Sampling(prompt_logprobs=0)
    joins = [
        RequestJoin(0, prompt_of(12, VOCAB), 12, -1, Sampling()),
        RequestJoin(1, prompt_of(11, VOCAB), 11, -1, scored),
    ]
    rows = [StepRow(0, 0, 12, [0], True), StepRow(1, 0, 11, [1], True)]
    runner.step(ForwardBatch(joins, rows)).wait()
    assert seen == [4, 4, 2, 2], "ten positions of the prompt in slices, then two samples"
    seen.clear()
    decode = [StepRow(0, 12, 1, [], True), StepRow(1, 11, 1, [], True)]
    assert runner.step(ForwardBatch([], decode)).wait().reports is None
    assert seen == [2], "the prompt is over: nothing but the samples"


def test_a_slot_forgets_the_sum_of_an_ended_request(world: World) -> None:
    runner = load_paged(engine_config(world.model("llama", "gqa")), SingleRank(), CPU).allocate()
    pooled = Sampling(pooling=Pooling.MEAN)

    def embed(prompt: list[int], rows: list[StepRow]) -> bytes:
        joins = [RequestJoin(0, prompt, len(prompt), -1, pooled)]
        for row in rows:
            found = runner.step(ForwardBatch(joins, [row])).wait().reports
            joins = []
        assert found is not None
        return found[0].embedding

    prompt = prompt_of(8, VOCAB)
    alone = embed(prompt, [StepRow(0, 0, 4, [0], False), StepRow(0, 4, 4, [], False)])
    assert embed(prompt_of(9, VOCAB), [StepRow(0, 0, 5, [1], False)]) == b""
    assert embed(prompt, [StepRow(0, 0, 4, [2], False), StepRow(0, 4, 4, [], False)]) == alone


def test_the_vocabulary_is_the_checkpoints() -> None:
    assert LLAMA["vocab_size"] == VOCAB


def test_beside_captured_steps(world: World) -> None:
    """Steps that report about prompts are not captured; those of generating rows still are."""
    model = world.model("llama", "gqa")
    runner = load_paged(engine_config(model), SingleRank(), CPU).allocate()
    given: Prompts = [
        (world.adapter("llama", "gqa", name), prompt_of(9 + 4 * i, VOCAB))
        for i, name in enumerate([BASE, "r8"])
    ]
    place_all(runner, [folder for folder, _ in given if folder is not None])
    runner._decode_graphs = capture_on_cpu(runner)
    requests = questions(given, 1, rejoins_at=2)
    check_answers(model, given, requests, generate(runner, requests, NUM_BLOCKS, BLOCK_SIZE))
    assert 0 < runner.num_captured < runner.num_steps


@pytest.mark.parametrize("pooling", [Pooling.MEAN, Pooling.MAX, Pooling.CLS, Pooling.LAST])
def test_a_part_outlives_the_memory_of_its_step(pooling: Pooling) -> None:
    """Captured steps write their hidden states to the same memory, one after the other."""
    reader = prompts.PromptReader(VOCAB, CPU, prompts.no_heads)
    states = torch.randn(7, 5, generator=torch.Generator().manual_seed(1))
    hidden = torch.empty(4, 5)
    found = None
    for start, end in ((0, 4), (4, 7)):
        hidden[: end - start] = states[start:end]
        row = prompts.PromptRow(0, 3, 0, 0, start, end, 7, Sampling(pooling=pooling))
        found = reader.read([row], hidden, torch.zeros(0), lambda *_: torch.zeros(0)).vectors
        hidden[:] = torch.nan if start == 0 else hidden
    assert found is not None
    torch.testing.assert_close(found[0], prompts.pooled(states, pooling))
