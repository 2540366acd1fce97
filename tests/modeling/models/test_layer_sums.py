"""Which layers are followed, and that they compute the same then."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

from modeling.models.generic.layer_sums import follow, fuse_sums
from modeling.models.generic.norms import FusedRMSNorm

WIDTH = 8


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = FusedRMSNorm(torch.rand(WIDTH) + 0.5, 1e-5)
        self.after = FusedRMSNorm(torch.rand(WIDTH) + 0.5, 1e-5)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.factor = 0.5


class _Sandwich(_Layer):
    def forward(self, x: Tensor, mask: Any = None, **_more: Any) -> Tensor:
        x = x + self.after(self.mixer(self.norm(x)))
        out: Tensor = self.after(self.mixer(self.norm(x))) + x
        return out


class _Scaled(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.factor * self.mixer(self.norm(x))
        return out


class _Decides(_Layer):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x + self.mixer(self.norm(x)) if mask else x


class _Shared(_Layer):
    """The norm before the sum is read twice, so it stays a call."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.after(self.mixer(x))
        out: Tensor = self.norm(x + normed) + normed
        return out


# Only transformers' own layers are taken.
for _kind in (_Sandwich, _Scaled, _Decides, _Shared):
    _kind.__module__ = "transformers.models.tested"


class _Decoder(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(layers)])
        self.final = FusedRMSNorm(torch.rand(WIDTH), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x, mask=None) if isinstance(layer, _Sandwich) else layer(x)
        out: Tensor = self.final(x)
        return out


@pytest.mark.parametrize(("kind", "sums"), [(_Sandwich, 6), (_Shared, 3 + 1)])
@torch.inference_mode()
def test_fused_layers_compute_the_same(kind: type[nn.Module], sums: int) -> None:
    decoder = _Decoder(kind)
    x = torch.randn(1, 5, WIDTH)
    expected = decoder(x)
    assert fuse_sums(decoder) == sums
    torch.testing.assert_close(decoder(x), expected)


@pytest.mark.parametrize("kind", [_Scaled, _Decides])
def test_what_does_more_is_left(kind: type[nn.Module]) -> None:
    decoder = _Decoder(kind)
    assert follow(decoder.layers[0]) is None
    assert fuse_sums(decoder) == 0
    assert all("forward" not in layer.__dict__ for layer in decoder.layers)


@torch.inference_mode()
def test_a_norm_ahead_is_of_that_very_tensor() -> None:
    norm = FusedRMSNorm(torch.rand(WIDTH), 1e-5)
    x, other = torch.randn(2, 4, WIDTH)
    norm.keep_ahead(x, other)
    expected = FusedRMSNorm(norm.weight, 1e-5)(other)
    torch.testing.assert_close(norm(other), expected)
    norm.keep_ahead(x, other)
    assert norm(x) is other
    assert norm(x) is not other


@pytest.mark.parametrize("kind", ["gemma2", "qwen3", "glm4", "qwen3_moe", "mistral"])
def test_layers_of_transformers_are_followed(kind: str) -> None:
    small = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **small)
        auto: Any = AutoModelForCausalLM
        layer = auto.from_config(config).model.layers[0]
    followed = follow(layer)
    assert followed is not None
    assert followed.names[0] == "hidden_states"
