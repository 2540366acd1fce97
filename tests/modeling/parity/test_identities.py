"""LongCat-Flash: a layer attends twice, and some of its experts return what they get."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from modeling.models.generic.identity_experts import IdentityMixture, take_over_identities
from modeling.models.generic.model import GenericForCausalLM
from modeling.runner.load_paged import load_paged
from sharding.group import SingleRank
from tests.modeling.models.tiny_causal import tiny_config, write_tiny
from tests.modeling.parity.comparison import (
    BASE,
    Setting,
    World,
    compare,
    engine_config,
    expect_mismatch,
)

CPU = torch.device("cpu")
CUT = Setting("latents", "longcat_flash", 2, [BASE])


def test_latents_of_both_attentions_are_cached(world: World) -> None:
    model = load_paged(
        engine_config(world.model("latents", "longcat_flash")), SingleRank(), CPU
    ).parts.weights.model
    assert [each.value_dim for each in model.attention_layers] == [16] * 4


@pytest.mark.parametrize("ranks", [1, 2])
def test_whole_experts_on_ranks(world: World, ranks: int) -> None:
    compare(world, Setting("latents", "longcat_flash", ranks, [BASE, "plain"], spread=True))


@pytest.mark.parametrize("ranks", [1, 2])
def test_adapters_of_experts(world: World, ranks: int) -> None:
    """PEFT gives identities factors of the first matrices too."""
    compare(world, Setting("mixture", "longcat_flash", ranks, [BASE, "parameters", "down", "r8"]))


def test_scheduled(world: World) -> None:
    """Prefix hits, and ranks that are lost."""
    names, lengths = [BASE, BASE, "plain"], (37, 37, 21)
    compare(world, Setting("latents", "longcat_flash", 1, names, lengths=lengths, lost_at=9))


def test_the_host_chooses_nothing() -> None:
    """On the meta device no value can be read, as in a step that is captured."""
    config = tiny_config("longcat_flash")
    auto: Any = AutoModelForCausalLM
    with torch.device("meta"):
        causal = auto.from_config(config)
    take_over_identities(causal)
    mixture = causal.get_submodule("model.layers.0.mlp")
    mixture.experts.forward = lambda x, ids, shares: x + ids.sum() * shares.sum()
    assert mixture(torch.empty(1, 3, 32, device="meta")).shape == (1, 3, 32)


def test_identities_counted_on_every_rank(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    real = IdentityMixture.forward

    def forward(self: IdentityMixture, hidden_states: Tensor) -> Tensor:
        _, shares, ids = self.router(hidden_states)
        own: Tensor = shares.masked_fill(ids < self.experts.num_experts, 0).sum(1, keepdim=True)
        found: Tensor = real(self, hidden_states)
        return found + hidden_states * own

    monkeypatch.setattr(IdentityMixture, "forward", forward)
    expect_mismatch(world, CUT)


def test_feed_forwards_in_a_list_with_any_activation(tmp_path: Path) -> None:
    """They are looked at as layers are: where tanh is no activation of ours, neither is a map."""
    model = write_tiny(tmp_path / "model", "longcat_flash")
    path = model / "config.json"
    settings = json.loads(path.read_text(encoding="utf-8"))
    path.write_text(json.dumps({**settings, "hidden_act": "tanh"}), encoding="utf-8")
    load_paged(engine_config(model), SingleRank(), CPU)


def test_experts_of_identities_are_not_read(tmp_path: Path) -> None:
    """transformers stores matrices for them, which it does not multiply; others need not."""
    model = write_tiny(tmp_path / "model", "longcat_flash")
    file = model / "model.safetensors"
    tensors = load_file(file)
    extra = [name for name in tensors if ".experts.4." in name or ".experts.5." in name]
    assert len(extra) == 2 * 2 * 2
    read = load_paged(engine_config(model), SingleRank(), CPU).parts.weights
    assert isinstance(read.model, GenericForCausalLM)
    experts = read.model.causal.get_submodule("model.layers.0.mlp.experts")
    assert dict(experts.named_parameters())["gate_up_proj"].shape == (4, 48, 32)
    save_file({name: tensors[name] for name in tensors if name not in extra}, file)
    published = load_paged(engine_config(model), SingleRank(), CPU).parts.weights
    assert published.bytes_read == read.bytes_read
