"""Products with weights in nvfp4 and mxfp4 against the equation, by Triton's interpreter.

It needs TRITON_INTERPRET=1 in the environment, and numpy below 2.4. The interpreter has no
assembly: what it does is written out. Nor does it multiply bfloat16: x is in float32. The kernel of
up to 16 tokens is in Gluon, which is not interpreted (test_cuda.py beside).
"""

import os
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from modeling.quantisation.fp4 import MXFP4, NVFP4, Fp4Weight, round_fp4
from sharding.linear_weight import Fp4Scales, Operands
from tests.modeling.attention.triton.test_interpreted import Interpreted
from tests.modeling.layers.kernels.test_stored_pairs_interpreted import by_hand

pytestmark = pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") != "1", reason="needs TRITON_INTERPRET=1"
)


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Any:
    module = pytest.importorskip("modeling.quantisation.kernels.fp4_product")
    from modeling.kernels import fp4_tiles

    memory = torch.full((2**20,), float("nan")), torch.zeros(1024, dtype=torch.int32)
    for name, kernel in (("_launch_tiles", "_tiles"), ("_launch_dequantise", "_dequantise")):
        monkeypatch.setattr(module, name, Interpreted(getattr(module, kernel)))
    monkeypatch.setattr(fp4_tiles, "made_of_codes", by_hand)
    monkeypatch.setattr(module, "rows_cut", lambda *given: None)
    monkeypatch.setattr(module, "product_memory", lambda device, stream: memory)
    stream = SimpleNamespace(cuda_stream=0)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: stream)
    return module


def made(outputs: int, inputs: int, size: int) -> Fp4Weight:
    """Scales are small and large; those of nvfp4 are multiplied by powers of two.

    So the reference need not round its numbers, as kernels do not.
    """
    rows = torch.randn(outputs, inputs) * torch.logspace(-3, 0, outputs)[:, None]
    weight = round_fp4(rows, size, rounds=False)
    if weight.outer is not None:
        weight.outer.data = torch.exp2(torch.randint(-9, -6, (outputs,)).double())
    return weight


def operands(weight: Fp4Weight, x: Tensor) -> Operands:
    return Operands(x, weight.codes, fp4=Fp4Scales(weight.scales, weight.outer))


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
@pytest.mark.parametrize(("rows", "outputs", "inputs"), [(3, 128, 256), (33, 200, 512)])
def test_products(kernels: Any, size: int, rows: int, outputs: int, inputs: int) -> None:
    """Outputs that no block divides; programs share inputs, and counters end as zeros."""
    torch.manual_seed(rows)
    weight = made(outputs, inputs, size)
    x, bias = torch.randn(rows, inputs), torch.linspace(-1, 1, outputs)
    for added in (None, bias):
        y = torch.full((rows, outputs), float("nan"))
        kernels.fp4_product(operands(weight, x), added, y)
        wanted = F.linear(x, weight[:].float(), added)
        assert float((y - wanted).norm() / wanted.norm()) < 1e-6
    _, arrived = kernels.product_memory(None, None)
    assert not arrived.any()


@pytest.mark.parametrize("size", [NVFP4, MXFP4])
def test_numbers_are_the_references(kernels: Any, size: int) -> None:
    """To the bit; those that are rounded to bfloat16, which the interpreter cuts, on GPUs alone."""
    torch.manual_seed(size)
    weight = made(96, 256, size)
    found = kernels.dequantise_fp4(operands(weight, torch.empty(1, 256)), torch.empty(96, 256))
    assert torch.equal(found, weight[:])
