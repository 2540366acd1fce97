"""Adapters saved with save_embedding_layers: copies of the ends' weights, on a default server."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.adapters import AdaptersConfig
from configs.model import DType, ModelConfig
from configs.wire.adapters import AdapterError, AdapterKey, FetchedAdapter
from modeling.runner.adapter_check import adaptable, base_tensors, judge
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank, TensorParallel
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.checkpoints_padded import write_padded
from tests.checkpoints_stacks import LANGUAGE
from tests.modeling.padded import PaddedWorld, compare_padded, padded_runner
from tests.modeling.parity.comparison import (
    BASE,
    COPIES,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
)
from tests.ranks import run_in_memory
from tests.sweeps import swept, swept_rows

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")

SHAPES = [
    ("llama_copies", "gqa"),
    ("llama_copies", "tied"),
    ("llama_copies", "odd_vocab"),
    ("llama_copies", "odd_vocab_tied"),
    ("gpt2_copies", "untied"),
    ("gpt2_copies", "odd_vocab"),
    ("opt_copies", "projected"),
    ("gpt_neox_copies", "tied"),
]


SUITE = {
    ("llama_copies", "odd_vocab", 2),
    ("gpt2_copies", "untied", 1),
    ("opt_copies", "projected", 2),
}
"""Each form of the ends once; whole vocabularies and cut ones."""


@pytest.mark.parametrize(
    ("family", "variant", "ranks"),
    swept_rows(((*shape, n) for shape in SHAPES for n in (1, 2, 4)), lambda *row: row in SUITE),
)
def test_copies_that_say_nothing_new_are_served(
    world: World, family: str, variant: str, ranks: int
) -> None:
    compare(world, Setting(family, variant, ranks, [BASE, *COPIES]))


def test_so_are_those_of_a_padded_model(tmp_path: Path) -> None:
    """GPT-J's head has a bias, which is saved with it."""
    padded = PaddedWorld(tmp_path)
    for kind in ("gptj", "gemma2"):
        recipe = AdapterRecipe(target_modules=("q_proj",), save_embeddings=True)
        folder = write_adapter(tmp_path / kind / "saved", padded.model(kind), recipe)
        assert any("lora" not in key for key in tensors_of(folder))
        compare_padded(padded, Setting("padded", kind, 1, [BASE, "saved"], chunk=WHOLE))
        change(folder, -1, lambda tensor: tensor + 1)
        with pytest.raises(AdapterError, match="is not this model's weight"):
            padded_runner(padded.model(kind), [folder])


def tensors_of(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "adapter_model.safetensors")


def change(folder: Path, index: int, edit: Callable[[Tensor], Tensor]) -> str:
    """Edit one of the copies, by its place in the alphabet; returns its name."""
    tensors = tensors_of(folder)
    key = sorted(key for key in tensors if ".lora_" not in key)[index]
    tensors[key] = edit(tensors[key]).contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    return key


def staged(model: Path, folder: Path, ranks: int, dtype: DType = DType.AUTO) -> list[str]:
    """What each rank says to the adapter; "" where it takes it."""

    def stage(group: TensorParallel) -> str:
        config = engine_config(model, model=ModelConfig(id=str(model), dtype=dtype))
        runner = load_paged(config, group, torch.device("cpu")).allocate()
        try:
            runner.stage(FetchedAdapter(AdapterKey(1), "it", str(folder), "it"))
        except AdapterError as error:
            return error.message
        return ""

    return run_in_memory(ranks, stage)


@pytest.mark.parametrize("save_embeddings", [True, False])
def test_a_whole_heads_bias_is_a_copy(tmp_path: Path, save_embeddings: bool) -> None:
    """PEFT saves it three times where it saves embeddings, and reads one of them."""
    model = write_padded(tmp_path / "model", "gptj")
    recipe = AdapterRecipe(
        save_embeddings=save_embeddings,
        target_modules=("q_proj",),
        extra={"modules_to_save": ["lm_head"]},
    )
    folder = write_adapter(tmp_path / "it", model, recipe)
    bias = load_file(model / "model.safetensors")["lm_head.bias"]
    tensors = tensors_of(folder)
    names = [key for key in tensors if key.endswith(".bias")]
    assert len(names) == (3 if save_embeddings else 1)
    tensors.update({key: bias.clone() for key in names})
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    opened = engine_config(model).adapters.model_copy(update={"vocabulary_copies": 1})
    config = engine_config(model, adapters=opened)
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    assert runner.stage(FetchedAdapter(AdapterKey(1), "it", str(folder), "it"))


def test_a_heads_bias_that_was_trained_is_named(tmp_path: Path) -> None:
    """No setting serves it, and modules_to_save, which has the whole head, is no remedy."""
    model = write_padded(tmp_path / "model", "gptj")
    saved = {"modules_to_save": ["lm_head"]}
    folder = write_adapter(tmp_path / "it", model, AdapterRecipe(extra=saved))
    key = change(folder, 0, lambda tensor: tensor + 1)
    assert key.endswith("lm_head.bias")
    opened = engine_config(model).adapters.model_copy(update={"vocabulary_copies": 1})
    config = engine_config(model, adapters=opened)
    base = base_tensors(config, folder)
    [reason] = judge(folder, adaptable(config, base), opened, lambda *_: None, base).reasons
    assert "is not this model's bias" in reason
    assert "merge it" in reason


@pytest.mark.parametrize("ranks", swept([1, 2, 4], lambda ranks: ranks == 2))
@pytest.mark.parametrize("index", [0, 1])
@pytest.mark.parametrize("row", [0, -1])
def test_one_other_number_in_a_copy_is_noticed(
    world: World, tmp_path: Path, ranks: int, index: int, row: int
) -> None:
    model = world.model("llama_copies", "odd_vocab")
    folder = write_adapter(tmp_path / "it", model, AdapterRecipe(save_embeddings=True))

    def edit(tensor: Tensor) -> Tensor:
        tensor[row, -1] += 0.5
        return tensor

    key = change(folder, index, edit)
    found = staged(model, folder, ranks)
    assert any(f"{key} is not this model's weight" in message for message in found)
    # Each rank judges its own rows: only those of the changed one say so.
    assert sum(map(bool, found)) == 1


def test_copies_of_another_vocabulary_are_refused(world: World, tmp_path: Path) -> None:
    model = world.model("llama_copies", "gqa")
    folder = write_adapter(tmp_path / "it", model, AdapterRecipe(save_embeddings=True))
    change(folder, 0, lambda tensor: tensor[:-1])
    [message] = staged(model, folder, 1)
    assert "the vocabulary was resized" in message
    assert "resize_token_embeddings(95)" in message


@pytest.mark.parametrize("dtype", [DType.BFLOAT16, DType.FLOAT16])
def test_copies_are_compared_in_the_servers_type(
    world: World, tmp_path: Path, dtype: DType
) -> None:
    """PEFT would load them into weights of that type."""
    model = world.model("llama_copies", "gqa")
    folder = write_adapter(tmp_path / "it", model, AdapterRecipe(save_embeddings=True))
    assert staged(model, folder, 1, dtype) == [""]
    change(folder, 0, lambda tensor: tensor.to(getattr(torch, dtype.value)))
    assert staged(model, folder, 1, dtype) == [""]


def test_so_are_a_larger_models_where_adapters_change_no_vocabulary(
    world: World, tmp_path: Path
) -> None:
    """Files name them as the larger model does."""
    model = world.model("stack", "gemma3")
    recipe = AdapterRecipe(target_modules=LANGUAGE, save_embeddings=True)
    folder = write_adapter(tmp_path / "it", model, recipe)
    assert any("embed_tokens" in key for key in tensors_of(folder))
    pages = engine_config(model).adapters.model_copy(update={"vocabulary": False})
    config = engine_config(model, adapters=pages)
    runner = load_paged(config, SingleRank(), torch.device("cpu")).allocate()
    fetched = FetchedAdapter(AdapterKey(1), "it", str(folder), "it")
    assert runner.stage(fetched)
    base = base_tensors(config, folder)
    assert not judge(folder, adaptable(config, base), pages, lambda *_: None, base).reasons
    change(folder, 0, lambda tensor: -tensor)
    with pytest.raises(AdapterError, match="is not this model's weight"):
        runner.stage(FetchedAdapter(AdapterKey(2), "it", str(folder), "it"))


def test_they_are_judged_without_a_server(world: World, tmp_path: Path) -> None:
    model = world.model("llama_copies", "odd_vocab_tied")
    folder = write_adapter(tmp_path / "it", model, AdapterRecipe(save_embeddings=True))
    config = engine_config(model)

    def reasons() -> tuple[str, ...]:
        base = base_tensors(config, folder)
        return judge(
            folder, adaptable(config, base), AdaptersConfig(), lambda *_: None, base
        ).reasons

    assert reasons() == ()
    change(folder, 1, lambda tensor: -tensor)
    assert len(reasons()) == 1
