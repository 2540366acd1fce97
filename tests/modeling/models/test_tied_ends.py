"""Checkpoints whose config ties embedding and head, and that hold both all the same."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from modeling.models.paged_base import PagedBase
from sharding.group import TensorParallel
from tests.checkpoints import load_oracle, oracle_logits, write_llama
from tests.checkpoints_others import write_gpt2, write_gpt_neox, write_opt
from tests.modeling.models.stepping import Stepper, load
from tests.ranks import run_ranks

SEQUENCE = [(7 * i + i * i) % 96 for i in range(20)]
CHANGED = 90
"""A token of the last rank's."""

FAMILIES: dict[str, tuple[Callable[[Path], Path], str, str]] = {
    "llama": (lambda path: write_llama(path, "tied"), "model.embed_tokens", "lm_head"),
    "gpt2": (write_gpt2, "transformer.wte", "lm_head"),
    "opt": (write_opt, "model.decoder.embed_tokens", "lm_head"),
    "gpt_neox": (lambda path: write_gpt_neox(path, "tied"), "gpt_neox.embed_in", "embed_out"),
}
"""How to write a tied model, and its ends in the checkpoint."""


def write_both(folder: Path, family: str) -> tuple[dict[str, Tensor], Tensor]:
    """A tied model whose checkpoint holds a head; its tensors, and that head to be changed."""
    write, embedding, head = FAMILIES[family]
    tensors = load_file(write(folder) / "model.safetensors")
    tensors[f"{head}.weight"] = tensors[f"{embedding}.weight"].clone()
    return tensors, tensors[f"{head}.weight"]


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_of_its_own_is_used(tmp_path: Path, family: str, ranks: int) -> None:
    """As transformers does; one row that differs, on one rank, unties the whole."""
    tied = oracle_logits(load_oracle(FAMILIES[family][0](tmp_path)), SEQUENCE)
    tensors, head = write_both(tmp_path, family)
    head[CHANGED] *= -1
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(load_oracle(tmp_path), SEQUENCE)
    assert (expected - tied)[:, CHANGED].abs().min() > 0.01

    def on_rank(group: TensorParallel) -> tuple[Tensor, bool]:
        model = load(tmp_path, group)
        assert isinstance(model, PagedBase)
        return Stepper(model).step([(0, SEQUENCE)])[0], is_shared(model)

    for logits, shared in run_ranks(ranks, on_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert not shared, "adapters would take the ends for one"


@pytest.mark.parametrize("family", FAMILIES)
def test_an_equal_copy_takes_no_memory(tmp_path: Path, family: str) -> None:
    tensors, _ = write_both(tmp_path, family)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})

    def on_rank(group: TensorParallel) -> bool:
        model = load(tmp_path, group)
        assert isinstance(model, PagedBase)
        return is_shared(model)

    assert run_ranks(2, on_rank) == [True, True]


def is_shared(model: PagedBase) -> bool:
    return model.lm_head.weight is model.embedding.weight


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_head_alone_serves_both_ends(tmp_path: Path, family: str, ranks: int) -> None:
    """As transformers does: whichever of the tied ends is there is both."""
    tensors, _ = write_both(tmp_path, family)
    del tensors[f"{FAMILIES[family][1]}.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(load_oracle(tmp_path), SEQUENCE)

    def on_rank(group: TensorParallel) -> tuple[Tensor, bool]:
        model = load(tmp_path, group)
        assert isinstance(model, PagedBase)
        return Stepper(model).step([(0, SEQUENCE)])[0], is_shared(model)

    for logits, shared in run_ranks(ranks, on_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
        assert shared


@pytest.mark.parametrize("some", [False, True], ids=["all names", "some names"])
@pytest.mark.parametrize("family", FAMILIES)
def test_names_of_the_decoder_alone(tmp_path: Path, family: str, some: bool) -> None:
    """As transformers loads them (base_model_prefix), name by name."""
    folder = FAMILIES[family][0](tmp_path)
    before = oracle_logits(load_oracle(folder), SEQUENCE)
    tensors = load_file(folder / "model.safetensors")
    bare = {
        name.partition(".")[2] if index % 2 or not some else name: tensor
        for index, (name, tensor) in enumerate(tensors.items())
    }
    assert not bare.keys() <= tensors.keys()
    save_file(bare, folder / "model.safetensors", metadata={"format": "pt"})
    expected = oracle_logits(load_oracle(folder), SEQUENCE)
    assert torch.equal(expected, before), "the oracle loads them too"

    def on_rank(group: TensorParallel) -> Tensor:
        return Stepper(load(folder, group)).step([(0, SEQUENCE)])[0]

    for logits in run_ranks(2, on_rank):
        torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
