"""Classification heads of decoders and of adapters: as transformers and PEFT, in mixed batches."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.architectures.classifiers import up_to_score
from configs.engine import EngineConfig
from configs.wire.sampling import Pooling, Sampling
from modeling.runner.adapter_check import AdapterVerdict, adaptable, judge
from modeling.runner.load_paged import load_paged
from sharding.group import TensorParallel
from tests.checkpoints_scores import (
    adapted_classifier,
    scores,
    write_classifier,
    write_feature_adapter,
    write_score_adapter,
)
from tests.modeling.parity.comparison import (
    BASE,
    BLOCK_SIZE,
    NUM_BLOCKS,
    Setting,
    World,
    engine_config,
    place_all,
    poison,
)
from tests.modeling.prompts import prompt_of
from tests.modeling.stepping import Answer, Asked, generate
from tests.oracle import TOLERANCE, final_states, prompt_truth
from tests.ranks import run_in_memory, run_ranks
from tests.sweeps import swept

VOCAB = 96
SCORED = Sampling(pooling=Pooling.SCORE)
pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")


def vector_of(answer: Answer) -> torch.Tensor:
    found = [told.embedding for told in answer.prompts if told.embedding]
    assert len(found) == 1, "scores are told once"
    return torch.from_numpy(np.frombuffer(found[0], dtype="<f4").copy())


def answers_of(
    config: EngineConfig, adapters: Sequence[Path], asked: list[Asked], group: TensorParallel
) -> list[Answer]:
    runner = load_paged(config, group, torch.device("cpu")).allocate()
    poison(runner)
    place_all(runner, adapters)
    answers = generate(runner, asked, NUM_BLOCKS, BLOCK_SIZE)
    runner.check()
    return answers


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_with_heads_beside_generation(world: World, ranks: int) -> None:
    compare_heads(world, ("llama", "gqa"), ranks)


def compare_heads(world: World, kind: tuple[str, str], ranks: int) -> None:
    """Over a model that generates: heads of 3 and 11 labels, other adapters, and the base."""
    model = world.model(*kind)
    heads = [model.parent / f"labels-{n}" for n in (3, 11)]
    for head, labels in zip(heads, (3, 11), strict=True):
        if not head.exists():
            write_score_adapter(head, model, labels)
    other = world.adapter(*kind, "rows")
    assert other is not None
    told = [prompt_truth(model, folder, 9 + 5 * i) for i, folder in enumerate((other, None))]
    prompts = [*(prompt for prompt, _ in told), prompt_of(19, VOCAB)]
    asked = [
        Asked(prompts[0], 5, 2, Sampling(), 4),
        *[
            Asked(prompt, 0, slot, SCORED, chunk, chunk)
            for prompt in prompts
            for slot, chunk in ((0, 4), (1, 100))
        ],
        Asked(prompts[1], 5, -1),
        Asked(prompts[1], 0, -1, SCORED),
    ]
    run = partial(answers_of, engine_config(model), [*heads, other], asked)
    models = [adapted_classifier(model, head) for head in heads]
    seen = world.record.begin(Setting(*kind, ranks, ["score", BASE]), model)
    for answers in run_ranks(ranks, run):
        assert answers[0].tokens == told[0][1].tokens[:5]
        assert answers[7].tokens == told[1][1].tokens[:5]
        assert not any(one.embedding for one in answers[8].prompts)
        for question, answer in zip(asked[1:7], answers[1:7], strict=True):
            expected = scores(models[question.slot], question.prompt)
            assert expected.std() > 100 * TOLERANCE
            torch.testing.assert_close(vector_of(answer), expected, atol=TOLERANCE, rtol=0)
    seen.right |= {"score", BASE}


@pytest.mark.parametrize("family", ["llama", "gpt2", "opt", "gpt_neox"])
def test_classifiers_of_the_families(world: World, tmp_path: Path, family: str) -> None:
    """A base model with a head: by itself, under an adapter without one, and under one with."""
    variant = {"llama": "gqa", "gpt2": "untied", "opt": "projected", "gpt_neox": "tied"}[family]
    check_classifier(world.model(f"{family}_copies", variant), tmp_path)


@pytest.mark.parametrize(
    "kind", swept(["gemma2", "qwen2_moe", "phi", "gemma3_text"], lambda kind: kind == "phi")
)
def test_classifiers_of_transformers_modules(world: World, tmp_path: Path, kind: str) -> None:
    check_classifier(world.model("generic", kind), tmp_path)


@pytest.mark.parametrize(
    "variant",
    swept(["bloom", "falcon_groups", "gpt_neo", "gptj", "mpt"], lambda variant: variant == "bloom"),
)
def test_classifiers_with_attention_of_their_own(
    world: World, tmp_path: Path, variant: str
) -> None:
    check_classifier(world.model("own", variant), tmp_path)


def check_classifier(causal: Path, folder: Path) -> None:
    model = write_classifier(folder / "base", causal, 4, pad_token_id=None)
    adapters = [write_score_adapter(folder / "head", model, 2)]
    prompt = prompt_of(11, VOCAB)
    asked = [Asked(prompt, 0, slot, SCORED, 5) for slot in (-1, 0)]
    for answers in run_in_memory(2, partial(answers_of, engine_config(model), adapters, asked)):
        for answer, adapter in zip(answers, (None, *adapters), strict=True):
            expected = scores(adapted_classifier(model, adapter), prompt)
            assert expected.std() > 100 * TOLERANCE
            torch.testing.assert_close(vector_of(answer), expected, atol=TOLERANCE, rtol=0)


def test_adapters_of_a_model_without_a_head(world: World, tmp_path: Path) -> None:
    """FEATURE_EXTRACTION: their files lack the decoder's own name in the paths."""
    model = world.model("llama", "gqa")
    adapter = write_feature_adapter(tmp_path / "it", model, ["q_proj", "down_proj"])
    prompt = prompt_of(9, VOCAB)
    asked = [Asked(prompt, 0, 0, Sampling(pooling=Pooling.LAST), 4)]
    [[answer]] = run_in_memory(1, partial(answers_of, engine_config(model), [adapter], asked))
    from peft import PeftModel
    from transformers import AutoModel

    oracle = PeftModel.from_pretrained(AutoModel.from_pretrained(model), str(adapter)).eval()
    with torch.no_grad():
        expected = oracle(torch.tensor([prompt])).last_hidden_state[0, -1]
    torch.testing.assert_close(vector_of(answer), expected, atol=TOLERANCE, rtol=0)
    assert (expected - final_states(model, None, prompt)[-1]).abs().max() > 100 * TOLERANCE


@pytest.mark.parametrize("ids", [[5, 9, 0], [0, 5, 9, 0, 0, 7], [7, 0, 0], [0, 0], [0, 5]])
def test_the_token_that_is_read(world: World, tmp_path: Path, ids: list[int]) -> None:
    """transformers' rule of the padding token, which text may hold."""
    model = write_classifier(tmp_path / "it", world.model("llama", "gqa"), 3, pad_token_id=0)
    oracle = adapted_classifier(model, None)
    read = up_to_score(ids, 0)
    asked = [Asked(read, 0, -1, SCORED)]
    [[answer]] = run_in_memory(1, partial(answers_of, engine_config(model), [], asked))
    expected = scores(oracle, ids)
    torch.testing.assert_close(vector_of(answer), expected, atol=TOLERANCE, rtol=0)


def test_they_are_judged_without_a_server(world: World, tmp_path: Path) -> None:
    model = world.model("llama", "gqa")
    folder = write_score_adapter(tmp_path / "it", model, 11)
    config = engine_config(model)

    def judged() -> AdapterVerdict:
        return judge(folder, adaptable(config), config.adapters, lambda *_: None)

    assert (judged().reasons, judged().rank, judged().num_labels) == ((), 4, 11)
    tensors = load_file(folder / "adapter_model.safetensors")
    head = tensors.pop("base_model.model.score.weight")
    for wrong in (head[:, :-1], head[0], head.fill_(float("nan")), None):
        own = {} if wrong is None else {"base_model.model.score.weight": wrong.contiguous()}
        save_file({**tensors, **own}, folder / "adapter_model.safetensors")
        assert len(judged().reasons) == 1, judged().reasons
        assert "score.weight" in judged().reasons[0]


def test_a_head_of_another_kind_is_refused(world: World, tmp_path: Path) -> None:
    model = world.model("llama", "gqa")
    folder = write_score_adapter(tmp_path / "it", model, 2)
    file = folder / "adapter_model.safetensors"
    save_file({**load_file(file), "base_model.model.classifier.weight": torch.ones(2, 32)}, file)
    config = engine_config(model)
    found = judge(folder, adaptable(config), config.adapters, lambda *_: None).reasons
    assert "modules_to_save=['classifier'] is not served here" in found[0]
