"""What an operator is told of an adapter before a server sees it, and that servers agree."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.adapters import AdaptersConfig
from configs.engine import EngineConfig
from configs.model import ModelConfig
from configs.wire.adapters import AdapterError
from modeling.adapters.peft.folder import open_adapter
from modeling.runner.adapter_check import AdapterVerdict, adaptable, judge
from modeling.runner.loading import load_model
from sharding.group import SingleRank
from tests.checkpoints import AdapterRecipe, write_adapter, write_llama
from tests.checkpoints_others import write_gpt2, write_gpt_neox, write_opt
from tests.checkpoints_padded import write_padded
from tests.modeling.adapters.lora_files import DOWN, UP, factors, write_lora

CONFIG = AdaptersConfig(max_rank=8)
TWO = (UP, DOWN)


def verdict(folder: Path) -> AdapterVerdict:
    return judge(folder, TWO, CONFIG, lambda done, total: None)


def test_a_good_adapter_is_served_and_read_to_its_end(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "good", factors(UP, [4, 4, 0]) | factors(DOWN, [0, 4, 4]))
    seen: list[tuple[int, int]] = []
    found = judge(folder, TWO, CONFIG, lambda done, total: seen.append((done, total)))
    assert found == AdapterVerdict((), num_modules=4, rank=4)
    assert seen == [(1, 4), (2, 4), (3, 4), (4, 4)]


def test_every_field_that_is_not_served_is_named_at_once(tmp_path: Path) -> None:
    folder = write_lora(
        tmp_path / "many",
        factors(UP, [4, 4, 4]),
        use_dora=True,
        megatron_config={"a": 1},
        layer_replication=[[0, 2]],
    )
    found = verdict(folder)
    assert len(found.reasons) == 3
    for word in ("use_dora", "megatron_config", "layer_replication"):
        assert any(word in reason for reason in found.reasons)


def test_tensors_are_judged_although_the_config_is_refused(tmp_path: Path) -> None:
    stranger = {"base_model.model.other.lora_A.weight": torch.ones(4, 6)}
    folder = write_lora(tmp_path / "both", factors(UP, [4, 4, 4]) | stranger, use_qalora=True)
    config, tensors = verdict(folder).reasons
    assert "use_qalora" in config
    assert "base_model.model.other" in tensors


def test_values_are_read(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "nan", factors(DOWN, [4, 4, 4]))
    path = folder / "adapter_model.safetensors"
    tensors = load_file(path)
    tensors["base_model.model.model.layers.2.down.lora_B.weight"][1, 1] = float("nan")
    save_file(tensors, path)
    [reason] = verdict(folder).reasons
    assert "layers.2.down.lora_B" in reason


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda folder: (folder / "adapter_config.json").unlink(), "adapter_config.json"),
        (lambda folder: (folder / "adapter_config.json").write_text("{"), "not valid JSON"),
        (lambda folder: (folder / "adapter_config.json").write_text("[]"), "must hold an object"),
        (lambda folder: (folder / "adapter_model.safetensors").unlink(), "safetensors"),
        (lambda folder: (folder / "adapter_config.json").write_text('{"r": 4}'), "peft_type"),
    ],
)
def test_files_that_are_not_there_or_say_nothing(
    spoil: Callable[[Path], object], words: str, tmp_path: Path
) -> None:
    folder = write_lora(tmp_path / "spoilt", factors(UP, [4, 4, 4]))
    spoil(folder)
    [reason] = verdict(folder).reasons
    assert words in reason


def test_a_rank_that_the_server_does_not_take(tmp_path: Path) -> None:
    folder = write_lora(tmp_path / "wide", factors(UP, [9, 9, 9]), r=9)
    [reason] = verdict(folder).reasons
    assert "max_rank 8" in reason


def test_whoever_is_refused_here_is_refused_by_the_reader(tmp_path: Path) -> None:
    for name, fields in {"dora": {"use_dora": True}, "plain": {}}.items():
        folder = write_lora(tmp_path / name, factors(UP, [4, 4, 4]), **fields)
        refused = False
        try:
            open_adapter(folder, TWO, CONFIG.max_rank)
        except AdapterError:
            refused = True
        assert bool(verdict(folder).reasons) == refused


@pytest.mark.parametrize("vocabulary", [False, None])
@pytest.mark.parametrize("write", [write_llama, write_gpt2, write_opt, write_gpt_neox])
def test_the_model_is_judged_as_it_is_served(
    write: Callable[[Path], Path], vocabulary: bool | None, tmp_path: Path
) -> None:
    config = EngineConfig(
        model=ModelConfig(id=str(write(tmp_path / "model"))),
        adapters=AdaptersConfig(vocabulary=vocabulary),
    )
    loaded = load_model(config, SingleRank(), torch.device("cpu"))
    assert adaptable(config) == loaded.model.projections


def test_a_model_in_transformers_code_is_tried_out(tmp_path: Path) -> None:
    folder = write_padded(tmp_path / "model", "gemma2")
    names = {p.name for p in adaptable(EngineConfig(model=ModelConfig(id=str(folder))))}
    assert {"q_proj", "down_proj"} <= names


def test_trained_tokens_over_a_padded_model_are_refused_for_that_alone(tmp_path: Path) -> None:
    """The adapter is for no other base model."""
    model = write_padded(tmp_path / "model", "falcon_alibi")
    rows = {"trainable_token_indices": [3, 5]}
    recipe = AdapterRecipe(target_modules=("query_key_value",), extra=rows)
    folder = write_adapter(tmp_path / "it", model, recipe)
    config = EngineConfig(model=ModelConfig(id=str(model)))
    found = judge(folder, adaptable(config), config.adapters, lambda done, total: None)
    [reason] = found.reasons
    assert reason.startswith("trainable_token_indices")


def test_an_embedding_by_another_name_is_refused_with_the_setting(tmp_path: Path) -> None:
    model = write_padded(tmp_path / "model", "bloom")
    recipe = AdapterRecipe(target_modules=("word_embeddings",), save_embeddings=False)
    folder = write_adapter(tmp_path / "it", model, recipe)
    settings = AdaptersConfig(vocabulary=False)
    config = EngineConfig(model=ModelConfig(id=str(model)), adapters=settings)
    found = judge(folder, adaptable(config), settings, lambda done, total: None)
    assert found.reasons
    assert all("adapters.vocabulary true" in reason for reason in found.reasons)


def test_weights_of_a_paged_model_are_not_needed(tmp_path: Path) -> None:
    folder = write_llama(tmp_path / "model")
    for path in folder.glob("*.safetensors"):
        path.unlink()
    names = {p.name for p in adaptable(EngineConfig(model=ModelConfig(id=str(folder))))}
    assert {"q_proj", "down_proj"} <= names
