"""Products in int8, and rounding to it, against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4.
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from modeling.quantisation.activations import by_token
from tests.modeling.attention.triton.test_interpreted import Interpreted

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


def problem(tokens: int, outputs: int, inputs: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return x, its scales, codes and their scales; some codes are the largest there are."""
    generator = torch.Generator().manual_seed(1)
    x, codes = (
        torch.randint(-128, 128, (n, inputs), dtype=torch.int8, generator=generator)
        for n in (tokens, outputs)
    )
    x[0], codes[0] = -128, -128
    scales = (torch.rand(n, 1, generator=generator) for n in (tokens, outputs))
    return x, next(scales), codes, next(scales)


def truth(x: Tensor, x_scales: Tensor, codes: Tensor, scales: Tensor) -> Tensor:
    return x.double() @ codes.double().t() * x_scales * scales.t()


@pytest.mark.parametrize("tokens", [1, 5, 33])
@pytest.mark.parametrize(("outputs", "inputs"), [(48, 256), (80, 208)])
def test_few_tokens(tokens: int, outputs: int, inputs: int, monkeypatch: Any) -> None:
    """Programs that share inputs, and inputs that end within a tile."""
    module = pytest.importorskip("modeling.quantisation.kernels.scaled_product")
    cut_of = module.ProductCut
    memory = torch.full((2**16,), float("nan")), torch.zeros(1024, dtype=torch.int32)
    monkeypatch.setattr(module, "_launch", Interpreted(module._scaled))
    monkeypatch.setattr(module, "product_memory", lambda device, stream: memory)
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    given = problem(tokens, outputs, inputs)
    bias = torch.linspace(-1, 1, outputs)
    for added, cut in ((None, cut_of(64, 16, 32, 4, 2)), (bias, cut_of(64, 16, 64, 4, 2))):
        y = torch.empty(tokens, outputs)
        module.scaled_product(*given, added, y, cut)
        wanted = truth(*given) + (0 if added is None else added)
        assert float((y - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("tokens", [1, 40])
def test_many_tokens(tokens: int, monkeypatch: Any) -> None:
    """Blocks of tokens, outputs and inputs that are not full."""
    module = pytest.importorskip("modeling.quantisation.kernels.int8_product")
    tile = module.Int8Tile(16, 32, 64, 4, 2, 1.0)
    monkeypatch.setattr(module, "TILES", (tile,))
    monkeypatch.setattr(module, "num_processors", lambda device: 4)
    module.tile_of.cache_clear()
    given = problem(tokens, 80, 208)
    for bias in (None, torch.linspace(-1, 1, 80)):
        y = torch.empty(tokens, 80)
        module.int8_product(*given, bias, y)
        wanted = truth(*given) + (0 if bias is None else bias)
        assert float((y - wanted).norm() / wanted.norm()) < 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rounding(dtype: torch.dtype, monkeypatch: Any) -> None:
    """Ties, zeros, numbers beyond a given scale's range."""
    module = pytest.importorskip("modeling.quantisation.kernels.rounding")
    monkeypatch.setattr(module, "_token", Interpreted(module._by_token))
    monkeypatch.setattr(module, "has_dependent_launch", lambda device: False)
    x = torch.randn(6, 200, generator=torch.Generator().manual_seed(2)).mul(3)
    x[0], x[1, :4] = 0, torch.tensor([127.5, 0.5, 1.5, -2.5])
    x = x.to(dtype)
    for scale in (None, torch.tensor([0.02]), torch.tensor([1.0])):
        codes, scales = module.by_token(x, scale, torch.int8)
        wanted, own = by_token(x, scale, torch.int8)
        assert torch.equal(codes, wanted)
        assert torch.equal(scales, own.expand(scales.shape))
