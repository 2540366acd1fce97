"""Which layers are followed, and that they compute the same then."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.activations import GELUTanh, SiLUActivation

from modeling.adapters.norm_rows import NormRows, NormStep
from modeling.models.generic import layer_sums, norms
from modeling.models.generic.following import follow
from modeling.models.generic.layer_sums import LayerSums, fuse_sums
from modeling.models.generic.norms import FusedRMSNorm, NormedSum

WIDTH = 8
SUMS, GATES = "sum with its norms", "activation with its product"


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = FusedRMSNorm(torch.rand(WIDTH) + 0.5, 1e-5)
        self.after = FusedRMSNorm(torch.rand(WIDTH) + 0.5, 1e-5)
        self.mixer = nn.Linear(WIDTH, WIDTH)
        self.act = SiLUActivation()
        self.same = nn.Identity()
        self.factor = 0.4
        self.scalar = nn.Buffer(torch.rand(1) + 0.5)
        self.wide = nn.Buffer(torch.rand(1).double())
        self.learned = nn.Parameter(torch.rand(1))


class _Sandwich(_Layer):
    def forward(self, x: Tensor, mask: Any = None, **_more: Any) -> Tensor:
        x = x + self.after(self.mixer(self.norm(x)))
        out: Tensor = self.after(self.mixer(self.norm(x))) + x
        return out


class _Shared(_Layer):
    """The norm before the sum is read twice, so it stays a call."""

    def forward(self, x: Tensor) -> Tensor:
        normed = self.after(self.mixer(x))
        out: Tensor = self.norm(x + normed) + normed
        return out


class _Scaled(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.factor * self.mixer(self.norm(x))
        out: Tensor = self.mixer(self.norm(x)) * self.scalar + x
        return out


class _Behind(_Layer):
    """Norms behind modules only, and a factor of the sum that the next layer norms."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.mixer(x)) * self.factor
        x = x + self.after(self.mixer(x))
        x *= self.scalar
        return x


class _Both(_Layer):
    """Factors on both sides: one goes with the sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.after(self.mixer(x)) * self.factor + x * 0.5
        out: Tensor = self.scalar * (self.mixer(self.norm(x)) + x)
        return out


class _Twice(_Layer):
    """The sum is read beside the product of it: it stays a sum."""

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.after(self.mixer(x))
        out: Tensor = x * self.factor + self.norm(x)
        return out


class _Returned(_Layer):
    """The product is read, and returned beside the sum: it stays."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, None]:
        added = self.mixer(self.norm(x)) * self.factor
        return x + added, added, None


class _Three(nn.Module):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x + 1, x + 2, x + 3


class _Routed(_Layer):
    """As Gemma 4's mixtures: sizes of the stream, and a module that returns three results."""

    def __init__(self) -> None:
        super().__init__()
        self.router = _Three()

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, x.shape[-1])
        _, first, second = self.router(rows)
        found = self.norm((self.mixer(first) * second).reshape(x.shape))
        both = self.after(self.mixer(x)) + found
        out: Tensor = x + self.after(both)
        return out


class _Gated(_Layer):
    def forward(self, x: Tensor, other: Tensor | None = None) -> Tensor:
        inner = self.act(self.mixer(x)) * other
        out: Tensor = x + self.norm(self.mixer(inner))
        return out


class _GatedByValue(_Layer):
    def __init__(self) -> None:
        super().__init__()
        self.tanh = GELUTanh()

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.mixer(self.mixer(x) * self.tanh(x))
        return out


class _Decides(_Layer):
    def forward(self, x: Tensor, mask: Any) -> Tensor:
        return x + self.mixer(self.norm(x)) if mask else x


class _DecidesByAbsence(_Layer):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x if mask is None else x + self.mixer(self.norm(x))


class _DecidesByName(_Layer):
    def forward(self, x: Tensor, mask: Any = None) -> Tensor:
        return x + self.mixer(self.norm(x)) if mask == "full" else x


class _DecidesBySize(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.mixer(self.norm(x)) if x.shape[1] == 1 else x


class _Overwrites(_Layer):
    """The residual is the tensor that is changed."""

    def forward(self, x: Tensor) -> Tensor:
        x = residual = x + self.mixer(self.norm(x))
        x *= self.factor
        out: Tensor = residual + self.norm(x)
        return out


class _OverwritesWhatWasRead(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        x = x + self.mixer(self.norm(x))
        before = self.same(x)
        x *= self.factor
        out: Tensor = before + self.norm(x)
        return out


class _OverwritesItsInput(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        x *= self.factor
        out: Tensor = x + self.norm(x)
        return out


class _ByAWiderScalar(_Layer):
    """The product has another type."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(x) * self.wide
        return out


class _ByAParameter(_Layer):
    """An adapter could bring another."""

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = x + self.norm(x) * self.learned
        return out


class _Lists(_Layer):
    def forward(self, x: Tensor) -> Tensor:
        first, *_ = self.mixer(x)
        out: Tensor = x + self.norm(first)
        return out


KINDS: dict[type[nn.Module], tuple[int, int]] = {
    _Sandwich: (6, 0),
    _Shared: (3 + 1, 0),
    _Scaled: (6, 0),
    _Behind: (6, 0),
    _Both: (6, 0),
    _Twice: (6, 0),
    _Returned: (3, 0),
    _Routed: (3 + 1, 0),
    _Gated: (3, 3),
    _GatedByValue: (1, 3),
}
"""How many launches three layers have of each kind; the final norm goes with the last sum."""

LEFT = (
    _Decides, _DecidesByAbsence, _DecidesByName, _DecidesBySize, _Overwrites,
    _OverwritesWhatWasRead, _OverwritesItsInput, _ByAWiderScalar, _ByAParameter, _Lists,
)  # fmt: skip

# Only transformers' own layers are taken.
for _kind in (*KINDS, *LEFT):
    _kind.__module__ = "transformers.models.tested"


class _Decoder(nn.Module):
    def __init__(self, kind: type[nn.Module], layers: int = 3) -> None:
        super().__init__()
        self.layers = nn.ModuleList([kind() for _ in range(layers)])
        self.final = FusedRMSNorm(torch.rand(WIDTH), 1e-5)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            if isinstance(layer, _Sandwich):
                x = layer(x, mask=None)
            elif isinstance(layer, _Gated):
                x = layer(x, x.flip(-1))
            else:
                found = layer(x)
                x = found[0] + found[1] if isinstance(found, tuple) else found
        out: Tensor = self.final(x)
        return out


def _decoder(kind: type[nn.Module], dtype: torch.dtype = torch.float32) -> _Decoder:
    decoder = _Decoder(kind).to(dtype)
    for module in decoder.modules():
        if isinstance(module, FusedRMSNorm):
            module.weight.data = module.weight.float()
    return decoder


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_fused_layers_compute_the_same(kind: type[_Layer], dtype: torch.dtype) -> None:
    decoder = _decoder(kind, dtype)
    x = torch.randn(1, 5, WIDTH).to(dtype)
    expected = decoder(x)
    sums, gates = KINDS[kind]
    fused = fuse_sums(decoder, dtype)
    assert (fused[SUMS], fused[GATES]) == (sums, gates)
    # To the bit: the parts are torch's own operations here.
    assert torch.equal(decoder(x), expected)


@pytest.mark.parametrize("kind", LEFT)
def test_what_does_more_is_left(kind: type[nn.Module]) -> None:
    decoder = _Decoder(kind)
    assert follow(decoder.layers[0], torch.float32) is None
    assert not fuse_sums(decoder, torch.float32)
    assert all("forward" not in layer.__dict__ for layer in decoder.layers)


def test_a_scalar_of_the_values_type_is_followed_as_that_type_alone() -> None:
    layer = _Scaled()
    assert follow(layer, torch.float32) is not None
    assert follow(layer, torch.bfloat16) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_tensor_of_one_element_multiplies_as_its_number(dtype: torch.dtype) -> None:
    x, scalars = torch.randn(4096).to(dtype), torch.rand(64).to(dtype)
    for scalar in scalars:
        for shaped in (scalar, scalar.view(1)):
            assert torch.equal(x * float(shaped), x * shaped)


@pytest.mark.parametrize(
    ("kind", "planned"),
    [
        (_Sandwich, [("after", "norm", 1, 1), ("after", "norm", 1, 1)]),
        (_Scaled, [(None, "norm", 0.4, 1), (None, "norm", "scalar", 1)]),
        (_Behind, [("after", None, 0.4, 1), ("after", "norm", 1, "scalar")]),
        (_Both, [("after", "norm", 0.4, 1), (None, "norm", 1, "scalar")]),
        (_Routed, [("norm", "after", 1, 1), (None, "norm", 1, 1)]),
    ],
)
def test_what_goes_with_sums(
    kind: type[_Layer],
    planned: list[tuple[str | None, str | None, float | str, float | str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Inner norm, outer norm, factor of what is added, factor of the sum."""
    found: list[NormedSum] = []
    real = NormedSum.compute

    def compute(self: NormedSum, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor | None]:
        found.append(self)
        return real(self, x, residual)

    monkeypatch.setattr(NormedSum, "compute", compute)
    layer = kind()
    followed = follow(layer, torch.float32)
    assert followed is not None
    sums = LayerSums(layer, followed)
    sums.link(layer.norm)
    sums.forward(torch.randn(1, 3, WIDTH))

    def real_part(own: Any) -> Any:
        part = getattr(layer, own) if isinstance(own, str) else own
        return float(part) if isinstance(part, Tensor) else part

    wanted = [NormedSum(*map(real_part, each)) for each in planned]
    assert found == wanted


@torch.inference_mode()
def test_a_sum_without_a_norm_behind_keeps_nothing_ahead() -> None:
    """Nothing normalises what enters these layers, nor what leaves the last."""
    layers = nn.ModuleList([_Behind() for _ in range(2)])
    decoder = nn.Module()
    decoder.layers = layers
    x = torch.randn(1, 3, WIDTH)
    expected = layers[1](layers[0](x.clone()))
    assert fuse_sums(decoder, torch.float32)[SUMS] == 4
    assert torch.equal(layers[1](layers[0](x)), expected)
    ahead = [each._ahead for each in decoder.modules() if isinstance(each, FusedRMSNorm)]
    assert ahead == [None] * 4


@torch.inference_mode()
def test_a_norm_ahead_is_of_the_scaled_sum() -> None:
    decoder = _Decoder(_Behind, layers=1)
    fuse_sums(decoder, torch.float32)
    out = decoder.layers[0](torch.randn(1, 3, WIDTH))
    assert decoder.final._ahead is not None
    assert decoder.final._ahead[0] is out
    assert torch.equal(decoder.final._ahead[1], decoder.final.computed(out))


@torch.inference_mode()
def test_norms_called_alone_are_called() -> None:
    """Adapters that bring norms compute what each returns anew, behind it."""
    decoder = _Decoder(_Behind)
    x = torch.randn(1, 5, WIDTH)
    for norm in [each for each in decoder.modules() if isinstance(each, FusedRMSNorm)]:
        norm.register_forward_hook(lambda norm, inputs, _out: norm.computed(inputs[0]) * 1.5)
        norm.called_alone = True
    expected = decoder(x)
    fuse_sums(decoder, torch.float32)
    assert torch.equal(decoder(x), expected)


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


@torch.inference_mode()
def test_the_kernel_gets_only_what_it_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tensors of one type and shape, and norms with weights of adapters both, or neither."""
    calls: list[dict[str, Any]] = []

    class Ops:
        @staticmethod
        def add_rms_norm(x: Tensor, residual: Tensor, *_: Any, **more: Any) -> tuple[Tensor, ...]:
            calls.append(more)
            return x, residual

    # Before the kernels are there: a norm by itself is computed by torch.
    inner, outer = (FusedRMSNorm(torch.rand(WIDTH), 1e-5) for _ in range(2))
    monkeypatch.setattr(norms, "fused_ops", lambda _device: Ops)
    x = torch.randn(1, 3, WIDTH)
    both, only_inner = NormedSum(inner, outer, 0.5, 2.0), NormedSum(inner)

    def is_joined(parts: NormedSum, x: Tensor, residual: Tensor) -> bool:
        calls.clear()
        total, normed = parts.compute(x, residual)
        assert (normed is None) == (parts.outer is None)
        assert total.shape == x.shape
        return bool(calls)

    assert is_joined(both, x, x)
    assert (calls[0]["factor"], calls[0]["total_factor"]) == (0.5, 2.0)
    assert is_joined(only_inner, x, x)
    assert not is_joined(both, x, x.double())
    assert not is_joined(both, x, x[:, :1])
    for norm in (inner, outer):
        norm.called_alone = True
        assert not is_joined(both, x, x)
        norm.called_alone = False
        with norm.alone():
            assert not is_joined(both, x, x)
    step = NormStep()
    step.pages = torch.zeros(3, dtype=torch.int32)
    inner.rows = NormRows(step, torch.rand(2, WIDTH))
    assert is_joined(only_inner, x, x)
    assert calls[0]["own_inner"] is not None
    assert not is_joined(both, x, x)
    outer.rows = inner.rows
    assert is_joined(both, x, x)


@torch.inference_mode()
def test_a_gate_of_another_shape_or_type_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[int, int]] = []

    class Ops:
        @staticmethod
        def gated_mul(gate: Tensor, up: Tensor, is_gelu: bool) -> Tensor:
            assert not is_gelu
            calls.append((gate.stride(0), up.stride(0)))
            return nn.functional.silu(gate) * up

    monkeypatch.setattr(layer_sums, "fused_ops", lambda _device: Ops)
    act, gate = SiLUActivation(), torch.randn(1, 3, WIDTH)
    layers = torch.randn(1, 3, 5, WIDTH)
    for other in (layers[:, :, 2], gate, gate[:, :1], gate.double(), layers[..., 0, :1]):
        found = layer_sums._gated(act, gate, other, is_gelu=False)
        assert torch.equal(found, act(gate) * other)
    assert calls == [(WIDTH, 5 * WIDTH), (WIDTH, WIDTH)]


SMALL = {"hidden_size": 32, "num_hidden_layers": 1, "vocab_size": 64, "pad_token_id": 0}
GEMMA4 = {"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64}
MIXTURE = {"enable_moe_block": True, "num_experts": 4, "top_k_experts": 2}
MIXTURE["moe_intermediate_size"] = 8


@pytest.mark.parametrize(
    ("kind", "more"),
    [
        *((kind, {}) for kind in ("gemma2", "qwen3", "glm4", "qwen3_moe", "mistral", "olmo3")),
        *((kind, {}) for kind in ("granitemoe", "hyperclovax", "llama4_text")),
        ("gemma4_text", {"hidden_size_per_layer_input": 0}),
        ("gemma4_text", GEMMA4),
        ("gemma4_text", GEMMA4 | MIXTURE),
    ],
)
def test_layers_of_transformers_are_followed(kind: str, more: dict[str, Any]) -> None:
    with torch.device("meta"):
        config = AutoConfig.for_model(kind, **SMALL, **more)
        auto: Any = AutoModelForCausalLM
        layer = auto.from_config(config).model.layers[0]
    followed = follow(layer, torch.float32)
    assert followed is not None
    assert followed.names[0] == "hidden_states"
