"""Gemma 3n's tokens of images and sound, which parts beside its decoder embed, in texts too."""

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from configs.model import LoadFormat, ModelConfig
from configs.wire.adapters import AdapterError
from configs.wire.sampling import Sampling
from modeling.adapters.peft.folder import open_adapter
from modeling.adapters.peft.recipes import Recipes
from modeling.models.generic.model import GenericForCausalLM
from modeling.runner.adapter_check import adaptable
from modeling.runner.loading import load_model
from sharding.group import TensorParallel
from tests.checkpoints import load_oracle, oracle_logits
from tests.checkpoints_quantised import write_compressed, write_packed
from tests.modeling.parity.comparison import (
    BASE,
    Setting,
    World,
    answers_by_hand,
    compare,
    engine_config,
    full_logprobs,
)
from tests.modeling.stepping import Asked
from tests.oracle import TOLERANCE, prompt_truth
from tests.ranks import run_in_memory

VISION, AUDIO = range(64, 80), range(80, 96)
"""Of the tiny model."""

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")  # PEFT's, of tied ends


@pytest.mark.parametrize("ranks", [1, 2])
def test_together(world: World, ranks: int) -> None:
    """Prompts in chunks beside rows that decode; each request is preempted once."""
    compare(world, Setting("outer", "gemma3n", ranks, [BASE, "all", "tokens"], rejoins_at=3))


@pytest.mark.parametrize("ranks", [1, pytest.param(2, marks=pytest.mark.sweep)])
def test_prefix_hits(world: World, ranks: int) -> None:
    names, lengths = [BASE, "all"] * 2, [37, 35] * 2
    compare(world, Setting("outer", "gemma3n", ranks, names, lengths=lengths, hits=2))


def test_what_is_compared_has_tokens_of_both_parts(world: World) -> None:
    folder = world.model("outer", "gemma3n")
    prompt, truth = prompt_truth(folder, None, 37)
    for part in (VISION, AUDIO):
        assert not set(part).isdisjoint(prompt)
        assert not set(part).isdisjoint(truth.tokens)


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_embedding_and_head(world: World, ranks: int) -> None:
    """They change the logits of these tokens, and not their vectors."""
    names = [BASE, "ends", "whole"]
    compare(world, Setting("outer", "gemma3n", ranks, names, vocabulary=True, copies=2))


@pytest.mark.parametrize("variant", ["gemma3n_images", "gemma3n_sound"])
def test_one_part_has_them_all(world: World, variant: str) -> None:
    """The other's begin behind the vocabulary, or these before its own."""
    compare(world, Setting("outer", variant, 2, [BASE, "all"]))


def test_the_vocabulary_of_published_files(world: World) -> None:
    """Of 262,400 tokens, with offsets unsaid; the likeliest tokens are compared."""
    model = world.model("outer", "gemma3n_published")
    fields = json.loads((model / "config.json").read_text())
    for part in ("vision_config", "audio_config"):
        for key in ("vocab_offset", "vocab_size"):
            del fields[part][key]
    (model / "config.json").write_text(json.dumps(fields))
    requests = [
        Asked(prompt, 4, sampling=Sampling(logprobs=20, logit_bias=((token, 99.0),)), chunk=3)
        for prompt, token in (
            ([5, 262143, 262144, 262145, 33, 262271, 262272, 262273, 262399], 262144),
            ([7, 8], 262273),
        )
    ]
    (found,) = run_in_memory(1, partial(answers_by_hand, engine_config(model), [], requests))
    oracle = load_oracle(model)
    for asked, answer in zip(requests, found, strict=True):
        logits = oracle_logits(oracle, [*asked.prompt, *answer.tokens])
        wanted = logits[len(asked.prompt) - 1 : -1].log_softmax(-1)
        assert answer.tokens == [asked.sampling.logit_bias[0][0]] * 4
        for row, own in zip(wanted, answer.logprobs, strict=True):
            assert own is not None
            told = torch.tensor(own.top_logprobs)
            assert torch.allclose(told, row[torch.tensor(own.top_ids)], atol=TOLERANCE)


def embedded(folder: Path, group: TensorParallel, **model: Any) -> Tensor:
    """The vectors of all tokens, as a step gets them."""
    config = engine_config(folder, model=ModelConfig(id=str(folder), **model))
    loaded = load_model(config, group, torch.device("cpu")).model
    assert isinstance(loaded, GenericForCausalLM)
    rows: Tensor = loaded.causal.get_input_embeddings()(torch.arange(96)[None])[0]
    return rows


@torch.no_grad()
def expected(folder: Path) -> Tensor:
    """The same as transformers' model computes them."""
    oracle = load_oracle(folder)
    oracle(torch.tensor([[1]]))  # Packages of quantised weights unpack them then.
    inner = oracle.model
    rows: Tensor = inner.get_input_embeddings()(torch.arange(96))
    # A batch of one, of which packages round each token by itself.
    rows[64:80] = inner.embed_vision(input_ids=torch.arange(64, 80)[None])[0]
    rows[80:] = inner.embed_audio(input_ids=torch.arange(80, 96)[None])[0]
    return rows


@pytest.mark.parametrize("preset", ["", "FP8_DYNAMIC"])
def test_vectors_are_transformers_own(world: World, tmp_path: Path, preset: str) -> None:
    """With a projection that is quantised like all linear maps, too."""
    folder = world.model("outer", "gemma3n")
    if preset:
        folder = write_compressed(tmp_path / "stored", folder, preset)
    wanted = expected(folder)
    for rank in run_in_memory(2, partial(embedded, folder)):
        assert torch.allclose(rank, wanted, atol=1e-5)


def test_a_quantised_checkpoint_that_leaves_them_as_they_are(world: World, tmp_path: Path) -> None:
    numbers = write_packed(tmp_path / "stored", world.model("outer", "gemma3n"), 8)
    (found,) = run_in_memory(1, partial(embedded, tmp_path / "stored"))
    assert torch.allclose(found, expected(numbers), atol=1e-5)


def test_random_weights(world: World) -> None:
    """The same on all ranks, of a mean square of 1 as a norm makes them."""
    folder = world.model("outer", "gemma3n")
    one, other = run_in_memory(2, partial(embedded, folder, load_format=LoadFormat.DUMMY))
    assert torch.equal(one, other)
    assert torch.allclose(one[64:].pow(2).mean(-1), torch.ones(32), atol=0.05)


def idle_copy(adapter: Path, folder: Path) -> Path:
    """Copy an adapter as training on text alone leaves it: where no gradient comes, B is zero."""
    shutil.copytree(adapter, folder)
    tensors = load_file(folder / "adapter_model.safetensors")
    outer = [name for name in tensors if ".embed_" in name and ".lora_B." in name]
    assert len(outer) == 2
    zeros = {name: torch.zeros_like(tensors[name]) for name in outer}
    save_file({**tensors, **zeros}, folder / "adapter_model.safetensors", {"format": "pt"})
    return folder


def test_adapters_that_change_these_vectors_are_refused(world: World, tmp_path: Path) -> None:
    """Whatever passed before; factors that change nothing are left out."""
    model, adapter = world.model("outer", "gemma3n"), world.adapter("outer", "gemma3n", "outer")
    assert adapter is not None
    idle, recipes = idle_copy(adapter, tmp_path / "idle"), Recipes()
    projections = adaptable(engine_config(model))
    assert open_adapter(idle, projections, 64, recipes=recipes).modules
    with pytest.raises(AdapterError, match=r"embed_audio.*: leave embed_audio out of target_mod"):
        open_adapter(adapter, projections, 64, recipes=recipes)
    prompt, truth = prompt_truth(model, idle, 11)
    sampling = Sampling(logprobs=96)
    asked = Asked(prompt, len(truth.tokens), slot=0, sampling=sampling, chunk=4)
    ((found,),) = run_in_memory(1, partial(answers_by_hand, engine_config(model), [idle], [asked]))
    assert found.tokens == truth.tokens
    assert torch.allclose(full_logprobs(found), truth.logprobs, atol=TOLERANCE)
