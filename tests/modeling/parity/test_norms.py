"""Norms that adapters bring (modules_to_save): PEFT's answers, beside adapters without them."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from configs.wire.adapters import AdapterError
from modeling.adapters import norms
from modeling.adapters.bank import AdapterBank
from modeling.adapters.kernels import reference, select
from modeling.adapters.norms import AdaptedNorms
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.product import AdapterData
from modeling.adapters.token_rows import groups_of
from modeling.runner.adapter_check import adaptable
from tests.checkpoints import AdapterRecipe, write_adapter
from tests.modeling.kinds import once
from tests.modeling.parity.comparison import (
    BASE,
    WHOLE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)

MIXED = ["norms", BASE, "last", "plain", "scarce"]
FILE = "adapter_model.safetensors"
NORM = "base_model.model.model.norm.weight"


@pytest.mark.parametrize(("family", "variant", "ranks"), once("norms"))
def test_together(world: World, family: str, variant: str, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting(family, variant, ranks, MIXED, rejoins_at=3))


def test_alone(world: World) -> None:
    compare(world, Setting("gpt2_norms", "plain", 1, ["norms"], chunk=WHOLE))


def test_under_the_scheduler(world: World) -> None:
    """With prefix hits, and after a loss of the ranks."""
    names, lengths = ["norms", BASE, "norms", "scarce"], [35, 35, 35, 20]
    compare(world, Setting("llama_norms", "gqa", 2, names, lengths=lengths, lost_at=14))


def test_beside_an_embedding(world: World) -> None:
    """As LongLoRA trains them; a Gemma's norms add one to their weights."""
    names = ["longlora", BASE, "plain"]
    compare(world, Setting("longlora", "gemma2_untied", 2, names, vocabulary=True, copies=1))


@pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of biases
def test_biases_of_norms(world: World) -> None:
    compare(world, Setting("gpt2_norms", "plain", 2, ["biases", BASE, "norms"]))


def by_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compute as captured steps do: each token by the weight that lies in its adapter's page."""
    build = reference.reference_batch

    def batch(bank: AdapterBank, slots: list[int], lengths: list[int]) -> AdapterData:
        made = build(bank, slots, lengths)
        assert bank.norms is not None
        pages = [-1 if slot < 0 else bank.page_of(slot, bank.norms) for slot in slots]
        of_token = torch.tensor(pages).repeat_interleave(torch.tensor(lengths))
        setattr(made, "norm_pages", of_token)  # noqa: B010 - captured steps' data has it
        return made

    monkeypatch.setattr(select, "reference_batch", batch)
    monkeypatch.setattr(AdaptedNorms, "using", lambda *args: nullcontext())


def test_by_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    by_pages(monkeypatch)
    compare(world, Setting("llama_norms", "gqa", 2, MIXED, rejoins_at=3))


def test_a_page_that_is_another_s(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    by_pages(monkeypatch)
    monkeypatch.setattr(AdapterBank, "page_of", lambda *args: 0)
    expect_mismatch(world, Setting("llama_norms", "gqa", 1, ["norms", "last", "plain"]))


@pytest.mark.parametrize("fault", ["left out", "for all", "of the base"])
def test_a_norm_that_is_wrong(world: World, monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    if fault == "left out":
        monkeypatch.setattr(AdaptedNorms, "using", lambda *args: nullcontext())
    elif fault == "for all":
        found = groups_of

        def for_all(*args: Any) -> Any:
            return [type(group)(slice(None), group.adapter) for group in found(*args)]

        monkeypatch.setattr(norms, "groups_of", for_all)
    else:
        own = AdaptedNorms._parameters

        def weights_alone(*args: Any) -> Any:
            return {name: each for name, each in own(*args).items() if name == "weight"}

        monkeypatch.setattr(AdaptedNorms, "_parameters", weights_alone)
    expect_mismatch(world, Setting("gpt2_norms", "plain", 1, ["norms", BASE]))


@pytest.mark.parametrize("fault", ["shape", "missing", "nan"])
def test_what_is_refused(world: World, tmp_path: Path, fault: str) -> None:
    model = world.model("llama_norms", "gqa")
    entries = ["model.norm", "input_layernorm"]
    recipe = AdapterRecipe(target_modules=("q_proj",), extra={"modules_to_save": entries})
    folder = write_adapter(tmp_path / "it", model, recipe)
    tensors = load_file(folder / FILE)
    if fault == "shape":
        tensors[NORM] = tensors[NORM][:-1].clone()
    elif fault == "missing":
        del tensors[NORM]
    elif fault == "nan":
        tensors[NORM][0] = float("nan")
    save_file(tensors, folder / FILE)
    said = {
        "shape": "this model needs",
        "missing": f"modules_to_save requires {NORM}, of which the file holds 0",
        "nan": "not finite",
    }
    with pytest.raises(AdapterError, match=said[fault]):
        list(open_adapter(folder, adaptable(engine_config(model)), 64).read_matrices())


def test_norms_beside_recurrent_layers(world: World) -> None:
    """A mixer has norms of its own, of some of a step's tokens at a time."""
    compare(world, Setting("mixer_norms", "minimax", 2, MIXED, rejoins_at=3))


def test_a_norm_of_a_recurrent_layer_is_named(world: World, tmp_path: Path) -> None:
    """Its name ends like that of the decoder's last norm, which adapters may bring."""
    model = world.model("generic", "qwen3_next")
    extra = {"modules_to_save": ["norm"]}
    folder = write_adapter(tmp_path, model, AdapterRecipe(target_modules=("o_proj",), extra=extra))
    said = r"modules_to_save=\['norm'\]: \S+linear_attn.norm.weight is of a module that no adapter"
    with pytest.raises(AdapterError, match=said):
        open_adapter(folder, adaptable(engine_config(model)), 8)
