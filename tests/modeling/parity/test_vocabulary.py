"""Adapters of embedding and head against PEFT, on vocabularies that the ranks cut unevenly."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.wire.adapters import AdapterError, AdapterKey, AdapterRefusal, FetchedAdapter
from modeling.adapters import vocabulary
from modeling.runner.load_paged import load_paged
from modeling.runner.paged import ModelRunner
from sharding.embedding import ParallelHead, VocabParallelEmbedding
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.modeling.parity.comparison import (
    BASE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
    place_all,
)
from tests.sweeps import swept, swept_rows

pytestmark = pytest.mark.filterwarnings("ignore:Model has `tie_word_embeddings=True`:UserWarning")

NAMES = [BASE, "r8", "head", "embedding", "everything", "ends"]
OPEN = AdaptersConfig(
    device_pages=40, max_device_adapters=10, max_rank=64, host_bytes=2**26, vocabulary=True
)


def setting(variant: str, ranks: int, names: list[str], family: str = "vocabulary") -> Setting:
    return Setting(family, variant, ranks, names, vocabulary=True)


@pytest.mark.parametrize("name", NAMES)
def test_alone(world: World, name: str) -> None:
    compare(world, setting("gqa", 1, [name]))


@pytest.mark.parametrize(
    ("variant", "ranks"),
    swept_rows(
        product(("gqa", "tied", "odd_vocab", "odd_vocab_tied"), (1, 2, 4)),
        lambda *row: row in {("gqa", 1), ("odd_vocab", 4), ("odd_vocab_tied", 2)},
    ),
)
def test_together(world: World, variant: str, ranks: int) -> None:
    """Rows with and without such adapters in one batch, prompts in chunks beside decodes."""
    compare(world, setting(variant, ranks, NAMES))


@pytest.mark.parametrize("variant", swept(["granite", "qwen2"], lambda v: v == "granite"))
def test_multipliers_come_after_the_deltas(world: World, variant: str) -> None:
    compare(world, setting(variant, 2, NAMES, "vocabulary_relative"))


@pytest.mark.parametrize("end", ["embed", "logits"])
def test_a_delta_left_out_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    monkeypatch.setattr(vocabulary.VocabularyAdapters, end, lambda *args: None)
    expect_mismatch(world, setting("gqa", 1, ["everything"]))


def test_an_embedding_delta_after_the_sum_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def after(base: VocabParallelEmbedding, input_ids: Tensor, adapter_data: Any) -> Tensor:
        y: Tensor = base(input_ids)
        if isinstance(adapter_data, vocabulary.VocabularyAdapters):
            adapter_data.embed(y, *base.local_ids(input_ids))
        return y

    monkeypatch.setattr("modeling.models.paged_base.embed_adapted", after)
    expect_mismatch(world, setting("gqa", 2, ["embedding"]))


def test_a_head_delta_on_the_neighbours_columns_is_noticed(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    gather = ParallelHead.gather
    monkeypatch.setattr(ParallelHead, "gather", lambda self, z: gather(self, z.roll(1, dims=1)))
    expect_mismatch(world, setting("odd_vocab", 4, ["head"]))


def runner_for(folder: Path, adapters: AdaptersConfig = OPEN) -> ModelRunner:
    config = engine_config(folder, adapters=adapters)
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    return runner


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_llama(tmp_path / "model")


def written(model: Path, **fields: Any) -> Path:
    targets = ("q_proj", "embed_tokens", "lm_head")
    recipe = AdapterRecipe(target_modules=targets, save_embeddings=True, **fields)
    return write_adapter(model.parent / "adapter", model, recipe)


def refusal(runner: ModelRunner, folder: Path) -> str:
    with pytest.raises(AdapterError) as caught:
        runner.stage(FetchedAdapter(AdapterKey(1), "a", str(folder), "a"))
    assert caught.value.refusal is AdapterRefusal.UNSUPPORTED
    return caught.value.message


def change_tensors(folder: Path, **changes: Tensor | None) -> None:
    path = folder / "adapter_model.safetensors"
    tensors: dict[str, Tensor | None] = {**load_file(path)}
    for end, tensor in changes.items():
        (key,) = (key for key in tensors if key.endswith(end.replace("__", ".")))
        tensors[key] = tensor
    save_file({key: value for key, value in tensors.items() if value is not None}, path)


def add_tensors(folder: Path, tensors: dict[str, Tensor]) -> None:
    path = folder / "adapter_model.safetensors"
    save_file({**load_file(path), **tensors}, path)


def test_a_server_that_was_not_opened_says_how(model: Path) -> None:
    closed = OPEN.model_copy(update={"vocabulary": False})
    message = refusal(runner_for(model, closed), written(model))
    assert "start the server with adapters.vocabulary true" in message


def test_a_whole_embedding_is_refused_by_an_open_server_too(model: Path) -> None:
    folder = written(model)
    whole = {"base_model.model.model.embed_tokens.weight": torch.zeros(96, 32)}
    add_tensors(folder, whole)
    message = refusal(runner_for(model), folder)
    assert "embed_tokens.weight is not this model's weight" in message
    assert "name it in modules_to_save" in message


def test_whole_matrices_are_told_to_the_scheduler(model: Path) -> None:
    runner = runner_for(model, OPEN.model_copy(update={"vocabulary_copies": 3}))
    report = runner.report
    tokens = ("embed_tokens.tokens", "lm_head.tokens")
    assert report.projections[-6:-2] == ("embed_tokens.whole", "lm_head.whole", *tokens)
    assert report.projections[-2:] == ("score", "norms")
    assert report.pool_pages == (*[40] * 9, 3, 3, *[40] * 3, 10)
    recipe = AdapterRecipe(target_modules=["q_proj"], extra={"modules_to_save": ["lm_head"]})
    folder = write_adapter(model.parent / "whole", model, recipe)
    shape = runner.stage(FetchedAdapter(AdapterKey(2), "b", str(folder), "b"))
    assert shape.num_pages == (1, *[0] * 9, 1, 0, 0, 0, 0)
    assert shape.host_bytes >= 96 * 32 * 4


def test_pools_are_told_to_the_scheduler(model: Path) -> None:
    config = engine_config(model, adapters=OPEN)
    report = load_paged(config, SingleRank(), torch.device("cpu")).allocate().report
    tokens = ("embed_tokens.tokens", "lm_head.tokens")
    assert report.projections[-6:] == ("embed_tokens", "lm_head", *tokens, "score", "norms")
    runner = runner_for(model)
    shape = runner.stage(FetchedAdapter(AdapterKey(1), "a", str(written(model, r=12)), "a"))
    assert shape.num_pages == (2, 0, 0, 0, 0, 0, 0, 2, 2, 0, 0, 0, 0)
    recipe = AdapterRecipe(extra={"trainable_token_indices": [*range(9)]})
    folder = write_adapter(model.parent / "tokens", model, recipe)
    shape = runner.stage(FetchedAdapter(AdapterKey(2), "b", str(folder), "b"))
    assert shape.num_pages == (*[1] * 7, 0, 0, 2, 0, 0, 0)
    few = runner_for(model, OPEN.model_copy(update={"device_pages": 1}))
    with pytest.raises(AdapterError, match=r"needs 2 pages of embed_tokens\.tokens") as refused:
        few.stage(FetchedAdapter(AdapterKey(2), "b", str(folder), "b"))
    assert refused.value.refusal is AdapterRefusal.TOO_LARGE


def test_trained_tokens_are_captured_up_to_the_largest_rank(model: Path) -> None:
    runner = runner_for(model, OPEN.model_copy(update={"max_rank": 8}))
    recipes = [AdapterRecipe(extra={"trainable_token_indices": [*range(n)]}) for n in (8, 9)]
    places = [model.parent / name for name in "ab"]
    folders = [write_adapter(*each) for each in zip(places, [model] * 2, recipes, strict=True)]
    place_all(runner, folders)
    found = [vocabulary.needs_launches(runner._bank, [-1, slot]) for slot in (-1, 0, 1)]
    assert found == [False, False, True]


def test_a_trained_copy_of_the_base_weight_is_refused(model: Path) -> None:
    folder = written(model)
    copy = load_file(folder / "adapter_model.safetensors")
    (key,) = (key for key in copy if key.endswith("embed_tokens.base_layer.weight"))
    copy[key][77, 3] += 1
    change_tensors(folder, embed_tokens__base_layer__weight=copy[key])
    message = refusal(runner_for(model), folder)
    assert "embed_tokens.base_layer.weight is not this model's weight" in message


def test_a_resized_vocabulary_is_refused(model: Path) -> None:
    folder = written(model)
    change_tensors(folder, lm_head__base_layer__weight=torch.zeros(99, 32))
    assert "lm_head.base_layer.weight has shape [99, 32]" in refusal(runner_for(model), folder)


@pytest.mark.parametrize("end", ["lm_head__lora_A__weight", "embed_tokens__lora_embedding_B"])
def test_half_an_end_is_refused(model: Path, end: str) -> None:
    folder = written(model)
    change_tensors(folder, **{end: None})
    message = refusal(runner_for(model), folder)
    assert f"{end.replace('__', '.')} is missing beside its partner" in message


def test_whole_weights_in_place_of_factors_are_refused(model: Path) -> None:
    folder = written(model)
    path = folder / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "modules_to_save": ["lm_head"]}))
    add_tensors(folder, {"base_model.model.lm_head.weight": torch.zeros(96, 32)})
    message = refusal(runner_for(model), folder)
    assert message.startswith("modules_to_save=['lm_head'] is not served here")
    assert "adapters.vocabulary_copies above 0" in message
